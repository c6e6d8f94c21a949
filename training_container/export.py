"""The trained model as a Hugging Face folder, checked before anybody hears of it.

Adapters are merged; the adapter itself is written too when the stage asks for it. `model.json`
lists every file with its sha256 and is written last, after the folder has been reloaded as a user
would and its log-probs compared with the policy's own.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from contracts.model_manifest import ManifestFile, ModelManifest
from training_container.engine.batches import TokenSequence
from training_container.engine.errors import ExportError
from training_container.engine.lora import adapter_weights, lora_config
from training_container.engine.policy import Policy
from training_container.engine.probe import disagreement, probe

__all__ = ["ADAPTER_FOLDER", "MANIFEST", "ModelOrigin", "export_model"]

log = logging.getLogger(__name__)
MANIFEST = "model.json"
ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Where an exported model comes from, for its manifest."""

    run_id: str
    stage: str
    step: int
    base_model: str
    metrics: dict[str, float]
    trust_remote_code: bool = False
    """`model.trust_remote_code`: the folder's own code runs when the export is reloaded."""


def export_model(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, origin: ModelOrigin
) -> ModelManifest:
    """Write the model to ``folder`` on the leader; its manifest, on every rank.

    Every rank must call it: gathering shards is a collective. Weights are written in the type they
    were computed with.

    Raises:
        ExportError: when the reloaded model does not compute what the policy computes.
    """
    sequence = probe(policy.model.config)
    expected = policy.log_probs([sequence])  # a single sequence is always the leader's
    dtype = policy.passes.dtype
    keep = policy.world.is_leader
    weights = {n: w.to("cpu", dtype) for n, w in policy.full_weights() if keep}
    factors: dict[str, Tensor] = {}
    if policy.lora is not None and policy.lora.export_adapter:
        state = policy.model.state_dict()
        factors = {n: w.cpu().contiguous() for n, w in adapter_weights(state) if keep}

    def write() -> ModelManifest:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        policy.model.config.dtype = dtype
        policy.model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        if factors:
            _write_adapter(policy, factors, folder / ADAPTER_FOLDER, origin.base_model)
        _compare(
            folder,
            tokenizer,
            sequence,
            expected[0],
            dtype,
            trust_remote_code=origin.trust_remote_code,
        )
        return _write_manifest(folder, policy, origin, adapter=bool(factors))

    return policy.world.lead(write)


def _write_adapter(policy: Policy, factors: dict[str, Tensor], folder: Path, base: str) -> None:
    assert policy.lora is not None
    config = lora_config(policy.lora)
    config.base_model_name_or_path = base
    config.inference_mode = True
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _compare(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sequence: TokenSequence,
    expected_T: Tensor,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
) -> None:
    """Reload by the model's own forward pass, which shares no code with the trainer's.

    Raises:
        ExportError: naming what differs.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
        reloaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"the exported model does not load: {error}") from error
    if reloaded.chat_template != tokenizer.chat_template:
        raise ExportError("the exported tokenizer has lost its chat template")
    with torch.no_grad():
        logits_L_V = model.eval()(input_ids=sequence.ids[None]).logits[0, :-1].float()
    found_T = logits_L_V.log_softmax(-1).gather(1, sequence.ids[1:, None]).squeeze(1)
    difference = disagreement(found_T, expected_T, dtype)
    if difference is not None:
        raise ExportError(f"the exported model is not the policy: {difference}")
    log.info("exported model reproduces the policy")


def _write_manifest(
    folder: Path, policy: Policy, origin: ModelOrigin, *, adapter: bool
) -> ModelManifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = ModelManifest(
        run_id=origin.run_id,
        stage=origin.stage,
        step=origin.step,
        architecture=type(policy.model).__name__,
        parameters=policy.parameters,
        dtype=str(policy.passes.dtype).removeprefix("torch."),
        base_model=origin.base_model,
        adapter=ADAPTER_FOLDER if adapter else None,
        metrics=origin.metrics,
        files=tuple(
            ManifestFile(
                path=path.relative_to(folder).as_posix(),
                size=path.stat().st_size,
                sha256=_sha256(path),
            )
            for path in files
        ),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
