"""One training process: joins its peers, runs the stage, and leaves a note when it fails.

Started by the host's supervisor with the variables that torchrun sets and one JSON file of paths.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.failures import ExitCode, Failure
from contracts.layout import RunLayout, StageLayout
from training_container.checkpoints.stop import StopSignal
from training_container.cluster.beacon import Beacon, note_step
from training_container.failure import StageError, failure_of, note_rank_failure
from training_container.logs import set_up_logging

if TYPE_CHECKING:
    from training_container.checkpoints.checkpointer import SpoolCheckpointer
    from training_container.engine.distributed import World

__all__ = ["RankConfig", "main", "make_checkpointer", "run_rank"]

log = logging.getLogger("grpohub.rank")


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What all ranks of a host share. Paths are strings, because this travels as JSON."""

    bucket: str
    run_id: str
    stage_index: int
    stage: str
    attempt: int
    generation: str
    local_ranks: int
    spec: str
    """spec.json, already verified."""
    model: str
    train: str
    validation: str | None
    code: str
    output: str
    """metrics.jsonl, rollouts/, tensorboard/."""
    export: str
    spool: str
    notes: str
    """Folder for failure notes."""
    resume: str | None
    """Opened checkpoint to resume from."""
    weights: str | None
    """Opened checkpoint of an earlier stage to continue from."""
    interval_seconds: float
    pinned_steps: tuple[int, ...]
    best_metric: str | None

    @property
    def layout(self) -> StageLayout:
        return RunLayout(self.run_id).stage(self.stage_index, self.stage)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> RankConfig:
        values = json.loads(path.read_text())
        return cls(**{**values, "pinned_steps": tuple(values["pinned_steps"])})


Work = Callable[[RankConfig, StopSignal], bool]
"""Trains; True when the stage is complete, False when it was stopped."""


def train(config: RankConfig, stop: StopSignal) -> bool:
    """The stage of the run file, on this rank."""
    # Imported here: torch and transformers take seconds, and SIGTERM must be handled before that.
    from contracts.run_spec import parse_run_spec
    from training_container.engine.distributed import init_distributed
    from training_container.inputs import read_secret, secret_ids
    from training_container.trainer import StageInputs, run_stage

    spec = parse_run_spec(json.loads(Path(config.spec).read_text()))
    world = init_distributed()
    checkpointer = make_checkpointer(config, world, stop)
    inputs = StageInputs(
        train=Path(config.train),
        validation=Path(config.validation) if config.validation else None,
        model=Path(config.model),
        code=Path(config.code),
        output=Path(config.output),
        export=Path(config.export),
    )
    secrets = {name: read_secret(name) for name in secret_ids(spec)} if world.is_leader else {}
    try:
        result = run_stage(
            spec,
            config.stage_index,
            inputs,
            world=world,
            checkpointer=checkpointer,
            run_id=config.run_id,
            attempt=config.attempt,
            generation=config.generation,
            secrets=secrets,
        )
    finally:
        checkpointer.close()
    world.close()
    return result.completed


def make_checkpointer(config: RankConfig, world: World, stop: StopSignal) -> SpoolCheckpointer:
    """The checkpointer of this rank, from the host's configuration."""
    from training_container.checkpoints.checkpointer import CheckpointRules, SpoolCheckpointer
    from training_container.checkpoints.fence import ControlWatch
    from training_container.checkpoints.spool import Spool
    from training_container.checkpoints.store import Store

    watch = None
    if world.is_leader:
        watch = ControlWatch(Store(config.bucket), config.layout.control, config.attempt)
    return SpoolCheckpointer(
        world,
        Spool(Path(config.spool), config.local_ranks),
        CheckpointRules(
            config.interval_seconds, frozenset(config.pinned_steps), config.best_metric
        ),
        local_rank=int(os.environ["LOCAL_RANK"]),
        resume=Path(config.resume) if config.resume else None,
        weights=Path(config.weights) if config.weights else None,
        stop=stop,
        watch=watch,
        on_step=partial(note_step, Path(config.notes), world.rank),
    )


def run_rank(config: RankConfig, rank: int, work: Work = train) -> ExitCode:
    """Run ``work`` and turn what comes of it into an exit code and, if need be, a note."""
    stop = StopSignal()
    stop.install()
    Beacon(Path(config.notes), rank).start()
    try:
        return ExitCode.OK if work(config, stop) else ExitCode.STOPPED
    except Exception as error:
        log.exception("rank %d failed", rank)
        failure = named_failure(error)
        note_rank_failure(Path(config.notes), rank, failure)
        return failure.code


def named_failure(error: Exception) -> Failure:
    """The documented failure that an exception of the engine or of the rewards means."""
    if isinstance(error, StageError):
        return failure_of(error)
    text = f"{type(error).__name__}: {error}"
    for kind, code in _codes().items():
        if isinstance(error, kind):
            return Failure(code, text)
    # Gloo has no exception type of its own: a lost peer is a RuntimeError that names its source.
    if isinstance(error, RuntimeError) and "gloo" in str(error):
        return Failure(ExitCode.CLUSTER, text)
    return failure_of(error)


def _codes() -> Mapping[type[Exception], ExitCode]:
    import torch.distributed as dist

    from contracts.problems import InvalidInputError
    from training_container.engine import errors
    from training_container.rewards.interface import (
        GroundTruthError,
        RewardConfigError,
        RewardError,
    )

    return {
        errors.DataError: ExitCode.DATA,
        errors.NonFiniteError: ExitCode.NON_FINITE,
        errors.ExportError: ExitCode.EXPORT,
        GroundTruthError: ExitCode.DATA,
        RewardConfigError: ExitCode.REWARD,
        RewardError: ExitCode.REWARD,
        InvalidInputError: ExitCode.BAD_INPUT,
        dist.DistError: ExitCode.CLUSTER,
    }


def main(argv: list[str], work: Work = train) -> int:
    """`python -m training_container.rank <config file>`."""
    set_up_logging()
    config = RankConfig.load(Path(argv[0]))
    code = run_rank(config, int(os.environ["RANK"]), work)
    # A thread of a library must not keep a failed rank alive; everything of ours is on disk.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main(sys.argv[1:])
