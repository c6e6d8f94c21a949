"""`decide` as a table: every status pair that AWS documents, and some it does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.compute import RecoverySpec
from contracts.states import ATTEMPT_TRANSITIONS, AttemptState, Outcome
from lambdas.logic.decide import Action, Observation, decide
from lambdas.logic.records import AttemptRecord, StopReason
from tests.unit.lambdas.rows import NOW, after, attempt, observed

RECOVERY = RecoverySpec()
S, O = AttemptState, Outcome  # noqa: E741 (read as a table)


def ask(
    seen: Observation | None, row: AttemptRecord | None = None, *, minutes: float = 1,
    rungs: int = 2, cancelled: bool = False,
) -> Action:  # fmt: skip
    return decide(
        row or attempt(), seen, now=after(minutes), recovery=RECOVERY, rungs=rungs,
        cancelled=cancelled,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "secondary", "state", "outcome"),
    [
        ("InProgress", "Starting", S.SUBMITTED, None),
        ("InProgress", "LaunchingMLInstances", S.SUBMITTED, None),
        ("InProgress", "PreparingTrainingStack", S.SUBMITTED, None),
        ("InProgress", "Pending", S.SUBMITTED, None),
        ("InProgress", "Restarting", S.SUBMITTED, None),
        ("InProgress", "Downloading", S.SUBMITTED, None),
        ("InProgress", "DownloadingTrainingImage", S.SUBMITTED, None),
        ("InProgress", "Training", S.RUNNING, None),
        ("InProgress", "Uploading", S.RUNNING, None),
        ("InProgress", "Updating", S.RUNNING, None),
        ("InProgress", "Stopping", S.STOPPING, None),
        ("Stopping", "Stopping", S.STOPPING, None),
        ("Stopping", "SomethingNew", S.STOPPING, None),
        ("Completed", "Completed", S.ENDED, O.COMPLETED),
        ("Failed", "Failed", S.ENDED, O.INFRASTRUCTURE_FAILURE),
        ("Stopped", "Stopped", S.ENDED, O.CANCELLED),
        ("Stopped", "MaxWaitTimeExceeded", S.ENDED, O.OUT_OF_CAPACITY),
        ("Stopped", "MaxRuntimeExceeded", S.ENDED, O.TIMED_OUT),
        ("Deleting", "Stopped", S.ENDED, O.CANCELLED),
    ],
)
def test_each_status_pair_has_its_action(
    status: str, secondary: str, state: AttemptState, outcome: Outcome | None
) -> None:
    """aws-samples/serverless-sagemaker-orchestration#2: a timeout had no branch."""
    action = ask(observed(status, secondary))
    assert (action.state, action.outcome) == (state, outcome)
    assert action.stop is None


@pytest.mark.parametrize(
    ("status", "secondary"),
    [("InProgress", "Defragmenting"), ("Stopped", "Evicted"), ("Paused", "Paused")],
)
def test_an_unknown_pair_is_held_and_a_person_is_called(status: str, secondary: str) -> None:
    action = ask(observed(status, secondary))
    assert (action.state, action.outcome, action.stop) == (None, None, None)
    assert f"{status}/{secondary}" in (action.alarm or "")


def test_stopped_is_never_success() -> None:
    """apache/airflow#42423: Stopped counted as success."""
    for secondary in ("Stopped", "MaxWaitTimeExceeded", "MaxRuntimeExceeded", "New"):
        assert ask(observed("Stopped", secondary)).outcome is not Outcome.COMPLETED


@pytest.mark.parametrize(
    ("history", "minutes", "rungs", "stop"),
    [
        ([("Training", 5), ("Interrupted", 20)], 34, 2, None),
        ([("Training", 5), ("Interrupted", 20)], 36, 2, StopReason.MOVED),
        ([("Training", 5), ("Interrupted", 20)], 36, 1, StopReason.MOVED),
        # Restarting does not start the clock anew: the instances are still missing.
        ([("Training", 5), ("Interrupted", 20), ("Starting", 33)], 36, 1, StopReason.MOVED),
        # Trained again: whatever was before is over.
        ([("Training", 5), ("Interrupted", 20), ("Starting", 21), ("Training", 25)], 99, 2, None),
        # A new job: 30 minutes, and only where there is another rung to go to.
        ([("Starting", 0)], 29, 2, None),
        ([("Starting", 0), ("Pending", 1)], 31, 2, StopReason.MOVED),
        ([("Starting", 0), ("Pending", 1)], 9999, 1, None),
    ],
)
def test_a_job_without_instances_is_moved_in_time(
    history: list[tuple[str, float]], minutes: float, rungs: int, stop: StopReason | None
) -> None:
    action = ask(observed("InProgress", history[-1][0], *history), minutes=minutes, rungs=rungs)
    assert action.stop is stop


