"""Looking at attempts: what an event or the reconciler sets off. Write first, act second, tell the
execution last."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any

from contracts.states import AttemptState, Outcome
from lambdas.logic.decide import Action, Observation, decide
from lambdas.logic.folder import RunFolder
from lambdas.logic.notes import note_attempt
from lambdas.logic.records import AttemptRecord, StopReason
from lambdas.logic.specs import load_spec
from lambdas.observability import bind, count, logger, measure

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["end_attempt", "observe", "outcome_message", "settle", "stop_attempt"]


def observe(hub: Hub, run_id: str, stage_index: int, number: int) -> AttemptRecord | None:
    """Ask SageMaker about an attempt and do what `decide` says. Safe to repeat, in any order.

    Returns the row as it is afterwards; None when the table knows no such attempt.
    """
    rows = _rows(hub, run_id, stage_index, number)
    if rows is None:
        return None
    folder, attempt = rows
    bind(run_id, attempt.stage, number)
    if attempt.state is AttemptState.ENDED:
        return settle(hub, attempt)
    spec = load_spec(hub, folder.run)
    observation = hub.jobs.describe(attempt.job_name)
    if observation is not None and observation.status == "Stopped":
        # Whoever stops a job writes why before; a row that was read earlier need not say it yet.
        folder, attempt = _rows(hub, run_id, stage_index, number) or rows
        if attempt.state is AttemptState.ENDED:
            return settle(hub, attempt)
    action = decide(
        attempt,
        observation,
        now=_now(),
        recovery=spec.recovery,
        rungs=len(spec.compute.ladder),
        cancelled=folder.over,
    )
    return _apply(hub, folder, attempt, observation, action)


def _rows(
    hub: Hub, run_id: str, stage_index: int, number: int
) -> tuple[RunFolder, AttemptRecord] | None:
    folder = hub.table.load(run_id)
    attempt = folder.attempt(stage_index, number) if folder else None
    return None if folder is None or attempt is None else (folder, attempt)


def settle(hub: Hub, attempt: AttemptRecord, token: str | None = None) -> AttemptRecord:
    """Tell the execution how an ended attempt came out, once. ``token``: the asking task's own, if
    one asks."""
    assert attempt.outcome is not None
    assert attempt.ended_at is not None
    if attempt.settled and token is None:
        return attempt
    token = token or attempt.token or _present_token(hub, attempt)
    text = attempt.outcome.value + (f": {attempt.reason}" if attempt.reason else "")
    note_attempt(hub, attempt, "attempt.ended", text, time=attempt.ended_at)
    if token is not None:
        told = hub.executions.settle(token, outcome_message(attempt))
        logger.info("settled", extra={"outcome": attempt.outcome, "waiting": told})
    # Without a token nobody waits: a task that asks later finds the attempt ended.
    hub.table.update_attempt(attempt, settled=True)
    return dataclasses.replace(attempt, settled=True)


def _present_token(hub: Hub, attempt: AttemptRecord) -> str | None:
    """The token that the row has by now: our copy may be older."""
    rows = _rows(hub, attempt.run_id, attempt.stage_index, attempt.number)
    return None if rows is None else rows[1].token


def outcome_message(attempt: AttemptRecord) -> dict[str, Any]:
    """What the state machine learns: our closed word for it, never SageMaker's."""
    assert attempt.outcome is not None
    return {
        "outcome": attempt.outcome.value,
        "stage": attempt.stage,
        "attempt": attempt.number,
        "job_name": attempt.job_name,
    }


def end_attempt(
    hub: Hub,
    attempt: AttemptRecord,
    outcome: Outcome,
    reason: str | None,
    *,
    when: AttemptState | None = None,
    **facts: Any,
) -> AttemptRecord | None:
    """Write an attempt's end. None: it had ended before, or is not in the state ``when`` any
    more."""
    ended_at = facts.pop("ended_at", None) or _now()
    changes: dict[str, Any] = {"outcome": outcome, "ended_at": ended_at, **facts}
    if reason is not None:
        changes["reason"] = reason[:1024]
    if not hub.table.update_attempt(attempt, AttemptState.ENDED, when=when, **changes):
        return None
    after = dataclasses.replace(attempt, state=AttemptState.ENDED, **changes)
    _count_end(after)
    return after


def stop_attempt(hub: Hub, attempt: AttemptRecord, why: StopReason, reason: str) -> None:
    """Stop an attempt's job, or end the attempt when it surely has none. Repeating is harmless."""
    if attempt.state is AttemptState.PLANNED:
        # The condition on PLANNED and the write of SUBMITTED before CreateTrainingJob exclude each
        # other.
        ended = end_attempt(hub, attempt, Outcome.CANCELLED, reason, when=AttemptState.PLANNED)
        if ended is not None:
            settle(hub, ended)
            return
    # Why comes first: whoever sees the job Stopped must know that it was us. A cancel outranks a
    # move.
    hub.table.update_attempt(attempt, stop_reason=why, reason=reason)
    hub.jobs.stop(attempt.job_name)


