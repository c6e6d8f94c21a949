"""How a run ends badly, is cancelled, and is taken up again. Every path leaves no job and no
half-made endpoint."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any

from contracts.states import Outcome, RunState, StageState, is_terminal
from lambdas.errors import (
    ConflictError,
    EndpointFailedError,
    RunCancelledError,
    RunFailedError,
)
from lambdas.logic.attempts import stop_attempt
from lambdas.logic.endpoints import release_endpoint
from lambdas.logic.folder import RunFolder
from lambdas.logic.notes import note
from lambdas.logic.records import RunRecord, StopReason
from lambdas.logic.specs import load_folder
from lambdas.logic.training import next_after_stages
from lambdas.observability import bind, count, logger

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = [
    "cancel_run",
    "clean_up",
    "conclude_failure",
    "execution_arn",
    "execution_ended",
    "execution_name",
    "finish_cancel",
    "observe_execution",
    "resume_run",
    "run_of_execution",
]

_LATER = re.compile(r"(?P<run>.+)-r\d{1,3}")


def execution_name(run_id: str, later: int) -> str:
    """Name of a run's first execution (its id), or of one started later."""
    return run_id if later == 0 else f"{run_id}-r{later}"


def execution_arn(state_machine_arn: str, name: str) -> str:
    """ARN of an execution, which AWS derives from the machine's and the execution's name."""
    return f"{state_machine_arn.replace(':stateMachine:', ':execution:', 1)}:{name}"


def run_of_execution(name: str) -> str:
    """The run that an execution belongs to."""
    match = _LATER.fullmatch(name)
    return match["run"] if match else name


def cancel_run(hub: Hub, run_id: str, reason: str, *, stop_execution: bool = True) -> RunFolder:
    """Cancel a run, wherever its execution is. Repeating it does what is left to do.

    First the row, so that nothing is planned or submitted any more; then the job; then the
    execution. The run is CANCELLED when its job has ended.

    Raises:
        ConflictError: it has ended otherwise.
    """
    folder = load_folder(hub, run_id)
    bind(run_id)
    run = folder.run
    if run.state is RunState.CANCELLED:
        return folder
    if is_terminal(run.state) or not hub.table.update_run(run, RunState.CANCELLING, reason=reason):
        raise ConflictError(f"run {run_id} is {run.state.value} and cannot be cancelled")
    if run.state is not RunState.CANCELLING:
        note(hub, run_id, "run.cancelling", reason, time=_now())
    for attempt in folder.live_attempts:
        stop_attempt(hub, attempt, StopReason.CANCELLED, reason)
    release_endpoint(hub, run_id, reason)
    if stop_execution and run.execution_arn is not None:
        hub.executions.stop(run.execution_arn, "RunCancelled", reason)
    return finish_cancel(hub, run_id)


def finish_cancel(hub: Hub, run_id: str) -> RunFolder:
    """Turn CANCELLING into CANCELLED once no attempt lives any more."""
    folder = load_folder(hub, run_id)
    if folder.run.state is not RunState.CANCELLING or folder.live_attempts:
        return folder
    _close_stages(hub, folder, StageState.CANCELLED)
    if hub.table.update_run(folder.run, RunState.CANCELLED):
        note(hub, run_id, "run.cancelled", folder.run.reason or "cancelled", time=_now())
        count("RunsCancelled")
    return load_folder(hub, run_id)


def clean_up(hub: Hub, run_id: str, state: dict[str, Any]) -> dict[str, Any]:
    """Stop the job, release the endpoint and write down the first cause.

    ``state`` is the execution's: a caught `error`, or an attempt's `outcome`. Nothing in it is
    relied on.
    """
    folder = load_folder(hub, run_id)
    bind(run_id)
    error, cause = _first_cause(folder, state)
    for attempt in folder.live_attempts:
        stop_attempt(hub, attempt, StopReason.CANCELLED, f"the run failed: {error}")
    words = release_endpoint(hub, run_id, cause)
    if words:
        cause = f"{cause} The endpoint's container said: {words}"  # first line: the reason
    if folder.run.state is RunState.CANCELLING:
        finish_cancel(hub, run_id)
    elif not is_terminal(folder.run.state):
        _end_run(hub, folder, error, cause)
    return {"error": error, "cause": cause[:1000]}


