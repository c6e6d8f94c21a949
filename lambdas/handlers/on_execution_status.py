"""An execution ended: one aborted in the console or timed out must leave nothing running."""

from __future__ import annotations

from typing import Any

from contracts.events import ExecutionEvent, parse_event
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endings import observe_execution


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, ExecutionEvent)
    observe_execution(hub(), parsed.detail.name, parsed.detail.execution_arn)
