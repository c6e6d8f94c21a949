"""One stage, straight through: data, rewards, model, resume, train, export.

Nothing here knows S3 or SageMaker: inputs are folders, checkpoints go through a `Checkpointer`, and
what comes out is a folder with a verified model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from contracts.failures import ExitCode
from contracts.model_manifest import ModelManifest
from contracts.run_spec import RunSpec
from contracts.stages import GrpoStage, SftStage
from training_container.engine.batches import TokenSequence
from training_container.engine.conversations import conversations
from training_container.engine.data import (
    Row,
    check_columns,
    data_files,
    file_fingerprint,
    load_rows,
)
from training_container.engine.distributed import World
from training_container.engine.errors import DataError
from training_container.engine.experience import Scorer
from training_container.engine.grpo import Grpo
from training_container.engine.loading import empty_model, load_model
from training_container.engine.loop import Metrics, run_loop
from training_container.engine.policy import Policy
from training_container.engine.prompts import (
    Message,
    Prompt,
    PromptRenderer,
    keep_short,
    prepare_tokenizer,
)
from training_container.engine.reference import AdapterReference, FrozenReference
from training_container.engine.rollout import HfRollout, RolloutEngine
from training_container.engine.schedule import plan_steps
from training_container.engine.sft import Sft
from training_container.engine.state import Checkpointer, PolicyWeights, Progress, TrainState
from training_container.export import ModelOrigin, export_model
from training_container.failure import StageError, write_atomically
from training_container.metrics import MetricsWriter, RunIdentity, trackers
from training_container.rewards.interface import RewardConfigError, Sample
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext

__all__ = ["StageData", "StageInputs", "StageResult", "run_stage"]

log = logging.getLogger(__name__)
_DRY_RUN_ROWS = 4


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Folders on this host."""

    train: Path
    validation: Path | None
    model: Path
    code: Path
    """The run's frozen user files: templates and reward code."""
    output: Path
    """metrics.jsonl, rollouts/, tensorboard/, sample_prompt.json."""
    export: Path
    """Where the trained model is written."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage came out."""

    step: int
    manifest: ModelManifest | None
    """The exported model's; None when the stage was stopped before its end."""

    @property
    def completed(self) -> bool:
        return self.manifest is not None


def run_stage(
    spec: RunSpec,
    stage_index: int,
    inputs: StageInputs,
    *,
    world: World,
    checkpointer: Checkpointer,
    run_id: str,
    attempt: int,
    generation: str,
    secrets: Mapping[str, str] | None = None,
) -> StageResult:
    """Train a stage from its newest checkpoint, or from its start, to its exported model.

    Called by every rank. ``secrets``: values of the secrets that trackers name, on the leader.

    Raises:
        StageError: with the documented exit code.
    """
    stage = spec.stages[stage_index]
    data = StageData.load(stage, inputs, trust_remote_code=spec.model.trust_remote_code)
    plane = _reward_plane(world, stage, data, inputs, run_id)  # probed before any weights load
    load = load_model if world.is_leader else empty_model  # the policy gets the leader's weights
    model = load(inputs.model, trust_remote_code=spec.model.trust_remote_code)
    if world.is_leader and checkpointer.load_weights(PolicyWeights(model)):
        log.info("weights of the named checkpoint loaded over the stage's model")
    frozen = _frozen_reference(model, stage, world)
    policy = Policy(model, stage, world)
    model_code = inputs.model if spec.model.trust_remote_code else None
    progress = Progress(data.fingerprint, _config_fingerprint(stage))
    plan = plan_steps(stage, data.rows)
    method: Sft | Grpo
    if isinstance(stage, SftStage):
        method = Sft(stage, world, policy, data.examples, data.validation_examples, plan, progress)
    else:
        method = Grpo(
            stage=stage,
            world=world,
            policy=policy,
            reference=frozen or (AdapterReference(policy) if stage.grpo.kl else None),
            rollout=_rollout_engine(stage, policy, data.tokenizer, code=model_code),
            scorer=Scorer(plane, world, data.tokenizer, stage.data.answer),
            source_names=tuple(source.name for source in stage.rewards),
            weights_K=torch.tensor([s.weight for s in stage.rewards], dtype=torch.float64),
            prompts=data.prompts,
            validation_prompts=data.validation_prompts,
            plan=plan,
            progress=progress,
            output=inputs.output,
        )
    identity = RunIdentity(run_id, stage.name, stage.method, attempt, generation)
    writer = _writer(
        world,
        spec,
        stage=stage,
        identity=identity,
        output=inputs.output,
        secrets=secrets or {},
    )
    if world.is_leader:
        _leave_question(data, inputs.output)
    latest: Metrics = {}

    def record(step: int, metrics: Metrics) -> None:
        latest.update(metrics)
        if writer is not None:
            writer.write(step, metrics)

    try:
        done = run_loop(
            method,
            TrainState(policy, progress),
            plan,
            checkpointer,
            record,
            world=world,
            seed=stage.seed,
            validation=stage.validation,
            keep_best=spec.checkpoint.keep_best,
        )
    finally:
        if writer is not None:
            writer.close()
        if plane is not None:
            plane.close()
    if not done:
        return StageResult(progress.step, None)
    if isinstance(method, Grpo):
        method.rollout.close()
    origin = ModelOrigin(
        run_id=run_id,
        stage=stage.name,
        step=progress.step,
        base_model=spec.model.source,
        metrics=_final_metrics(latest, progress),
        trust_remote_code=spec.model.trust_remote_code,
    )
    if plane is not None:
        shutil.rmtree(_judgements(run_id, stage.name), ignore_errors=True)
    return StageResult(progress.step, export_model(policy, data.tokenizer, inputs.export, origin))