def conclude_failure(hub: Hub, run_id: str, execution: dict[str, Any]) -> dict[str, Any]:
    """End the execution with the run's failure; after a redrive let it go on with fresh budgets.

    ``execution`` is the context object's `Execution`, whose RedriveCount Step Functions raises by
    one with each redrive.

    Raises:
        RunFailedError, RunCancelledError, EndpointFailedError: which end the execution on this
        task.
    """
    folder = load_folder(hub, run_id)
    bind(run_id)
    run = folder.run
    redrives = int(execution.get("RedriveCount") or 0)
    present = execution.get("Id") == run.execution_arn
    if present and redrives > run.redrives:
        _reopen(hub, folder, redrives=redrives)
        folder = load_folder(hub, run_id)
        run = folder.run
    # Nothing else comes here with a run that goes on: this redrive has reopened it, now or in an
    # invocation that did not live to say so.
    if present and 0 < redrives == run.redrives and not (folder.over or is_terminal(run.state)):
        where = next_after_stages(folder)
        time = run.budget_since or _now()  # The reopening's, so that a repetition notes it once.
        note(hub, run_id, "run.redriven", f"redriven, goes on with: {where}", time=time)
        return {"next": where}
    words = f"{run.error or 'unknown'}: {run.cause or run.reason or ''}"
    if run.state in (RunState.CANCELLED, RunState.CANCELLING):
        raise RunCancelledError(run.reason or "cancelled")
    if run.state is RunState.ENDPOINT_FAILED:
        raise EndpointFailedError(words)
    raise RunFailedError(words)


def observe_execution(hub: Hub, name: str, arn: str) -> None:
    """Ask Step Functions about an execution that an event tells of, and see to its end.

    The event itself says little: it may come late or twice, and a redrive since then keeps the ARN.
    An end that Step Functions does not show yet is left to the reconciler.
    """
    # The run comes first: what is found ended after it was read has not been redriven before.
    run = hub.table.get_run(run_of_execution(name))
    if run is None or run.execution_arn != arn or is_terminal(run.state):
        return
    found = hub.executions.status(arn)
    if found is not None:
        status, error, cause = found
        execution_ended(hub, name, arn, status=status, error=error, cause=cause)


def execution_ended(
    hub: Hub, name: str, arn: str, *, status: str, error: str | None, cause: str | None
) -> None:
    """An execution ended by other means than our own last tasks. A run that has ended is left
    alone.

    An execution that is not its run's present one is of no interest: a late event must not end a
    resumed run.
    """
    run_id = run_of_execution(name)
    folder = hub.table.load(run_id)
    if folder is None or folder.run.execution_arn != arn:
        return
    bind(run_id)
    run = folder.run
    if status == "ABORTED":
        if not is_terminal(run.state):
            cancel_run(hub, run_id, cause or "aborted in Step Functions", stop_execution=False)
    elif status in ("FAILED", "TIMED_OUT"):
        if run.state is RunState.CANCELLING:
            cancel_run(hub, run_id, run.reason or "cancelled", stop_execution=False)
        elif not is_terminal(run.state):
            logger.error("execution failed", extra={"error": error, "cause": cause})
            failure = {"Error": error or status, "Cause": cause or "the execution ended"}
            clean_up(hub, run_id, {"error": failure})
    elif status == "SUCCEEDED" and not is_terminal(run.state):
        # FinishRun writes the row before the execution succeeds, so this is a fault of ours.
        logger.error("execution succeeded but the run has not ended")


