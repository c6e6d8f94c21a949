"""SubmitAttempt: create the planned attempt's training job, or adopt it. It may run any number of
times and makes one job."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any

from contracts.control import Control
from contracts.layout import StageLayout
from contracts.states import AttemptState, Outcome, RunState
from lambdas.errors import (
    JobExistsError,
    NoCapacityError,
    ObjectChangedError,
    QuotaError,
    RequestRefusedError,
    TransientError,
)
from lambdas.logic.attempts import end_attempt, observe, settle
from lambdas.logic.notes import note_attempt
from lambdas.logic.records import AttemptRecord, StopReason
from lambdas.logic.specs import load_folder, load_spec
from lambdas.logic.training_job import build_training_job_request, job_tags
from lambdas.observability import bind, logger
from lambdas.settings import JobSettings

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["submit_attempt"]


def submit_attempt(hub: Hub, run_id: str, token: str, settings: JobSettings) -> None:
    """Create the planned attempt's job, or adopt it; keep the token until it ends.

    Raises:
        TransientError: SageMaker is busy; the state machine tries again and finds what was done so
        far.
    """
    folder = load_folder(hub, run_id)
    stage = folder.current_stage
    attempts = folder.attempts_of(stage.index) if stage else ()
    if stage is None or not attempts:
        hub.executions.settle(token, {"outcome": Outcome.CANCELLED.value})
        return
    attempt = attempts[-1]
    bind(run_id, stage.name, attempt.number)
    if attempt.state is not AttemptState.ENDED and folder.over:
        _cancel_before_submit(hub, attempt, token)
        return
    # SUBMITTED is written before the job is made: from here on a cancel must look for a job.
    fresh = attempt.state is AttemptState.PLANNED
    changes: dict[str, Any] = {"token": token, "settled": False}
    if fresh:
        changes["submitted_at"] = _now()
    when = AttemptState.PLANNED if fresh else None
    state = AttemptState.SUBMITTED if fresh else None
    written = attempt.state is not AttemptState.ENDED and hub.table.update_attempt(
        attempt, state, when=when, **changes
    )
    if not written:
        _settle_ended(hub, attempt, token)
        return
    attempt = dataclasses.replace(attempt, **changes)
    spec = load_spec(hub, folder.run)
    _fence(hub, stage.layout, attempt.number)
    request = build_training_job_request(
        spec, folder.run, stage, attempt, bucket=hub.bucket.name, settings=settings
    )
    _create_or_adopt(hub, attempt, request, settings)


def _cancel_before_submit(hub: Hub, attempt: AttemptRecord, token: str) -> None:
    ended = end_attempt(
        hub, attempt, Outcome.CANCELLED, "the run is over", when=AttemptState.PLANNED
    )
    if ended is not None:
        settle(hub, ended, token)
        return
    # A job may exist: stop it and let its end settle the token.
    hub.table.update_attempt(attempt, token=token, stop_reason=StopReason.CANCELLED)
    observe(hub, attempt.run_id, attempt.stage_index, attempt.number)
    _settle_ended(hub, attempt, token)


def _settle_ended(hub: Hub, attempt: AttemptRecord, token: str) -> None:
    """Answer the asking task if the attempt has ended; its row may know more than our copy."""
    folder = load_folder(hub, attempt.run_id)
    now = folder.attempt(attempt.stage_index, attempt.number)
    if now is not None and now.state is AttemptState.ENDED:
        settle(hub, now, token)


def _fence(hub: Hub, layout: StageLayout, attempt: int) -> None:
    """Name this attempt in control.json, so that a trainer of an older one commits nothing more.

    Requests in it were meant for the attempt before, and go.
    """
    found = hub.bucket.read_control(layout)
    if found is not None and found[0].attempt == attempt:
        return
    etag = None if found is None else found[1]
    try:
        hub.bucket.write_control(layout, Control(attempt=attempt), etag)
    except ObjectChangedError as error:
        raise TransientError("control.json changed meanwhile") from error


def _create_or_adopt(
    hub: Hub, attempt: AttemptRecord, request: dict[str, Any], settings: JobSettings
) -> None:
    ended: AttemptRecord | None = None
    try:
        hub.jobs.create(request)
    except JobExistsError as error:
        if _is_ours(hub, attempt, settings):
            logger.info("adopted", extra={"job_name": attempt.job_name})
        else:
            reason = f"a training job of another owner has the name {attempt.job_name}: {error}"
            ended = end_attempt(hub, attempt, Outcome.USER_FAILURE, reason)
    except QuotaError as error:
        ended = end_attempt(hub, attempt, Outcome.OUT_OF_QUOTA, str(error))
    except NoCapacityError as error:
        ended = end_attempt(hub, attempt, Outcome.OUT_OF_CAPACITY, str(error))
    except RequestRefusedError as error:
        ended = end_attempt(hub, attempt, Outcome.USER_FAILURE, str(error))
    if ended is not None:
        settle(hub, ended)
        return
    note_attempt(
        hub, attempt, "attempt.submitted", attempt.job_name, time=attempt.submitted_at or _now()
    )
    run = hub.table.get_run(attempt.run_id)
    assert run is not None
    hub.table.update_run(run, RunState.TRAINING, reason=None)
    # It may have ended already, or the run may have been cancelled while it was being made.
    observe(hub, attempt.run_id, attempt.stage_index, attempt.number)


def _is_ours(hub: Hub, attempt: AttemptRecord, settings: JobSettings) -> bool:
    observation = hub.jobs.describe(attempt.job_name)
    if observation is None:
        raise TransientError(f"{attempt.job_name} exists but is not visible yet")
    tags = hub.jobs.tags(observation.arn)
    wanted = job_tags(attempt, settings.stack)
    return all(tags.get(key) == value for key, value in wanted.items())


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
