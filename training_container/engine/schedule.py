"""How long a stage runs, and each step's learning rate: pure functions of the step number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.stages import GrpoStage, OptimizerSpec, SftStage
from training_container.engine.errors import DataError

__all__ = ["Plan", "learning_rate", "plan_steps"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The end of a stage."""

    rows: int
    rows_per_step: int
    max_steps: int | None
    epochs: int | None

    @property
    def steps(self) -> int:
        """Steps when no step draws more rows than planned (dynamic sampling may)."""
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None:
            limits.append(self.epochs * self.rows // self.rows_per_step)
        return min(limits)

    def ends(self, step: int, position: int) -> bool:
        """Whether the stage is over after ``step`` with ``position`` rows drawn."""
        if self.max_steps is not None and step >= self.max_steps:
            return True
        return self.epochs is not None and (position + self.rows_per_step > self.epochs * self.rows)


def plan_steps(stage: SftStage | GrpoStage, rows: int) -> Plan:
    """The plan of ``stage`` over ``rows`` rows.

    Raises:
        DataError: when all epochs together hold fewer rows than one step needs.
    """
    per_step = stage.sft.batch_size if isinstance(stage, SftStage) else stage.grpo.prompts_per_step
    plan = Plan(rows, per_step, stage.max_steps, stage.epochs)
    if plan.steps < 1:
        raise DataError(
            f"{stage.epochs} epochs of {rows} rows are fewer than the {per_step} rows of one step"
        )
    return plan


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Learning rate of ``step`` (from 1).

    Linear warm-up over `warmup_steps`, then the shape over the remaining steps: `linear` and
    `cosine` reach `min_lr_ratio` of the peak at the last step.
    """
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    if spec.lr_scheduler == "constant":
        return spec.learning_rate
    done = (step - spec.warmup_steps) / max(1, total_steps - spec.warmup_steps)
    done = min(done, 1.0)
    shape = 1.0 - done if spec.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.learning_rate * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * shape)