def resume_run(hub: Hub, run_id: str, state_machine_arn: str) -> RunFolder:
    """Start a new execution that goes on where a failed or cancelled run stopped, with fresh
    budgets.

    Raises:
        ConflictError: the run is under way, has succeeded, or its last job has not ended.
    """
    folder = load_folder(hub, run_id)
    run = folder.run
    if run.state not in (RunState.FAILED, RunState.CANCELLED, RunState.ENDPOINT_FAILED):
        raise ConflictError(f"run {run_id} is {run.state.value}; only a run that failed or was "
                            "cancelled can be resumed")  # fmt: skip
    later = run.executions + 1
    name = execution_name(run_id, later)
    arn = execution_arn(state_machine_arn, name)
    _reopen(hub, folder, redrives=0, executions=later, execution_arn=arn)
    note(hub, run_id, "run.resumed", f"resumed as execution {name}", time=_now())
    hub.executions.start(state_machine_arn, name, {"run_id": run_id})
    return load_folder(hub, run_id)


def _reopen(hub: Hub, folder: RunFolder, **changes: Any) -> None:
    """Fresh budgets, no failure, the stage open again."""
    for stage in folder.stages:
        hub.table.update_stage(stage, budget_from=stage.attempts)
        if stage.state in (StageState.FAILED, StageState.CANCELLED):
            hub.table.update_stage(stage, StageState.RUNNING)
    state = RunState.TRAINING
    where = next_after_stages(folder)
    if where == "publish" and folder.run.state is not RunState.CANCELLED:
        state = RunState.DEPLOYING
    reset = {"error": None, "cause": None, "reason": None, "budget_since": _now()}
    if not hub.table.update_run(folder.run, state, **reset, **changes):
        raise ConflictError(f"run {folder.run.run_id} changed meanwhile")


def _first_cause(folder: RunFolder, state: dict[str, Any]) -> tuple[str, str]:
    run = folder.run
    if run.error is not None:
        return run.error, run.cause or ""
    caught = state.get("error")
    if isinstance(caught, dict):
        return str(caught.get("Error", "Unknown")), _words(str(caught.get("Cause", "")))
    ended = [attempt for attempt in folder.attempts if attempt.outcome is not None]
    if ended and folder.current_stage is not None:
        last = max(ended, key=lambda attempt: attempt.planned_at)
        assert last.outcome is not None
        names = {Outcome.CANCELLED: "JobStopped", Outcome.USER_FAILURE: "UserFailure"}
        return names.get(last.outcome, last.outcome.value), last.reason or "no reason known"
    return "Unknown", "the execution took a path that writes no cause"


def _words(cause: str) -> str:
    """A function's error message out of the JSON that Lambda makes of it."""
    try:
        parsed = json.loads(cause)
    except ValueError:
        return cause[:4000]
    message = parsed.get("errorMessage") if isinstance(parsed, dict) else None
    return str(message or cause)[:4000]


def _end_run(hub: Hub, folder: RunFolder, error: str, cause: str) -> None:
    run: RunRecord = folder.run
    if run.state is RunState.DEPLOYING:
        state, kind = RunState.ENDPOINT_FAILED, "run.endpoint_failed"
    elif error == "JobStopped":
        state, kind = RunState.CANCELLED, "run.cancelled"
    else:
        state, kind = RunState.FAILED, "run.failed"
    closed = StageState.CANCELLED if state is RunState.CANCELLED else StageState.FAILED
    _close_stages(hub, folder, closed)
    reason = f"{error}: {cause}".splitlines()[0][:500]
    if hub.table.update_run(run, state, error=error, cause=cause[:4000], reason=reason):
        note(hub, run.run_id, kind, reason, time=_now())
        count("RunsFailed" if state is not RunState.CANCELLED else "RunsCancelled")


def _close_stages(hub: Hub, folder: RunFolder, state: StageState) -> None:
    for stage in folder.stages:
        if stage.state is StageState.RUNNING:
            hub.table.update_stage(stage, state)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