def _apply(
    hub: Hub,
    folder: RunFolder,
    attempt: AttemptRecord,
    observation: Observation | None,
    action: Action,
) -> AttemptRecord:
    facts = {} if observation is None else _facts(hub, folder, attempt, observation)
    if action.alarm is not None:
        logger.error(action.alarm)
        count("AttemptsNeedingAttention")
        facts["alarm"] = action.alarm
    if action.outcome is not None:
        assert action.state is AttemptState.ENDED
        if observation is not None and observation.ended_at is not None:
            facts["ended_at"] = observation.ended_at
        if action.code is not None:
            facts["failure_code"] = action.code
        ended = end_attempt(hub, attempt, action.outcome, action.reason, **facts)
        if ended is None:
            # Another handler was first, or the answer to our own write was lost and the write tried
            # again: told twice is told once, told by nobody would leave the execution waiting.
            rows = _rows(hub, attempt.run_id, attempt.stage_index, attempt.number)
            if rows is None or rows[1].state is not AttemptState.ENDED:
                return attempt
            ended = rows[1]
        return settle(hub, ended)
    if action.stop is not None:
        reason = action.reason or attempt.reason or "the run is over"
        changes: dict[str, Any] = {"stop_reason": action.stop, "reason": reason}
        if hub.table.update_attempt(attempt, action.state, **facts, **changes):
            hub.jobs.stop(attempt.job_name)
            note_attempt(hub, attempt, "attempt.stopping", f"stopping: {reason}", time=_now())
        return attempt
    if action.state is not None or facts:
        hub.table.update_attempt(attempt, action.state, **facts)
    return attempt


def _facts(
    hub: Hub, folder: RunFolder, attempt: AttemptRecord, seen: Observation
) -> dict[str, Any]:
    """Changes to the row that the observation tells of, with the timeline entries and metrics they
    bring."""
    facts: dict[str, Any] = {}
    if seen.secondary != attempt.secondary_status:
        facts["secondary_status"] = seen.secondary
    if attempt.started_at is None and seen.trained_at is not None:
        facts["started_at"] = seen.trained_at
        # An event and the reconciler may look at once; whose entry it is counts.
        if note_attempt(hub, attempt, "attempt.training", "training", time=seen.trained_at):
            _measure_recovery(folder, attempt, seen.trained_at)
    if seen.interruptions > attempt.interruptions:
        facts["interruptions"] = seen.interruptions
        times = [t.start for t in seen.transitions if t.status == "Interrupted"]
        for time in times[attempt.interruptions :]:
            text = "Spot took the instances; SageMaker restarts the job when it has others"
            if note_attempt(hub, attempt, "attempt.interrupted", text, time=time):
                count("Interruptions")
    if attempt.state is AttemptState.INTERRUPTED and seen.waiting_since is None:
        _measure_restart(hub, attempt, seen)
    if seen.training_seconds is not None:
        facts["training_seconds"] = seen.training_seconds
    if seen.billable_seconds is not None:
        facts["billable_seconds"] = seen.billable_seconds
    step = seen.metrics.get("step")
    if step is not None and int(step) != attempt.last_step:
        facts["last_step"] = int(step)
    return facts


def _measure_recovery(folder: RunFolder, attempt: AttemptRecord, trained_at: dt.datetime) -> None:
    """From the end of an interrupted attempt to the first training of the next one."""
    before = folder.attempt(attempt.stage_index, attempt.number - 1)
    if before is None or before.outcome is Outcome.COMPLETED or before.ended_at is None:
        return
    measure("RecoverySeconds", max(0.0, (trained_at - before.ended_at).total_seconds()))
    if before.last_step is not None and attempt.resume_floor is not None:
        count("StepsLost", max(0, before.last_step - attempt.resume_floor.step))


def _measure_restart(hub: Hub, attempt: AttemptRecord, seen: Observation) -> None:
    """From an interruption to training again within the same job."""
    interrupted = [t.start for t in seen.transitions if t.status == "Interrupted"]
    trained = [t.start for t in seen.transitions if t.status == "Training"]
    if interrupted and trained and trained[-1] >= interrupted[-1]:
        text = "training again after the interruption"
        if note_attempt(hub, attempt, "attempt.restarted", text, time=trained[-1]):
            measure("RecoverySeconds", (trained[-1] - interrupted[-1]).total_seconds())


def _count_end(attempt: AttemptRecord) -> None:
    assert attempt.outcome is not None
    count("AttemptsEnded")
    count(f"Attempts_{attempt.outcome.value}")
    training, billable = attempt.training_seconds, attempt.billable_seconds
    if attempt.spot and training and billable is not None:
        # Billed time counts per instance, and so does its saving.
        count("SpotSavedInstanceSeconds", (training - billable) * attempt.instance_count)
        count("SpotInstanceSeconds", training * attempt.instance_count)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
