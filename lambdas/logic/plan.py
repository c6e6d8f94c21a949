"""Which attempt comes next: rung, pause, resume floor and time left; or that a budget is spent.

Budgets are separate, so that a crash loop ends and an unlucky Spot week does not.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contracts.attempt import CheckpointRef
from contracts.run_spec import RunSpec
from contracts.states import Outcome, RunState
from lambdas.logic.records import AttemptRecord, StopReason

__all__ = [
    "ATTEMPT_EVENTS",
    "HISTORY_EVENTS",
    "LONGEST_PAUSE",
    "PAUSE_EVENTS",
    "GiveUp",
    "Plan",
    "longest_pause",
    "plan_attempt",
]

LONGEST_PAUSE = 3600
"""Seconds, as far as an execution's history has room for it (`longest_pause`)."""
HISTORY_EVENTS = 25_000
"""Step Functions ends an execution with more."""
ATTEMPT_EVENTS = 15
"""Of PlanAttempt (5), RoutePlan (2), SubmitAttempt (6) and RouteOutcome (2)."""
PAUSE_EVENTS = 2
_SPARE_EVENTS = 5_000
"""For all else that a run does."""
_HISTORY_LASTS = 30 * 86400
_LEAST_RUNTIME = 60
_SPARE_WAIT = 7 * 86400
_LONGEST_WAIT = 30 * 86400
"""SageMaker ends every job after 30 days."""
_NO_ROOM = (Outcome.OUT_OF_CAPACITY, Outcome.OUT_OF_QUOTA)


@dataclass(frozen=True, slots=True)
class Plan:
    """The next attempt."""

    number: int
    rung: int
    pause_seconds: int
    state: RunState
    """What the run does until the job is made: TRAINING, WAITING_CAPACITY or WAITING_QUOTA."""
    reason: str | None
    """Why it pauses, for the user."""
    max_runtime_seconds: int
    max_wait_seconds: int | None
    resume_floor: CheckpointRef | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further attempt: a budget is spent."""

    error: str
    cause: str


def plan_attempt(
    spec: RunSpec,
    attempts: Sequence[AttemptRecord],
    *,
    budget_from: int,
    newest: CheckpointRef | None,
    spent_seconds: int,
    budget_since: dt.datetime,
    now: dt.datetime,
) -> Plan | GiveUp:
    """Plan attempt ``len(attempts) + 1`` of a stage.

    Args:
        spec: the run file.
        attempts: this stage's attempts, all ended, oldest first.
        budget_from: attempts up to this number no longer count (the run was resumed).
        newest: newest complete checkpoint of the stage.
        spent_seconds: training time of the whole run that counts against max_runtime_hours.
        budget_since: since when waiting counts against max_wait_hours.
        now: current time.
    """
    counted = [attempt for attempt in attempts if attempt.number > budget_from]
    spent = _spent_budget(spec, counted, newest)
    if spent is not None:
        return spent
    rung = _next_rung(attempts, len(spec.compute.ladder))
    times = _times(spec, rung, spent_seconds, budget_since, now)
    if isinstance(times, GiveUp):
        return times
    pause, state, reason = _pause(spec, counted, newest)
    return Plan(
        number=(attempts[-1].number if attempts else 0) + 1,
        rung=rung,
        pause_seconds=pause,
        state=state,
        reason=reason,
        max_runtime_seconds=times[0],
        max_wait_seconds=times[1],
        resume_floor=newest,
    )


def _spent_budget(
    spec: RunSpec, counted: Sequence[AttemptRecord], newest: CheckpointRef | None
) -> GiveUp | None:
    failures = [a for a in counted if a.outcome is Outcome.INFRASTRUCTURE_FAILURE]
    allowed = spec.recovery.max_failures
    if len(failures) > allowed:
        last = failures[-1].reason or "no reason known"
        return GiveUp(
            "FailureBudgetSpent",
            f"{len(failures)} infrastructure failures, max_failures is {allowed}; the last: {last}",
        )
    stalled = _stalled(spec, counted, newest)
    if stalled >= spec.recovery.max_stalled_attempts:
        last = counted[-1].reason or "no reason known"
        return GiveUp(
            "NoProgress",
            f"{stalled} attempts in a row without a new complete checkpoint; the last: {last}",
        )
    return None


def _stalled(spec: RunSpec, counted: Sequence[AttemptRecord], newest: CheckpointRef | None) -> int:
    """Latest attempts in a row that had a fair chance of a checkpoint and made none.

    What an attempt made shows in the floor of the next one. An attempt without instances, or
    interrupted before its first save was due, had no fair chance: it neither counts nor breaks the
    row.
    """
    after = newest
    count = 0
    for attempt in reversed(counted):
        if _step(after) > _step(attempt.resume_floor):
            break
        long_enough = (attempt.training_seconds or 0) >= spec.checkpoint.every_minutes * 60
        if attempt.outcome is Outcome.INFRASTRUCTURE_FAILURE or (
            attempt.outcome not in _NO_ROOM and long_enough
        ):
            count += 1
        after = attempt.resume_floor
    return count


def _step(checkpoint: CheckpointRef | None) -> int:
    return -1 if checkpoint is None else checkpoint.step


def _next_rung(attempts: Sequence[AttemptRecord], rungs: int) -> int:
    """The last attempt's rung, or the one after it when its instances were not to be had."""
    if not attempts:
        return 0
    last = attempts[-1]
    return (last.rung + _moves_on(last)) % rungs