def test_an_interruption_shows_as_a_state_of_its_own() -> None:
    seen = observed("InProgress", "Interrupted", ("Training", 5), ("Interrupted", 20))
    assert ask(seen, minutes=21).state is AttemptState.INTERRUPTED


@pytest.mark.parametrize(
    ("history", "outcome"),
    [
        ([("Starting", 0)], Outcome.OUT_OF_CAPACITY),
        ([("Training", 5), ("Interrupted", 9)], Outcome.INTERRUPTED),
    ],
)
def test_a_job_that_we_stopped_to_move_it_is_resubmitted(
    history: list[tuple[str, float]], outcome: Outcome
) -> None:
    row = attempt(state=AttemptState.STOPPING, stop_reason=StopReason.MOVED)
    seen = observed("Stopped", "Stopped", *history)
    assert ask(seen, row).outcome is outcome
    assert ask(seen, row, cancelled=True).outcome is Outcome.CANCELLED


def test_a_lost_stop_is_repeated() -> None:
    row = attempt(stop_reason=StopReason.MOVED)
    assert ask(observed("InProgress", "Training", ("Training", 1)), row).stop is StopReason.MOVED


def test_a_job_of_a_run_that_is_over_is_stopped() -> None:
    for secondary in ("Starting", "Training", "Interrupted"):
        seen = observed("InProgress", secondary, (secondary, 0))
        assert ask(seen, cancelled=True).stop is StopReason.CANCELLED


def test_stopping_for_half_an_hour_alarms() -> None:
    """huggingface/transformers#11390: a job hung in Stopping and Uploading for a day."""
    seen = observed("Stopping", "Stopping", ("Training", 1), ("Stopping", 10))
    assert ask(seen, minutes=39).alarm is None
    assert "Stopping for 31 minutes" in (ask(seen, minutes=41).alarm or "")


@pytest.mark.parametrize(
    ("row", "minutes", "cancelled", "outcome"),
    [
        (attempt(state=AttemptState.PLANNED), 99, False, None),
        (attempt(state=AttemptState.PLANNED), 0, True, Outcome.CANCELLED),
        (attempt(), 5, False, None),
        (attempt(), 5, True, None),
        (attempt(), 11, True, Outcome.CANCELLED),
        (attempt(), 11, False, Outcome.INFRASTRUCTURE_FAILURE),
    ],
)
def test_a_job_that_sagemaker_does_not_know(
    row: AttemptRecord, minutes: float, cancelled: bool, outcome: Outcome | None
) -> None:
    assert ask(None, row, minutes=minutes, cancelled=cancelled).outcome is outcome


_WORDS = st.sampled_from(
    ["InProgress", "Stopping", "Completed", "Failed", "Stopped", "Deleting", "New", "Starting",
     "Training", "Interrupted", "MaxWaitTimeExceeded", "MaxRuntimeExceeded", "Pending", ""]
)  # fmt: skip


@given(
    status=_WORDS, secondary=_WORDS, cancelled=st.booleans(), rungs=st.integers(1, 3),
    minutes=st.floats(0, 10_000), history=st.lists(st.tuples(_WORDS, st.floats(0, 5000))),
    state=st.sampled_from(AttemptState),
    stop=st.sampled_from([None, *StopReason]),
)  # fmt: skip
def test_whatever_sagemaker_says_there_is_one_lawful_action(  # noqa: PLR0917
    status: str, secondary: str, cancelled: bool, rungs: int, minutes: float,
    history: list[tuple[str, float]], state: AttemptState, stop: StopReason | None,
) -> None:  # fmt: skip
    row: Any = attempt(state=state, stop_reason=stop)
    seen = observed(status, secondary, *history)
    action = ask(seen, row, minutes=minutes, rungs=rungs, cancelled=cancelled)
    assert (action.outcome is not None) <= (action.state is AttemptState.ENDED)
    assert action.outcome is None or action.stop is None
    if state is AttemptState.ENDED:
        assert action == Action()
    elif action.outcome is not None:
        assert AttemptState.ENDED in ATTEMPT_TRANSITIONS[state]
        assert status in ("Completed", "Failed", "Stopped", "Deleting")
    if action.outcome is Outcome.COMPLETED:
        assert status == "Completed"
    assert NOW is not None
