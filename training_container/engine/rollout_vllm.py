"""Sampling answers with vLLM, one engine in each rank's process.

Weights are pushed by vLLM's own `reload_weights`, and proved: after the first push, and again after
a resume, the engine's log-probs of a probe must equal the policy's. The push alone reports success
even when the engine goes on with old weights.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from contracts.failures import ExitCode
from contracts.stages import RolloutSpec
from training_container.engine.errors import WeightSyncError
from training_container.engine.policy import Policy
from training_container.engine.probe import disagreement, probe
from training_container.engine.rollout import Completion, Sampling
from training_container.failure import StageError

__all__ = ["VllmRollout", "WeightsExtension"]

_CPU_ENVIRONMENT = {
    # Without it vLLM asks for 92% of the machine's memory (GiB).
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Binding to cores spins against other processes; measured ten times slower under load.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class WeightsExtension:
    """Mixed into vLLM's worker by its `worker_extension_cls` option; `self` is the worker."""

    def push_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace all weights. In the worker's own process, so tensors need no copy."""
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
        _tie_again(self.model_runner.get_model())  # type: ignore[attr-defined]


def _tie_again(model: nn.Module) -> None:
    """On CPU a tied output layer keeps a packed copy of the *old* embeddings after a reload; pack
    it anew from the new ones."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not model.config.tie_word_embeddings:
        return
    if model.lm_head is not model.model.embed_tokens:
        model.lm_head.weight = model.model.embed_tokens.weight
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


class VllmRollout:
    """See `rollout.RolloutEngine`."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        spec: RolloutSpec,
        *,
        stop_ids: frozenset[int],
        max_prompt_length: int,
        code: Path | None = None,
    ) -> None:
        """``code``: a model folder whose own Python files may run.

        Raises:
            StageError: BAD_INPUT or OUT_OF_MEMORY, when vLLM refuses the settings.
        """
        self.version = -1
        self._stop_ids = sorted(stop_ids)
        self._dtype = policy.passes.dtype
        self._proved = False
        self._max_model_len = max_prompt_length + spec.max_response_length
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-model-")
        folder = Path(self._folder.name)
        # vLLM wants a model folder; its weights come with the first sync.
        config = copy.deepcopy(policy.model.config)
        # Without the name vLLM guesses, and takes some families for embedding models.
        config.architectures = [type(policy.model).__name__]
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in code.glob("*.py") if code is not None else ():
            shutil.copy(file, folder)
        self._llm = _engine(
            folder,
            trust_remote_code=code is not None,
            on_gpu=policy.world.device.type == "cuda",
            dtype=self._dtype,
            gpu_memory_utilization=spec.gpu_memory_utilization,
            max_model_len=self._max_model_len,
        )

    def sync(self, policy: Policy, version: int) -> None:
        """Push the policy's weights.

        Raises:
            WeightSyncError: when the engine then computes other log-probs than the policy.
        """
        # One after another: beside vLLM's own copy a GPU rarely has room for a second.
        weights = ((name, weight.to(self._dtype)) for name, weight in policy.full_weights())
        self._llm.collective_rpc("push_weights", args=(weights,))
        self._llm.reset_prefix_cache()  # computed with the old weights
        if not self._proved:
            self._prove(policy)
            self._proved = True
        self.version = version

    def _prove(self, policy: Policy) -> None:
        vllm = _vllm()
        sequence = probe(policy.model.config, self._max_model_len - 1)  # the engine adds a token
        ids = sequence.ids.tolist()
        # One probe for each rank: equal lengths are dealt in turn.
        (expected_T,) = policy.log_probs([sequence] * policy.world.size).values()
        (output,) = self._llm.generate(
            [{"prompt_token_ids": ids}],
            vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0),
            use_tqdm=False,
        )
        found = [entry[token].logprob for token, entry in _scored(ids, output.prompt_logprobs)]
        difference = disagreement(torch.tensor(found), expected_T, self._dtype)
        if difference is not None:
            raise WeightSyncError(
                f"vLLM is not the policy after its weights were pushed: {difference}"
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        vllm = _vllm()
        parameters = [
            vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                max_tokens=sampling.max_tokens,
                seed=seed,
                stop_token_ids=self._stop_ids,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False
        )
        answers = [output.outputs[0] for output in outputs]
        return [
            Completion(tuple(answer.token_ids), answer.finish_reason == "stop")
            for answer in answers
        ]

    def close(self) -> None:
        del self._llm
        self._folder.cleanup()


def _vllm() -> Any:
    """vLLM, imported late: it takes seconds, and CPU jobs have none."""
    try:
        import vllm
    except ImportError as error:
        raise StageError(
            ExitCode.BAD_INPUT, "rollout.engine `vllm` needs vLLM in the training image"
        ) from error
    return vllm


def _engine(
    folder: Path,
    *,
    on_gpu: bool,
    dtype: torch.dtype,
    gpu_memory_utilization: float,
    max_model_len: int,
    trust_remote_code: bool,
) -> Any:
    # In this process: tensors of a weight push do not survive vLLM's own RPC.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    options: dict[str, Any] = {}
    if on_gpu:
        # The launcher that torchrun's variables describe; the default would take GPU 0 everywhere.
        options["distributed_executor_backend"] = "external_launcher"
        options["gpu_memory_utilization"] = gpu_memory_utilization
    else:
        for name, value in _CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options["enforce_eager"] = True  # compiling costs 50 s and gains a tenth
    try:
        return _vllm().LLM(
            model=str(folder),
            dtype=str(dtype).removeprefix("torch."),
            load_format="dummy",
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            worker_extension_cls=f"{__name__}.{WeightsExtension.__name__}",
            generation_config="vllm",  # sampling is the run file's, not the model folder's
            **options,
        )
    except ValueError as error:
        # Settings that do not fit model or GPU: the next attempt would fail as this one did.
        short = "memory" in str(error).lower()
        code = ExitCode.OUT_OF_MEMORY if short else ExitCode.BAD_INPUT
        raise StageError(
            code,
            f"vLLM does not start with max_prompt_length + max_response_length = {max_model_len} "
            f"and gpu_memory_utilization = {gpu_memory_utilization:g}: {error}",
        ) from error


def _scored(ids: Sequence[int], entries: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """Prompt tokens with their log-prob entries; the first token has none."""
    return zip(ids[1:], entries[1:], strict=True)
