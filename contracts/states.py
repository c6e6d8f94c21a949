"""States of runs, stages, attempts and endpoints, and which follows which.

Every write to the run table is checked against these tables, so that a late event never rewinds a
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

__all__ = [
    "ATTEMPT_TRANSITIONS",
    "ENDPOINT_TRANSITIONS",
    "RUN_TRANSITIONS",
    "STAGE_TRANSITIONS",
    "AttemptState",
    "EndpointState",
    "IllegalTransitionError",
    "Outcome",
    "RunState",
    "StageState",
    "check_transition",
    "is_terminal",
]


class RunState(StrEnum):
    """What a run is doing."""

    PENDING = "PENDING"
    TRAINING = "TRAINING"
    WAITING_CAPACITY = "WAITING_CAPACITY"
    WAITING_QUOTA = "WAITING_QUOTA"
    DEPLOYING = "DEPLOYING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    ENDPOINT_FAILED = "ENDPOINT_FAILED"
    CANCELLED = "CANCELLED"


class StageState(StrEnum):
    """What a stage is doing."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class AttemptState(StrEnum):
    """What a SageMaker training job is doing, in our words."""

    PLANNED = "PLANNED"
    SUBMITTED = "SUBMITTED"
    RUNNING = "RUNNING"
    INTERRUPTED = "INTERRUPTED"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


class EndpointState(StrEnum):
    """What a SageMaker endpoint is doing."""

    CREATING = "CREATING"
    UPDATING = "UPDATING"
    IN_SERVICE = "IN_SERVICE"
    ROLLING_BACK = "ROLLING_BACK"
    FAILED = "FAILED"
    DELETING = "DELETING"
    DELETED = "DELETED"


class Outcome(StrEnum):
    """What an attempt came to."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    OUT_OF_CAPACITY = "out_of_capacity"
    OUT_OF_QUOTA = "out_of_quota"
    TIMED_OUT = "timed_out"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    USER_FAILURE = "user_failure"
    CANCELLED = "cancelled"


R, S, A, E = RunState, StageState, AttemptState, EndpointState
_ACTIVE_RUN = frozenset({R.TRAINING, R.WAITING_CAPACITY, R.WAITING_QUOTA})

# Failed and cancelled runs can be resumed (a redrive or a new execution), hence the ways back to
# TRAINING.
RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    R.PENDING: frozenset({R.TRAINING, R.CANCELLING, R.CANCELLED, R.FAILED}),
    R.TRAINING: _ACTIVE_RUN | {R.DEPLOYING, R.SUCCEEDED, R.CANCELLING, R.CANCELLED, R.FAILED},
    R.WAITING_CAPACITY: _ACTIVE_RUN | {R.CANCELLING, R.CANCELLED, R.FAILED},
    R.WAITING_QUOTA: _ACTIVE_RUN | {R.CANCELLING, R.CANCELLED, R.FAILED},
    R.DEPLOYING: frozenset({R.SUCCEEDED, R.ENDPOINT_FAILED, R.CANCELLING, R.CANCELLED, R.FAILED}),
    R.CANCELLING: frozenset({R.CANCELLED, R.FAILED}),
    R.SUCCEEDED: frozenset({R.DEPLOYING}),
    R.ENDPOINT_FAILED: frozenset({R.DEPLOYING}),
    R.FAILED: frozenset({R.TRAINING, R.DEPLOYING}),
    R.CANCELLED: frozenset({R.TRAINING}),
}

STAGE_TRANSITIONS: Mapping[StageState, frozenset[StageState]] = {
    S.PENDING: frozenset({S.RUNNING, S.CANCELLED, S.FAILED}),
    S.RUNNING: frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset({S.RUNNING}),
    S.CANCELLED: frozenset({S.RUNNING}),
}

ATTEMPT_TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    A.PLANNED: frozenset({A.SUBMITTED, A.RUNNING, A.INTERRUPTED, A.STOPPING, A.ENDED}),
    A.SUBMITTED: frozenset({A.RUNNING, A.INTERRUPTED, A.STOPPING, A.ENDED}),
    A.RUNNING: frozenset({A.INTERRUPTED, A.STOPPING, A.ENDED}),
    A.INTERRUPTED: frozenset({A.RUNNING, A.STOPPING, A.ENDED}),
    A.STOPPING: frozenset({A.ENDED}),
    A.ENDED: frozenset(),
}

ENDPOINT_TRANSITIONS: Mapping[EndpointState, frozenset[EndpointState]] = {
    E.CREATING: frozenset({E.IN_SERVICE, E.FAILED, E.DELETING, E.DELETED}),
    E.IN_SERVICE: frozenset({E.UPDATING, E.DELETING, E.DELETED, E.FAILED}),
    E.UPDATING: frozenset({E.IN_SERVICE, E.ROLLING_BACK, E.FAILED, E.DELETING, E.DELETED}),
    E.ROLLING_BACK: frozenset({E.IN_SERVICE, E.FAILED, E.DELETING, E.DELETED}),
    E.FAILED: frozenset({E.DELETING, E.DELETED}),
    E.DELETING: frozenset({E.DELETED, E.FAILED}),
    E.DELETED: frozenset({E.CREATING}),
}

State = RunState | StageState | AttemptState | EndpointState
StateT = TypeVar("StateT", RunState, StageState, AttemptState, EndpointState)


class IllegalTransitionError(ValueError):
    """A state would go where the table does not let it."""

    def __init__(self, current: State, new: State) -> None:
        self.current, self.new = current, new
        allowed = ", ".join(sorted(_table(current)[current])) or "nothing"
        kind = type(current).__name__
        super().__init__(f"{kind} {current} cannot become {new}; allowed: {allowed}")


def check_transition(current: StateT, new: StateT) -> None:
    """Pass silently when ``new`` may follow ``current`` (staying is always allowed).

    Raises:
        IllegalTransitionError: otherwise.
    """
    if new != current and new not in _table(current)[current]:
        raise IllegalTransitionError(current, new)


def is_terminal(state: State) -> bool:
    """Whether nothing more happens by itself."""
    return state in {
        R.SUCCEEDED, R.FAILED, R.ENDPOINT_FAILED, R.CANCELLED,
        S.SUCCEEDED, S.FAILED, S.CANCELLED,
        A.ENDED, E.FAILED, E.DELETED,
    }  # fmt: skip


def _table(state: State) -> Mapping[Any, frozenset[Any]]:
    """The transitions of the state's own kind."""
    tables: dict[type[State], Mapping[Any, frozenset[Any]]] = {
        RunState: RUN_TRANSITIONS,
        StageState: STAGE_TRANSITIONS,
        AttemptState: ATTEMPT_TRANSITIONS,
        EndpointState: ENDPOINT_TRANSITIONS,
    }
    return tables[type(state)]
