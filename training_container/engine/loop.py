"""The loop that both methods share: step, validate, record, checkpoint, until the plan ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from contracts.compute import KeepBestSpec
from contracts.stages import ValidationSpec
from training_container.engine.clock import PhaseClock
from training_container.engine.distributed import World
from training_container.engine.schedule import Plan
from training_container.engine.seeds import seed_everything
from training_container.engine.state import Checkpointer, Decision, TrainState
from training_container.metrics import Metric

__all__ = ["Method", "Metrics", "Record", "run_loop"]

Metrics = dict[str, Metric]
Record = Callable[[int, Metrics], None]
"""Writes a step's row (leader); does nothing elsewhere."""


class Method(Protocol):
    """What SFT and GRPO differ in."""

    def begin(self, step: int) -> None:
        """Called once, after a restore, before anything else; ``step`` is the last finished one."""

    def step(self, step: int, clock: PhaseClock) -> Metrics:
        """Train one step and advance `Progress.position`; the step's metrics."""

    def validate(self, step: int) -> dict[str, float]:
        """`validation/...` metrics of the current weights; empty without validation data."""


def run_loop(
    method: Method,
    state: TrainState,
    plan: Plan,
    checkpointer: Checkpointer,
    record: Record,
    *,
    world: World,
    seed: int,
    validation: ValidationSpec,
    keep_best: KeepBestSpec | None,
) -> bool:
    """Train until the plan ends (True) or the checkpointer says stop (False).

    Step numbers start at 1. Row 0 is the validation before training.
    """
    progress = state.progress
    resumed = checkpointer.restore(state)
    method.begin(progress.step)
    if not resumed and validation.before_train:
        first = method.validate(0)
        progress.validation = first
        if first:
            record(0, {**first})
    while not plan.ends(progress.step, progress.position):
        step = progress.step + 1
        clock = PhaseClock()
        seed_everything(seed, "step", step, world.rank)
        metrics = method.step(step, clock)
        progress.step = step
        last = plan.ends(step, progress.position)
        if last or step % validation.every_steps == 0:
            with clock.phase("validation"):
                progress.validation = method.validate(step)
            metrics |= progress.validation
            if keep_best is not None and keep_best.metric in progress.validation:
                progress.consider(keep_best.metric, keep_best.mode, progress.validation, step)
        if keep_best is not None and keep_best.metric not in progress.validation:
            progress.consider(keep_best.metric, keep_best.mode, metrics, step)
        metrics |= clock.metrics() | checkpointer.take_metrics()
        record(step, metrics)
        decision = checkpointer.after_step(
            state, step, metrics, last=last, step_seconds=clock.total
        )
        if decision is Decision.STOP and not last:
            return False
    return True
