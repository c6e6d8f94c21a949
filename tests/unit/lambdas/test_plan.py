"""`plan_attempt`: ladder, pauses, budgets and time, as tables."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.attempt import CheckpointRef
from contracts.states import Outcome, RunState
from lambdas.logic.plan import (
    ATTEMPT_EVENTS,
    HISTORY_EVENTS,
    LONGEST_PAUSE,
    PAUSE_EVENTS,
    GiveUp,
    Plan,
    longest_pause,
    plan_attempt,
)
from lambdas.logic.records import AttemptRecord, StopReason
from tests.unit.lambdas.rows import NOW, ended, spec

C, Q, I = Outcome.OUT_OF_CAPACITY, Outcome.OUT_OF_QUOTA, Outcome.INTERRUPTED  # noqa: E741
F, T = Outcome.INFRASTRUCTURE_FAILURE, Outcome.TIMED_OUT


def at(step: int) -> CheckpointRef:
    return CheckpointRef(step=step, generation=f"g{step}")


def plan(attempts: list[AttemptRecord], **changes: Any) -> Plan | GiveUp:
    known: dict[str, Any] = {
        "budget_from": 0, "newest": None, "spent_seconds": 0, "budget_since": NOW, "now": NOW,
    }  # fmt: skip
    known |= {key: changes.pop(key) for key in list(changes) if key in known}
    return plan_attempt(spec(**changes), attempts, **known)


def sure(attempts: list[AttemptRecord], **changes: Any) -> Plan:
    found = plan(attempts, **changes)
    assert isinstance(found, Plan), found
    return found


def test_the_first_attempt_goes_to_the_top_of_the_ladder_at_once() -> None:
    first = sure([], rungs=3)
    assert (first.number, first.rung, first.pause_seconds) == (1, 0, 0)
    assert first.resume_floor is None
    assert first.state is RunState.TRAINING


@pytest.mark.parametrize(
    ("outcomes", "rung", "pause"),
    [
        ([C], 1, 0),
        ([C, C], 2, 0),
        ([C, C, C], 0, 60),
        ([C] * 4, 1, 0),
        ([C] * 6, 0, 120),
        ([C] * 9, 0, 240),
        ([Q], 1, 0),
        ([Q, Q, Q], 0, 60),
        ([F], 0, 30),
        ([F, C], 1, 0),
        ([I], 0, 0),
        ([T], 0, 0),
    ],
)
def test_rung_and_pause_after(outcomes: list[Outcome], rung: int, pause: int) -> None:
    rows, place = [], 0
    for number, outcome in enumerate(outcomes, 1):
        rows.append(ended(number, outcome, rung=place, resume_floor=at(number)))
        place = (place + (outcome in (C, Q))) % 3
    recovery = {"capacity_backoff_seconds": 60, "failure_backoff_seconds": 30}
    found = sure(rows, rungs=3, recovery=recovery, newest=at(99))
    assert (found.rung, found.pause_seconds) == (rung, pause)


def test_pauses_double_to_an_hour_at_most() -> None:
    rows = [ended(number, C) for number in range(1, 200)]
    assert sure(rows).pause_seconds == LONGEST_PAUSE


def test_thirty_days_of_waiting_fit_into_one_execution_s_history() -> None:
    """Step Functions ends an execution at its 25,000th event, and the run with it."""
    for rungs in range(1, 11):  # as many as a run file may have
        rows = [ended(number, C) for number in range(1, 40 * rungs + 1)]
        pause = sure(rows, rungs=rungs).pause_seconds
        assert pause >= LONGEST_PAUSE
        rounds = 30 * 86400 / pause
        assert rounds * (rungs * ATTEMPT_EVENTS + PAUSE_EVENTS) < HISTORY_EVENTS - 4_000
    assert sure([ended(number, C) for number in range(1, 41)]).pause_seconds == LONGEST_PAUSE


def test_waiting_for_a_quota_shows() -> None:
    found = sure([ended(1, Q, reason="limit is 0 Instances")])
    assert found.state is RunState.WAITING_QUOTA
    assert "limit is 0 Instances" in (found.reason or "")
    assert sure([ended(1, C)]).state is RunState.WAITING_CAPACITY


def test_a_job_that_was_moved_goes_to_the_next_rung() -> None:
    row = ended(1, I, stop_reason=StopReason.MOVED)
    assert sure([row], rungs=2).rung == 1
    assert sure([ended(1, I)], rungs=2).rung == 0


def test_an_unlucky_spot_week_uses_no_budget() -> None:
    rows = [
        ended(number, I if number % 2 else C, training_seconds=30 if number % 2 else 0,
              resume_floor=at(5))
        for number in range(1, 60)
    ]  # fmt: skip
    found = sure(rows, newest=at(5), recovery={"max_failures": 0, "max_stalled_attempts": 1})
    assert found.number == 60


def test_interruptions_without_a_checkpoint_pause_from_the_second_on() -> None:
    recovery = {"capacity_backoff_seconds": 60}
    rows = [ended(1, I), ended(2, I)]
    assert sure(rows, recovery=recovery).pause_seconds == 60
    assert sure(rows, recovery=recovery, newest=at(1)).pause_seconds == 0


@pytest.mark.parametrize(
    ("rows", "newest", "error"),
    [
        ([ended(1, F), ended(2, F)], None, "FailureBudgetSpent"),
        ([ended(1, I, training_seconds=9999), ended(2, I, training_seconds=9999)], None,
         "NoProgress"),
        ([ended(1, I, training_seconds=9999), ended(2, I, training_seconds=9999)], at(3), None),
        # A row is broken by progress: attempt 2 began at step 5, which attempt 1 made.
        ([ended(1, T, training_seconds=9999),
          ended(2, T, training_seconds=9999, resume_floor=at(5))], at(5), None),
        ([ended(1, F), ended(2, C), ended(3, C)], None, None),
    ],
)  # fmt: skip
def test_budgets(
    rows: list[AttemptRecord], newest: CheckpointRef | None, error: str | None
) -> None:
    found = plan(rows, newest=newest, recovery={"max_failures": 1, "max_stalled_attempts": 2})
    assert (found.error if isinstance(found, GiveUp) else None) == error


def test_a_resumed_run_has_fresh_budgets() -> None:
    rows = [ended(1, F), ended(2, F)]
    assert isinstance(plan(rows, recovery={"max_failures": 1}), GiveUp)
    assert sure(rows, recovery={"max_failures": 1}, budget_from=2).number == 3


def test_time_left_is_what_the_job_gets() -> None:
    found = sure([ended(1, T)], spent_seconds=30_000, max_runtime_hours=10, newest=at(1))
    assert found.max_runtime_seconds == 6000
    assert found.max_wait_seconds is not None
    assert found.max_wait_seconds >= found.max_runtime_seconds
    over = plan([ended(1, T)], spent_seconds=35_990, max_runtime_hours=10, newest=at(1))
    assert isinstance(over, GiveUp)
    assert over.error == "RuntimeBudgetSpent"


def test_waiting_is_bounded_by_max_wait_alone() -> None:
    later = NOW + dt.timedelta(hours=11)
    found = sure([ended(1, C)], now=later, max_runtime_hours=10, max_wait_hours=12)
    assert (found.max_runtime_seconds, found.max_wait_seconds) == (3600, 3600)
    over = plan([ended(1, C)], now=NOW + dt.timedelta(hours=12), max_wait_hours=12)
    assert isinstance(over, GiveUp)
    assert over.error == "WaitBudgetSpent"


@given(
    outcomes=st.lists(st.sampled_from([C, Q, I, F, T]), max_size=30),
    spot=st.booleans(), rungs=st.integers(1, 3), spent=st.integers(0, 36_000),
    waited=st.integers(0, 200), max_wait=st.sampled_from([None, 10.0, 100.0]),
)  # fmt: skip
def test_every_plan_can_be_submitted(  # noqa: PLR0917
    outcomes: list[Outcome], spot: bool, rungs: int, spent: int, waited: int,
    max_wait: float | None,
) -> None:  # fmt: skip
    """Kenza-AI/sagify#111: MaxWait without Spot, or below MaxRuntime, is refused by SageMaker."""
    rows = [ended(number, outcome) for number, outcome in enumerate(outcomes, 1)]
    time = {"max_wait_hours": max_wait} if spot and max_wait else {}
    found = plan(rows, spot=spot, rungs=rungs, spent_seconds=spent,
                 now=NOW + dt.timedelta(hours=waited), **time)  # fmt: skip
    if isinstance(found, GiveUp):
        return
    assert found.number == len(outcomes) + 1
    assert 0 <= found.rung < rungs
    assert 0 <= found.pause_seconds <= longest_pause(rungs)
    assert 60 <= found.max_runtime_seconds <= 28 * 86400
    assert (found.max_wait_seconds is not None) == spot
    if found.max_wait_seconds is not None:
        assert found.max_runtime_seconds <= found.max_wait_seconds <= 30 * 86400