@dataclass(frozen=True)
class StageData:
    """A stage's rows, rendered and tokenized; what is too long is already dropped."""

    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    columns: tuple[str, ...]
    prompts: list[Prompt]
    validation_prompts: list[Prompt]
    examples: list[TokenSequence]
    validation_examples: list[TokenSequence]
    question: list[Message]
    """Messages of the first validation (else training) row: what the endpoint is asked first."""

    @property
    def rows(self) -> int:
        """Training rows that are left."""
        return len(self.prompts) or len(self.examples)

    @classmethod
    def load(
        cls, stage: SftStage | GrpoStage, inputs: StageInputs, *, trust_remote_code: bool
    ) -> StageData:
        """Read, check, render and tokenize.

        Raises:
            DataError: before any weights load, naming file, row or column.
        """
        tokenizer = _tokenizer(inputs.model, trust_remote_code)
        prepare_tokenizer(tokenizer, stage.prompt, inputs.code)
        renderer = PromptRenderer(stage.prompt, stage.data, tokenizer, inputs.code)
        files = data_files(inputs.train)
        rows = load_rows(files)
        held_out: list[Row] = []
        if inputs.validation is not None:
            held_out = load_rows(data_files(inputs.validation))[: stage.validation.max_rows]
        is_sft = isinstance(stage, SftStage)
        check_columns(rows, stage.data, answer_required=is_sft)
        check_columns(held_out, stage.data, answer_required=is_sft)
        prompts, held_prompts = [], []
        examples, held_examples = [], []
        if isinstance(stage, SftStage):
            limit = stage.sft.max_length
            examples = conversations(renderer, rows, limit, what="training data")
            if held_out:
                held_examples = conversations(renderer, held_out, limit, what="validation data")
        else:
            limit = stage.prompt.max_prompt_length
            prompts = keep_short(renderer.prompts(rows), limit, what="training data")
            if held_out:
                held_prompts = keep_short(renderer.prompts(held_out), limit, what="validation data")
        kept = len(prompts) or len(examples)
        fingerprint = hashlib.sha256(f"{file_fingerprint(files)} {kept}".encode()).hexdigest()
        columns = tuple(dict.fromkeys(name for row in rows for name in row))
        asked = held_prompts or prompts
        question = list(asked[0].messages) if asked else renderer.messages((held_out or rows)[0])
        return cls(
            tokenizer,
            fingerprint,
            columns,
            prompts,
            held_prompts,
            examples,
            held_examples,
            question,
        )


def _tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer can be loaded from {folder}: {error}") from error


def _config_fingerprint(stage: SftStage | GrpoStage) -> str:
    return hashlib.sha256(stage.model_dump_json().encode()).hexdigest()


