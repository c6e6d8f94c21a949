"""Transitions as a table: what may follow what, and what is an end."""

from __future__ import annotations

import pytest

from contracts.states import (
    ATTEMPT_TRANSITIONS,
    ENDPOINT_TRANSITIONS,
    RUN_TRANSITIONS,
    STAGE_TRANSITIONS,
    AttemptState,
    EndpointState,
    IllegalTransitionError,
    RunState,
    StageState,
    check_transition,
    is_terminal,
)

TABLES = [
    (RunState, RUN_TRANSITIONS),
    (StageState, STAGE_TRANSITIONS),
    (AttemptState, ATTEMPT_TRANSITIONS),
    (EndpointState, ENDPOINT_TRANSITIONS),
]
PAIRS = [
    (current, new, table) for kind, table in TABLES for current in kind for new in kind
]  # fmt: skip


@pytest.mark.parametrize(("kind", "table"), TABLES)
def test_every_state_has_a_row(kind: type, table: dict) -> None:
    assert set(table) == set(kind)


@pytest.mark.parametrize(("current", "new", "table"), PAIRS)
def test_a_transition_is_legal_exactly_when_the_table_says_so(current, new, table) -> None:
    if new == current or new in table[current]:
        check_transition(current, new)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{current.value} cannot become") as info:
            check_transition(current, new)
        assert (info.value.current, info.value.new) == (current, new)


@pytest.mark.parametrize(
    ("current", "late"),
    [
        (RunState.SUCCEEDED, RunState.TRAINING),
        (RunState.SUCCEEDED, RunState.FAILED),
        (RunState.CANCELLED, RunState.SUCCEEDED),
        (AttemptState.ENDED, AttemptState.RUNNING),
        (AttemptState.STOPPING, AttemptState.RUNNING),
        (StageState.SUCCEEDED, StageState.RUNNING),
        (EndpointState.DELETED, EndpointState.IN_SERVICE),
    ],
)
def test_a_late_event_never_rewinds_a_state(current, late) -> None:
    """Completed before InProgress, Stopping after Stopped, a late FAILED after success
    (aws-solutions-library-samples/accelerated-intelligent-document-processing-on-aws#989)."""
    with pytest.raises(IllegalTransitionError):
        check_transition(current, late)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
def test_a_run_that_ended_badly_can_be_resumed(state: RunState) -> None:
    check_transition(state, RunState.TRAINING)


def test_the_ends() -> None:
    # Lists, as states of two kinds with one name are equal and would fall together in a set.
    ends = [[state.value for state in kind if is_terminal(state)] for kind, _ in TABLES]
    assert ends == [
        ["SUCCEEDED", "FAILED", "ENDPOINT_FAILED", "CANCELLED"],
        ["SUCCEEDED", "FAILED", "CANCELLED"],
        ["ENDED"],
        ["FAILED", "DELETED"],
    ]


def test_every_state_of_a_run_can_reach_an_end() -> None:
    for kind, table in TABLES:
        for start in kind:
            reached, todo = {start}, [start]
            while todo:
                for state in table[todo.pop()] - reached:
                    reached.add(state)
                    todo.append(state)
            assert any(is_terminal(state) for state in reached), start
