"""Routes under `/v1/endpoints`."""

from __future__ import annotations

import datetime as dt
from typing import Any

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from contracts.api import ChatRequest, DeleteEndpointView, EndpointList, EndpointView
from contracts.states import EndpointState
from lambdas.errors import ConflictError, NotFoundError
from lambdas.hub import hub
from lambdas.logic.endpoints import delete_endpoint
from lambdas.logic.notes import note
from lambdas.logic.records import EndpointRecord
from lambdas.logic.views import endpoint_view

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]
_TAGS = ["endpoints"]


@router.get("/endpoints", tags=_TAGS, summary="List endpoints")
def list_endpoints() -> EndpointList:
    return EndpointList(endpoints=[endpoint_view(row) for row in hub().table.open_endpoints()])


@router.get("/endpoints/<name>", tags=_TAGS, summary="An endpoint")
def get_endpoint(name: str) -> EndpointView:
    return endpoint_view(_find(name))


@router.delete("/endpoints/<name>", tags=_TAGS, summary="Delete an endpoint (202)")
def delete(name: str) -> Response[DeleteEndpointView]:
    row = _find(name)
    if row.owned:
        raise ConflictError(f"run {row.run_id} is deploying to endpoint {name}: cancel it first")
    deleted, remaining = delete_endpoint(hub(), row)
    now = dt.datetime.now(dt.UTC)
    note(hub(), row.run_id, "endpoint.deleted", f"endpoint {name} deleted by a user", time=now)
    view = DeleteEndpointView(name=name, deleted=deleted, remaining=remaining)
    return Response(202, "application/json", view)


@router.post("/endpoints/<name>/chat", tags=_TAGS, summary="Ask an endpoint")
def chat(name: str, body: ChatRequest) -> dict[str, Any]:
    row = _find(name)
    document = body.model_dump()
    if document.get("stream"):
        raise ValueError(
            "stream: an HTTP API of API Gateway does not stream; call the endpoint itself with "
            "InvokeEndpointWithResponseStream, as `grpohub chat` does"
        )
    answer = hub().hosting.invoke(name, document, row.serving_component)
    hub().table.update_endpoint(row, last_chat_at=dt.datetime.now(dt.UTC))
    return answer


def _find(name: str) -> EndpointRecord:
    row = hub().table.get_endpoint(name)
    if row is None or row.state is EndpointState.DELETED:
        raise NotFoundError(f"no endpoint {name}")
    return row
