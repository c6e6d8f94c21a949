"""The HTTP API: routes, and the translation of errors into problem+json. What routes do is in
`lambdas.logic`."""

from __future__ import annotations

import json
from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayHttpResolver, Response
from aws_lambda_powertools.event_handler.exceptions import NotFoundError as NoRouteError
from aws_lambda_powertools.event_handler.middlewares import NextMiddleware
from aws_lambda_powertools.event_handler.openapi.exceptions import RequestValidationError
from aws_lambda_powertools.event_handler.openapi.models import Tag
from aws_lambda_powertools.utilities.typing import LambdaContext

from contracts.api import ProblemDocument, ProblemView
from contracts.problems import InvalidInputError
from contracts.run_spec import run_schema
from lambdas.adapters.aws import AWS_ERRORS, as_transient, blames_argument, refused_call
from lambdas.errors import (
    ConflictError,
    EndpointBusyError,
    HubError,
    InputMissingError,
    NotFoundError,
    ObjectMissingError,
    RequestRefusedError,
    TransientError,
)
from lambdas.handlers import api_endpoints, api_other, api_runs
from lambdas.handlers._entry import entry
from lambdas.logic.views import problem_view
from lambdas.observability import logger

__all__ = ["app", "handler", "openapi"]

app = APIGatewayHttpResolver(enable_validation=True)
for _module in (api_runs, api_endpoints, api_other):
    app.include_router(_module.router, prefix="/v1")

_RETRY_SECONDS = 5
# Class, HTTP status, problem type, title. The first class that fits counts.
_PROBLEMS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (NotFoundError, 404, "not-found", "Not found"),
    (ObjectMissingError, 404, "not-found", "Not found"),
    (ConflictError, 409, "conflict", "Not possible in the present state"),
    (InputMissingError, 422, "input-missing", "An input is missing"),
    (EndpointBusyError, 503, "endpoint-busy", "The endpoint does not take requests now"),
    (RequestRefusedError, 502, "model-error", "The model's server refused the request"),
    (TransientError, 503, "busy", "Try again"),
    (HubError, 500, "internal", "Internal error"),
)


def openapi() -> str:
    """The OpenAPI page, with the run file's JSON Schema as the schema of `spec`."""
    text = app.get_openapi_json_schema(
        title="GRPO Hub",
        version="1",
        description=(
            "Turns a run file into a trained, deployed model. Requests are signed with SigV4. "
            "Errors are `application/problem+json` (`ProblemDocument`)."
        ),
        tags=[
            Tag(name="runs", description="Runs and what they left."),
            Tag(name="endpoints", description="Endpoints of trained models."),
            Tag(name="rewards", description="The reward catalogue and reward dry runs."),
            Tag(name="recipes", description="Run files that an uploaded data file starts."),
            Tag(name="hub", description="The stack itself."),
        ],
    )
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    schema = run_schema()
    definitions = {f"RunFile{name}": part for name, part in schema.pop("$defs").items()}
    schema.pop("$schema")
    merged = json.dumps({"RunFile": schema, **definitions})
    schemas |= json.loads(merged.replace('"#/$defs/', '"#/components/schemas/RunFile'))
    schemas["CreateRunRequest"]["properties"]["spec"] = {
        "anyOf": [{"$ref": "#/components/schemas/RunFile"}, {"type": "null"}],
        "description": "The run file as data.",
    }
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs", {})
    schemas["ProblemDocument"] = problem
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _request_id() -> str:
    return str(app.current_event.request_context.request_id or "")


def _problem(
    status: int, kind: str, title: str, detail: str, problems: list[ProblemView] | None = None
) -> Response[str]:
    """The one form of an error; a client may ask again after one of 503."""
    document = ProblemDocument(
        type=f"urn:grpohub:problem:{kind}",
        title=title,
        status=status,
        detail=detail,
        request_id=_request_id(),
        problems=problems or [],
    )
    headers = {"X-Request-Id": document.request_id}  # Errors do not pass the middleware.
    if status == 503:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    return Response(status, "application/problem+json", document.model_dump_json(), headers=headers)


def _with_request_id(app: APIGatewayHttpResolver, next_middleware: NextMiddleware) -> Response[Any]:
    response: Response[Any] = next_middleware(app)
    response.headers["X-Request-Id"] = _request_id()
    return response


app.use([_with_request_id])


@app.exception_handler(RequestValidationError)  # type: ignore[untyped-decorator]
def _bad_request(error: RequestValidationError) -> Response[str]:
    problems = [
        ProblemView(
            path=".".join(str(part) for part in item["loc"]),
            value=None,
            reason=item["msg"],
            fix="See the API's page.",
        )
        for item in error.errors()
    ]
    detail = "; ".join(f"{problem.path}: {problem.reason}" for problem in problems)
    return _problem(422, "bad-request", "The request is not valid", detail, problems)


@app.exception_handler(InvalidInputError)  # type: ignore[untyped-decorator]
def _invalid(error: InvalidInputError) -> Response[str]:
    problems = [problem_view(problem) for problem in error.problems]
    return _problem(422, "invalid-run-file", "The run file is not valid", str(error), problems)


@app.exception_handler(HubError)  # type: ignore[untyped-decorator]
def _refused(error: HubError) -> Response[str]:
    return _hub_problem(error)


def _hub_problem(error: HubError) -> Response[str]:
    _, status, kind, title = next(row for row in _PROBLEMS if isinstance(error, row[0]))
    if status >= 500:
        logger.exception("request failed")
    return _problem(status, kind, title, str(error))


@app.exception_handler(list(AWS_ERRORS))  # type: ignore[untyped-decorator]
def _aws_failed(error: Any) -> Response[str]:
    transient = as_transient(error)
    if transient is not None:
        return _hub_problem(transient)
    paging = "next_token" in (app.current_event.query_string_parameters or {})
    if paging and blames_argument(error):
        # DynamoDB and CloudWatch alone can tell that a token of the right form is another list's.
        reason, fix = "is of another list, or has expired", "Leave it out to read from the start."
        problem = ProblemView(path="query.next_token", value=None, reason=reason, fix=fix)
        detail = f"{problem.path}: {reason}"
        return _problem(422, "bad-request", "The request is not valid", detail, [problem])
    logger.exception("AWS refused a call")
    return _problem(502, "aws-error", "AWS refused a call", refused_call(error))


@app.exception_handler(ValueError)  # type: ignore[untyped-decorator]
def _bad_value(error: ValueError) -> Response[str]:
    return _problem(422, "bad-request", "The request is not valid", str(error))


@app.not_found
def _no_route(error: NoRouteError) -> Response[str]:  # noqa: ARG001 (its text says no more)
    event = app.current_event
    return _problem(404, "no-route", "No such route", f"{event.http_method} {event.path}")


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return app.resolve(event, LambdaContext())  # Routes do not read the context.
