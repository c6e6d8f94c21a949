"""An endpoint changed state. The event is a hint; DescribeEndpoint is asked for the truth."""

from __future__ import annotations

from typing import Any

from contracts.events import EndpointEvent, parse_event
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endpoints import observe_endpoint


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, EndpointEvent)
    observe_endpoint(hub(), parsed.detail.endpoint_name)