def _reward_plane(
    world: World,
    stage: SftStage | GrpoStage,
    data: StageData,
    inputs: StageInputs,
    run_id: str,
) -> RewardPlane | None:
    """The leader's reward sources, loaded and tried on real rows; None elsewhere and in SFT.

    Raises:
        StageError: REWARD, on every rank, with what to do about it.
    """
    if not isinstance(stage, GrpoStage):
        return None
    planes: list[RewardPlane] = []

    def prepare() -> None:
        context = SourceContext(
            files=inputs.code,
            columns=data.columns,
            read_paths=(str(inputs.train),),
            cache=_judgements(run_id, stage.name),
        )
        try:
            plane = RewardPlane(stage.rewards, context)
            planes.append(plane)
            plane.prepare()
            plane.dry_run(_dry_run_samples(data.prompts[:_DRY_RUN_ROWS], stage.data.answer))
        except RewardConfigError as error:
            raise StageError(ExitCode.REWARD, str(error)) from error

    world.lead(prepare)
    return planes[0] if planes else None


def _judgements(run_id: str, stage: str) -> Path:
    """What judges said in this stage: beside the scratch folder, which an incarnation empties."""
    return Path(tempfile.gettempdir()) / f"grpohub-judgements-{run_id}-{stage}"


def _dry_run_samples(prompts: Sequence[Prompt], answer: str | None) -> list[Sample]:
    """Rows with their reference answer in place of a completion."""
    truths = [None if answer is None else prompt.row.get(answer) for prompt in prompts]
    return [
        Sample(
            completion=truth if isinstance(truth, str) else "",
            prompt=prompt.messages,
            response_length=1,
            ground_truth=truth,
            columns=prompt.row,
        )
        for prompt, truth in zip(prompts, truths, strict=True)
    ]


def _frozen_reference(
    model: PreTrainedModel, stage: SftStage | GrpoStage, world: World
) -> FrozenReference | None:
    """A copy of the starting weights when KL needs one; an adapter's base is its own reference."""
    if isinstance(stage, SftStage) or stage.grpo.kl is None or stage.lora is not None:
        return None
    return FrozenReference(model, stage, world)


def _rollout_engine(
    stage: GrpoStage, policy: Policy, tokenizer: PreTrainedTokenizerBase, *, code: Path | None
) -> RolloutEngine:
    """vLLM where it is asked for or a GPU is; else generation with transformers. ``code``: the
    folder whose model code may run."""
    engine, device = stage.rollout.engine, policy.world.device
    stop_ids = _stop_ids(policy.model, tokenizer)
    if engine == "vllm" or (engine == "auto" and device.type == "cuda"):
        from training_container.engine.rollout_vllm import VllmRollout

        return VllmRollout(
            policy,
            tokenizer,
            stage.rollout,
            stop_ids=stop_ids,
            max_prompt_length=stage.prompt.max_prompt_length,
            code=code,
        )
    return HfRollout(
        policy,
        stop_ids=stop_ids,
        batch_size=stage.rollout.batch_size,
        dtype=policy.passes.dtype,
    )


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer: chat models often have two."""
    config = model.generation_config
    found = config.eos_token_id if config is not None else None
    ids = {found} if isinstance(found, int) else set(found or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise DataError("neither the model nor its tokenizer names an end-of-sequence token")
    return frozenset(ids)


def _writer(
    world: World,
    spec: RunSpec,
    *,
    stage: SftStage | GrpoStage,
    identity: RunIdentity,
    output: Path,
    secrets: Mapping[str, str],
) -> MetricsWriter | None:
    if not world.is_leader:
        return None
    sources = [source.name for source in stage.rewards] if isinstance(stage, GrpoStage) else []
    return MetricsWriter(
        output,
        identity,
        sources=sources,
        trackers=trackers(spec.tracking, identity, output, secrets),
    )


def _leave_question(data: StageData, output: Path) -> None:
    """For the endpoint's smoke test: rendered here, where every data format can be read."""
    output.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"messages": data.question}, ensure_ascii=False)
    write_atomically(output / "sample_prompt.json", body.encode())


def _final_metrics(latest: Metrics, progress: Progress) -> dict[str, float]:
    """Numbers of the last step and the newest validation, for the model's manifest."""
    numbers = {n: float(v) for n, v in latest.items() if isinstance(v, int | float)}
    wanted = ("reward", "loss", "kl/k3")
    return {
        **{name: numbers[name] for name in wanted if name in numbers},
        **progress.validation,
    }