def _moves_on(attempt: AttemptRecord) -> bool:
    moved = attempt.outcome is Outcome.INTERRUPTED and attempt.stop_reason is StopReason.MOVED
    return attempt.outcome in _NO_ROOM or moved


def _times(
    spec: RunSpec, rung: int, spent_seconds: int, budget_since: dt.datetime, now: dt.datetime
) -> tuple[int, int | None] | GiveUp:
    """(MaxRuntimeInSeconds, MaxWaitTimeInSeconds or None on demand) of the next attempt."""
    compute = spec.compute
    runtime = int(compute.max_runtime_hours * 3600) - spent_seconds
    if runtime < _LEAST_RUNTIME:
        return GiveUp(
            "RuntimeBudgetSpent",
            f"max_runtime_hours ({compute.max_runtime_hours:g}) is used up by training",
        )
    wait = min(runtime + _SPARE_WAIT, _LONGEST_WAIT)
    if compute.max_wait_hours is not None:
        elapsed = int((now - budget_since).total_seconds())
        wait = int(compute.max_wait_hours * 3600) - elapsed
        if wait < _LEAST_RUNTIME:
            return GiveUp(
                "WaitBudgetSpent",
                f"max_wait_hours ({compute.max_wait_hours:g}) is used up by waiting and training",
            )
    runtime = min(runtime, wait)
    # SageMaker refuses MaxWaitTimeInSeconds without managed Spot, and one below
    # MaxRuntimeInSeconds.
    return runtime, wait if compute.ladder[rung].spot else None


def _pause(  # noqa: PLR0911 (one return per outcome)
    spec: RunSpec, counted: Sequence[AttemptRecord], newest: CheckpointRef | None
) -> tuple[int, RunState, str | None]:
    if not counted:
        return 0, RunState.TRAINING, None
    last = counted[-1]
    recovery = spec.recovery
    match last.outcome:
        case Outcome.OUT_OF_CAPACITY | Outcome.OUT_OF_QUOTA:
            row = _length(itertools.takewhile(lambda a: a.outcome in _NO_ROOM, reversed(counted)))
            rounds, within = divmod(row, len(spec.compute.ladder))
            if within:
                return 0, RunState.TRAINING, None
            longest = longest_pause(len(spec.compute.ladder))
            pause = _doubled(recovery.capacity_backoff_seconds, rounds, longest)
            quota = last.outcome is Outcome.OUT_OF_QUOTA
            state = RunState.WAITING_QUOTA if quota else RunState.WAITING_CAPACITY
            return pause, state, f"{last.reason or last.outcome.value}; next try in {pause} s"
        case Outcome.INTERRUPTED:
            row = _length(_fruitless(counted, newest))
            if row < 2:
                return 0, RunState.TRAINING, None
            pause = _doubled(recovery.capacity_backoff_seconds, row - 1)
            text = f"interrupted {row} times in a row without a checkpoint; next try in {pause} s"
            return pause, RunState.WAITING_CAPACITY, text
        case Outcome.INFRASTRUCTURE_FAILURE:
            failures = sum(a.outcome is Outcome.INFRASTRUCTURE_FAILURE for a in counted)
            pause = _doubled(recovery.failure_backoff_seconds, failures)
            return pause, RunState.TRAINING, f"{last.reason}; next try in {pause} s"
        case _:
            return 0, RunState.TRAINING, None


def _fruitless(
    counted: Sequence[AttemptRecord], newest: CheckpointRef | None
) -> Iterator[AttemptRecord]:
    """Latest interrupted attempts in a row that made no checkpoint."""
    after = newest
    for attempt in reversed(counted):
        fruitful = _step(after) > _step(attempt.resume_floor)
        if attempt.outcome is not Outcome.INTERRUPTED or fruitful:
            return
        yield attempt
        after = attempt.resume_floor


def longest_pause(rungs: int) -> int:
    """Seconds between two rounds over a ladder that has no room: an hour, or as long as lets 30
    days of such rounds into one execution's history."""
    events = rungs * ATTEMPT_EVENTS + PAUSE_EVENTS
    return max(LONGEST_PAUSE, math.ceil(_HISTORY_LASTS * events / (HISTORY_EVENTS - _SPARE_EVENTS)))


def _doubled(base: int, times: int, longest: int = LONGEST_PAUSE) -> int:
    """``base`` seconds the first time, then doubled each time, at most ``longest``."""
    return int(min(longest, base * 2 ** min(times - 1, 16)))


def _length(items: Iterator[AttemptRecord]) -> int:
    return sum(1 for _ in items)
