"""A run with its stages and attempts, as one consistent read gives them."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.states import AttemptState, RunState, StageState
from lambdas.logic.records import AttemptRecord, RunRecord, StageRecord

__all__ = ["RunFolder"]

_OVER = (RunState.CANCELLING, RunState.CANCELLED, RunState.FAILED)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything the table holds of a run, but its timeline."""

    run: RunRecord
    stages: tuple[StageRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    """By stage, then number."""

    @property
    def over(self) -> bool:
        """No job of this run may live."""
        return self.run.state in _OVER

    @property
    def current_stage(self) -> StageRecord | None:
        """The first stage that has not succeeded; None when all have."""
        return next((s for s in self.stages if s.state is not StageState.SUCCEEDED), None)

    def attempts_of(self, stage_index: int) -> tuple[AttemptRecord, ...]:
        """Attempts of a stage, oldest first."""
        return tuple(a for a in self.attempts if a.stage_index == stage_index)

    def attempt(self, stage_index: int, number: int) -> AttemptRecord | None:
        """One attempt."""
        return next(
            (a for a in self.attempts if (a.stage_index, a.number) == (stage_index, number)), None
        )

    @property
    def live_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempts that have not ended; by the fence at most one."""
        return tuple(a for a in self.attempts if a.state is not AttemptState.ENDED)

    @property
    def spent_seconds(self) -> int:
        """Training time that counts against max_runtime_hours: all since the budgets were last
        reset."""
        since = {stage.index: stage.budget_from for stage in self.stages}
        return sum(
            attempt.training_seconds or 0
            for attempt in self.attempts
            if attempt.number > since[attempt.stage_index]
        )
