"""What a container has prepared, and what it tells the processes that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training_container.checkpoints.open import OpenedCheckpoint
from training_container.checkpoints.store import Store
from training_container.checkpoints.uploader import UploaderConfig
from training_container.inputs import AttemptInputs, pinned_steps
from training_container.rank import RankConfig
from training_container.sagemaker_env import SageMakerEnv

__all__ = ["Host", "rank_config", "uploader_config"]


@dataclass(frozen=True, slots=True)
class Host:
    """What this container has prepared before its processes start."""

    env: SageMakerEnv
    inputs: AttemptInputs
    store: Store
    work: Path
    generation: str
    model: Path
    resume: OpenedCheckpoint | None
    weights: OpenedCheckpoint | None


def uploader_config(host: Host) -> UploaderConfig:
    """What the uploader process is told."""
    config, spec, env = host.inputs.config, host.inputs.spec, host.env
    best = spec.checkpoint.keep_best
    return UploaderConfig(
        bucket=config.bucket,
        run_id=config.run_id,
        stage_index=config.stage_index,
        stage=config.stage,
        attempt=config.attempt,
        generation=host.generation,
        host_rank=env.host_rank,
        num_hosts=env.num_hosts,
        world_size=env.world_size,
        local_ranks=env.ranks_per_host,
        spool=str(host.work / "spool"),
        outputs=str(host.work / "output"),
        keep=spec.checkpoint.keep,
        pinned_steps=tuple(sorted(pinned_steps(host.inputs))),
        best_metric=best.metric if best else None,
        best_mode=best.mode if best else "max",
    )


def rank_config(host: Host) -> RankConfig:
    """What all ranks of this host are told."""
    config, spec, env, work = host.inputs.config, host.inputs.spec, host.env, host.work
    best = spec.checkpoint.keep_best
    validates = host.inputs.stage.data.validation is not None
    return RankConfig(
        bucket=config.bucket,
        run_id=config.run_id,
        stage_index=config.stage_index,
        stage=config.stage,
        attempt=config.attempt,
        generation=host.generation,
        local_ranks=env.ranks_per_host,
        spec=str(work / "spec.json"),
        model=str(host.model),
        train=str(env.channel("train")),
        validation=str(env.channel("validation")) if validates else None,
        code=str(work / "code"),
        output=str(work / "output"),
        export=str(work / "export"),
        spool=str(work / "spool"),
        notes=str(work / "notes"),
        resume=str(host.resume.folder) if host.resume else None,
        weights=str(host.weights.folder) if host.weights else None,
        interval_seconds=spec.checkpoint.every_minutes * 60,
        pinned_steps=tuple(sorted(pinned_steps(host.inputs))),
        best_metric=best.metric if best else None,
    )
