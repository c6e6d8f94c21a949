"""Routes under `/v1/runs`."""

from __future__ import annotations

from typing import Annotated

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.openapi.params import Header, Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from contracts.api import (
    AttemptList,
    CheckpointList,
    CreateRunRequest,
    DeployRequest,
    LogsPage,
    MetricsPage,
    RunPage,
    RunView,
    TimelinePage,
    ValidationView,
)
from contracts.problems import InvalidInputError
from contracts.states import RunState
from lambdas.hub import hub
from lambdas.logic.endings import cancel_run, resume_run
from lambdas.logic.reading import begun_stage, read_checkpoints, read_logs, read_metrics
from lambdas.logic.runs import RunRequest, check_request, create_run, deploy_run
from lambdas.logic.specs import load_folder
from lambdas.logic.views import (
    attempt_view,
    problem_view,
    run_summary,
    run_view,
    timeline_entry,
)
from lambdas.settings import read_setting

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]
_TAGS = ["runs"]
Limit = Annotated[int, Query(ge=1, le=1000)]
Token = Annotated[str | None, Query()]
Stage = Annotated[int | None, Query(ge=0, le=9)]


def _request(body: CreateRunRequest) -> RunRequest:
    return RunRequest(body.spec if body.spec is not None else body.yaml, body.files)


def _respond(status: int, view: RunView) -> Response[RunView]:
    return Response(status, "application/json", view)


@router.post("/runs", tags=_TAGS, summary="Start a run (201)")
def post_run(
    body: CreateRunRequest,
    idempotency_key: Annotated[
        str | None, Header(alias="Idempotency-Key", min_length=1, max_length=128)
    ] = None,
) -> Response[RunView]:
    key = None if idempotency_key is None else f"api-{idempotency_key}"
    folder = create_run(
        hub(), _request(body), key=key, state_machine_arn=read_setting("STATE_MACHINE_ARN")
    )
    return _respond(201, run_view(hub(), folder))


@router.post("/runs/validate", tags=_TAGS, summary="Check a run file and its files")
def validate_run(body: CreateRunRequest) -> ValidationView:
    try:
        spec = check_request(_request(body))
    except InvalidInputError as error:
        return ValidationView(valid=False, problems=[problem_view(p) for p in error.problems])
    return ValidationView(valid=True, spec=spec.model_dump(mode="json"))


@router.get("/runs", tags=_TAGS, summary="List runs, newest first")
def list_runs(
    limit: Limit = 50, next_token: Token = None, state: Annotated[RunState | None, Query()] = None
) -> RunPage:
    runs, after = hub().table.list_runs(limit, next_token, state)
    return RunPage(runs=[run_summary(run) for run in runs], next_token=after)


@router.get("/runs/<run_id>", tags=_TAGS, summary="A run")
def get_run(run_id: str) -> RunView:
    return run_view(hub(), load_folder(hub(), run_id))


@router.post("/runs/<run_id>/cancel", tags=_TAGS, summary="Cancel a run")
def cancel(run_id: str) -> RunView:
    return run_view(hub(), cancel_run(hub(), run_id, "cancelled through the API"))


@router.post("/runs/<run_id>/resume", tags=_TAGS, summary="Take up a failed or cancelled run")
def resume(run_id: str) -> RunView:
    return run_view(hub(), resume_run(hub(), run_id, read_setting("STATE_MACHINE_ARN")))


@router.post("/runs/<run_id>/deploy", tags=_TAGS, summary="Deploy a run's model (202)")
def deploy(run_id: str, body: DeployRequest) -> Response[RunView]:
    folder = deploy_run(hub(), run_id, body.deploy, read_setting("STATE_MACHINE_ARN"))
    return _respond(202, run_view(hub(), folder))


@router.get("/runs/<run_id>/attempts", tags=_TAGS, summary="Training jobs of a run")
def attempts(run_id: str) -> AttemptList:
    folder = load_folder(hub(), run_id)
    return AttemptList(attempts=[attempt_view(attempt) for attempt in folder.attempts])


@router.get("/runs/<run_id>/checkpoints", tags=_TAGS, summary="Checkpoints of a stage")
def checkpoints(run_id: str, stage: Stage = None) -> CheckpointList:
    row = begun_stage(load_folder(hub(), run_id), stage)
    return CheckpointList(checkpoints=read_checkpoints(hub(), row))


@router.get("/runs/<run_id>/metrics", tags=_TAGS, summary="Metrics of a stage, by step")
def metrics(
    run_id: str,
    stage: Stage = None,
    from_step: Annotated[int, Query(ge=0)] = 0,
    limit: Limit = 500,
) -> MetricsPage:
    row = begun_stage(load_folder(hub(), run_id), stage)
    return read_metrics(hub(), row, from_step, limit)


@router.get("/runs/<run_id>/logs", tags=_TAGS, summary="Log of an attempt")
def logs(
    run_id: str,
    stage: Stage = None,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    next_token: Token = None,
) -> LogsPage:
    folder = load_folder(hub(), run_id)
    row = begun_stage(folder, stage)
    found = folder.attempt(row.index, row.attempts if attempt is None else attempt)
    return read_logs(hub(), found, next_token)


@router.get("/runs/<run_id>/timeline", tags=_TAGS, summary="What happened to a run")
def timeline(run_id: str, limit: Limit = 200, next_token: Token = None) -> TimelinePage:
    load_folder(hub(), run_id)
    entries, after = hub().table.timeline(run_id, limit, next_token)
    return TimelinePage(entries=[timeline_entry(entry) for entry in entries], next_token=after)
