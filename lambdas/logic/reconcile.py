"""What no event told us. With every event lost, runs still finish by this alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from contracts.states import AttemptState, EndpointState, RunState, is_terminal
from lambdas.errors import HubError
from lambdas.logic.attempts import observe
from lambdas.logic.deployment import VARIANT
from lambdas.logic.endings import (
    cancel_run,
    execution_ended,
    execution_name,
    finish_cancel,
)
from lambdas.logic.endpoints import (
    delete_endpoint,
    finish_deployment,
    observe_endpoint,
    retry_deletion,
)
from lambdas.logic.notes import note
from lambdas.logic.orphans import stop_orphans
from lambdas.logic.records import AttemptRecord, EndpointRecord, RunRecord
from lambdas.logic.runs import start_execution
from lambdas.logic.specs import load_spec
from lambdas.observability import bind, count, logger, measure

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["reconcile"]

_START_GRACE = dt.timedelta(minutes=2)
_STALE_SAVES = 3
"""No new checkpoint for this many save intervals is worth an alarm."""


def reconcile(
    hub: Hub, state_machine_arn: str, *, stack: str, catch: tuple[type[Exception], ...]
) -> dict[str, int]:
    """One pass over everything that is not terminal, and over running jobs that should not be.

    One item's trouble (an error of ``catch``, or one of ours) does not keep the others waiting.

    Raises:
        HubError: after the pass, when an item could not be looked at: the schedule's alarm sees it.
    """
    failed: list[str] = []
    attempts, runs, endpoints = (
        hub.table.open_attempts(),
        hub.table.open_runs(),
        hub.table.open_endpoints(),
    )
    work: list[tuple[str, Callable[[], object]]] = [
        *((item.job_name, partial(_attempt, hub, item)) for item in attempts),
        *((item.name, partial(_endpoint, hub, item)) for item in endpoints),
        *((item.run_id, partial(_run, hub, item, state_machine_arn)) for item in runs),
        ("orphaned jobs", partial(stop_orphans, hub, stack, {item.job_name for item in attempts})),
    ]
    errors: tuple[type[Exception], ...] = (HubError, *catch)
    for what, look in work:
        try:
            look()
        except errors:
            logger.exception("could not reconcile", extra={"item": what})
            failed.append(what)
    count("ReconcilerPasses")
    count("OpenAttempts", len(attempts))
    if failed:
        raise HubError(f"could not look at {', '.join(failed)}; see the log")
    return {"attempts": len(attempts), "runs": len(runs), "endpoints": len(endpoints)}


def _attempt(hub: Hub, attempt: AttemptRecord) -> None:
    bind(attempt.run_id, attempt.stage, attempt.number)
    seen = observe(hub, attempt.run_id, attempt.stage_index, attempt.number)
    if seen is None or seen.state is AttemptState.ENDED:
        finish_cancel(hub, attempt.run_id)
        if attempt.state is not AttemptState.ENDED and attempt.submitted_at is not None:
            count("EventsMissed")
        return
    if attempt.token is not None:
        hub.executions.heartbeat(attempt.token)
    _check_progress(hub, attempt)


def _check_progress(hub: Hub, attempt: AttemptRecord) -> None:
    """Alarm on a job that trains but commits nothing, judged by what is in S3."""
    if attempt.state is not AttemptState.RUNNING or attempt.started_at is None:
        return
    folder = hub.table.load(attempt.run_id)
    if folder is None:
        return
    spec = load_spec(hub, folder.run)
    stage = folder.stages[attempt.stage_index]
    since = attempt.started_at
    times = hub.bucket.list_times(stage.layout.checkpoints_prefix)
    flags = [time for key, time in times.items() if key.endswith(".flag")]
    last = max([since, *flags])
    lag = (_now() - last).total_seconds()
    measure("CheckpointLagSeconds", lag)
    if lag > _STALE_SAVES * spec.checkpoint.every_minutes * 60:
        count("NoProgress")
        logger.error("no checkpoint", extra={"lag_seconds": int(lag)})


def _endpoint(hub: Hub, row: EndpointRecord) -> None:
    bind(row.run_id)
    if row.state is EndpointState.DELETING:
        delete_endpoint(hub, row)
        observe_endpoint(hub, row.name)  # Somebody may wait for it.
        return
    seen = observe_endpoint(hub, row.name)
    if seen is None or seen.state is EndpointState.DELETED:
        return
    if seen.state is EndpointState.DELETING:
        delete_endpoint(hub, seen)
        return
    run = hub.table.get_run(row.run_id)
    failed = run is not None and is_terminal(run.state) and run.state is not RunState.SUCCEEDED
    if seen.owned and failed:
        # Its deployment failed while nothing could be done to it. A run that succeeds gives its
        # endpoint up before it says so: our copy of the row may be older than that.
        retry_deletion(hub, seen)
        return
    if not seen.owned and seen.previous_component is not None:
        finish_deployment(hub, seen.name)
    if not seen.owned and seen.state is EndpointState.IN_SERVICE:
        _delete_if_idle(hub, seen)


def _delete_if_idle(hub: Hub, row: EndpointRecord) -> None:
    if row.idle_ttl_hours is None:
        return
    now = _now()
    since = now - dt.timedelta(hours=row.idle_ttl_hours)
    if max(row.updated_at, row.last_chat_at or row.updated_at) > since:
        return
    if hub.telemetry.invocations(row.name, VARIANT, since, now):
        return
    text = f"endpoint {row.name} was idle for {row.idle_ttl_hours:g} hours and is deleted"
    note(hub, row.run_id, "endpoint.idle", text, time=now)
    delete_endpoint(hub, row)


def _run(hub: Hub, run: RunRecord, state_machine_arn: str) -> None:
    bind(run.run_id)
    if run.state is RunState.CANCELLING:
        cancel_run(hub, run.run_id, run.reason or "cancelled")
        return
    if run.execution_arn is None:
        return
    found = hub.executions.status(run.execution_arn)
    if found is None:
        if _now() - run.updated_at > _START_GRACE:
            start_execution(hub, run, state_machine_arn)
        return
    status, error, cause = found
    if status != "RUNNING":
        name = execution_name(run.run_id, run.executions)
        execution_ended(hub, name, run.execution_arn, status=status, error=error, cause=cause)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
