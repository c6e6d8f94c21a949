"""What to do about an attempt, given what DescribeTrainingJob says. Events and the reconciler both
ask here."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from contracts.compute import RecoverySpec
from contracts.states import AttemptState, Outcome
from lambdas.logic.classify import classify_failure
from lambdas.logic.records import AttemptRecord, StopReason

__all__ = ["MISSING_GRACE", "STOPPING_LIMIT", "Action", "Observation", "Transition", "decide"]

STOPPING_LIMIT = dt.timedelta(minutes=30)
"""A stop gives a container 120 s; one that takes this long hangs in its upload."""
MISSING_GRACE = dt.timedelta(minutes=10)
"""DescribeTrainingJob may not find a job at once after its creation."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry of SecondaryStatusTransitions."""

    status: str
    start: dt.datetime


@dataclass(frozen=True, slots=True)
class Observation:
    """What DescribeTrainingJob says, in plain types."""

    status: str
    secondary: str
    created_at: dt.datetime
    arn: str = ""
    transitions: tuple[Transition, ...] = ()
    failure_reason: str | None = None
    training_seconds: int | None = None
    billable_seconds: int | None = None
    ended_at: dt.datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of each metric that SageMaker read from the log."""

    @property
    def trained_at(self) -> dt.datetime | None:
        """When it first trained."""
        return next((t.start for t in self.transitions if t.status == "Training"), None)

    @property
    def interruptions(self) -> int:
        return sum(t.status == "Interrupted" for t in self.transitions)

    @property
    def waiting_since(self) -> dt.datetime | None:
        """Since when it has had no instances: its interruption or creation; None while it
        trains."""
        since: dt.datetime | None = self.created_at
        for transition in self.transitions:
            if transition.status == "Training":
                since = None
            elif transition.status == "Interrupted":
                since = transition.start
        return since


@dataclass(frozen=True, slots=True)
class Action:
    """What to write and do. All None: nothing."""

    state: AttemptState | None = None
    """Write this state, if the table of transitions lets it follow."""
    outcome: Outcome | None = None
    """The attempt has ended so: tell the execution."""
    reason: str | None = None
    code: str | None = None
    stop: StopReason | None = None
    """Stop the job, for this reason."""
    alarm: str | None = None
    """A person should look at this."""


class _Kind(Enum):
    WAITS = auto()
    LOADS = auto()
    TRAINS = auto()
    STOPPING = auto()
    COMPLETED = auto()
    FAILED = auto()
    STOPPED = auto()
    WAITED_TOO_LONG = auto()
    RAN_TOO_LONG = auto()
    DELETING = auto()


_ANY = "*"
_TABLE: Mapping[tuple[str, str], _Kind] = {
    ("InProgress", "Starting"): _Kind.WAITS,
    ("InProgress", "LaunchingMLInstances"): _Kind.WAITS,
    ("InProgress", "PreparingTrainingStack"): _Kind.WAITS,
    ("InProgress", "Pending"): _Kind.WAITS,
    ("InProgress", "Interrupted"): _Kind.WAITS,
    ("InProgress", "Restarting"): _Kind.WAITS,
    ("InProgress", "Downloading"): _Kind.LOADS,
    ("InProgress", "DownloadingTrainingImage"): _Kind.LOADS,
    ("InProgress", "Training"): _Kind.TRAINS,
    ("InProgress", "Uploading"): _Kind.TRAINS,
    ("InProgress", "Updating"): _Kind.TRAINS,
    ("InProgress", "Stopping"): _Kind.STOPPING,
    ("Stopping", _ANY): _Kind.STOPPING,
    ("Completed", _ANY): _Kind.COMPLETED,
    ("Failed", _ANY): _Kind.FAILED,
    ("Stopped", "Stopped"): _Kind.STOPPED,
    ("Stopped", "MaxWaitTimeExceeded"): _Kind.WAITED_TOO_LONG,
    ("Stopped", "MaxRuntimeExceeded"): _Kind.RAN_TOO_LONG,
    ("Deleting", _ANY): _Kind.DELETING,
}  # AWS: "Valid values for SecondaryStatus are subject to change", so what is not here is held.


def decide(  # noqa: PLR0911 (one return per row of the table)
    attempt: AttemptRecord,
    observation: Observation | None,
    *,
    now: dt.datetime,
    recovery: RecoverySpec,
    rungs: int,
    cancelled: bool,
) -> Action:
    """The one decision function.

    Args:
        attempt: the row as it is.
        observation: what SageMaker says; None when it knows no such job.
        now: current time.
        recovery: the run's recovery settings.
        rungs: length of the capacity ladder.
        cancelled: the run is being cancelled or has failed: its job must go.
    """
    if attempt.state is AttemptState.ENDED:
        return Action()
    if observation is None:
        return _missing(attempt, now, cancelled)
    kind = _TABLE.get((observation.status, observation.secondary)) or _TABLE.get(
        (observation.status, _ANY)
    )
    if kind is None:
        words = f"{observation.status}/{observation.secondary}"
        return Action(alarm=f"unknown job status {words}: left alone until a person has looked")
    match kind:
        case _Kind.WAITS | _Kind.LOADS | _Kind.TRAINS:
            return _alive(
                attempt,
                observation,
                kind,
                now=now,
                recovery=recovery,
                rungs=rungs,
                cancelled=cancelled,
            )
        case _Kind.STOPPING:
            return _stopping(observation, now)
        case _Kind.COMPLETED:
            return Action(AttemptState.ENDED, Outcome.COMPLETED)
        case _Kind.FAILED:
            classified = classify_failure(observation.failure_reason)
            return Action(AttemptState.ENDED, classified.outcome, classified.cause, classified.code)
        case _Kind.WAITED_TOO_LONG:
            text = "no Spot capacity within MaxWaitTimeInSeconds"
            return Action(AttemptState.ENDED, Outcome.OUT_OF_CAPACITY, text)
        case _Kind.RAN_TOO_LONG:
            text = "MaxRuntimeInSeconds is used up"
            return Action(AttemptState.ENDED, Outcome.TIMED_OUT, text)
        case _Kind.STOPPED:
            return _stopped(attempt, observation, cancelled)
        case _Kind.DELETING:
            text = "the training job is being deleted"
            return Action(AttemptState.ENDED, Outcome.CANCELLED, text, alarm=text)


def _alive(
    attempt: AttemptRecord,
    observation: Observation,
    kind: _Kind,
    *,
    now: dt.datetime,
    recovery: RecoverySpec,
    rungs: int,
    cancelled: bool,
) -> Action:
    waits = observation.waiting_since
    interrupted = observation.interruptions > 0 and waits is not None
    if kind is _Kind.TRAINS:
        state = AttemptState.RUNNING
    else:
        state = AttemptState.INTERRUPTED if interrupted else AttemptState.SUBMITTED
    if cancelled:
        return Action(state, stop=StopReason.CANCELLED)
    if attempt.stop_reason is not None:
        # Our stop was lost, or SageMaker has not shown it yet. Stopping twice is harmless.
        return Action(state, stop=attempt.stop_reason)
    if kind is not _Kind.WAITS or waits is None:
        return Action(state)
    if interrupted:
        # Managed Spot restarts the job by itself; a second job beside it would write to the same
        # prefix.
        limit = dt.timedelta(minutes=recovery.in_place_wait_minutes)
        reason = (
            f"not restarted within {recovery.in_place_wait_minutes:g} minutes of the interruption"
        )
    elif rungs > 1:
        limit = dt.timedelta(minutes=recovery.capacity_wait_minutes)
        reason = f"no instances within {recovery.capacity_wait_minutes:g} minutes"
    else:
        return Action(state)
    if now - waits < limit:
        return Action(state)
    return Action(state, stop=StopReason.MOVED, reason=reason)


def _stopping(observation: Observation, now: dt.datetime) -> Action:
    starts = [t.start for t in observation.transitions if t.status == "Stopping"]
    if starts and now - starts[-1] > STOPPING_LIMIT:
        minutes = int((now - starts[-1]).total_seconds() // 60)
        return Action(
            AttemptState.STOPPING, alarm=f"the job has been Stopping for {minutes} minutes"
        )
    return Action(AttemptState.STOPPING)


def _stopped(attempt: AttemptRecord, observation: Observation, cancelled: bool) -> Action:
    if cancelled or attempt.stop_reason is not StopReason.MOVED:
        ours = cancelled or attempt.stop_reason is not None
        text = "stopped by the hub: the run is over" if ours else "stopped in SageMaker"
        return Action(AttemptState.ENDED, Outcome.CANCELLED, text)
    if observation.interruptions or observation.trained_at:
        text = attempt.reason or "interrupted and not restarted in place"
        return Action(AttemptState.ENDED, Outcome.INTERRUPTED, text)
    text = attempt.reason or "no instances within the time allowed"
    return Action(AttemptState.ENDED, Outcome.OUT_OF_CAPACITY, text)


def _missing(attempt: AttemptRecord, now: dt.datetime, cancelled: bool) -> Action:
    # SUBMITTED is written before the job is made, so only a PLANNED attempt surely has none.
    if attempt.state is AttemptState.PLANNED:
        if not cancelled:
            return Action()
        return Action(AttemptState.ENDED, Outcome.CANCELLED, "cancelled before a job was made")
    if attempt.submitted_at is None or now - attempt.submitted_at < MISSING_GRACE:
        return Action()
    if cancelled:
        return Action(AttemptState.ENDED, Outcome.CANCELLED, "cancelled; no job was made")
    text = "SageMaker knows no such training job any more; its end was not seen"
    return Action(AttemptState.ENDED, Outcome.INFRASTRUCTURE_FAILURE, text, alarm=text)
