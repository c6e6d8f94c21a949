"""An execution ended: one aborted in the console or timed out must leave nothing running."""

from __future__ import annotations

from typing import Any

from contracts.events import ExecutionEvent, parse_event
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endings import execution_ended


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, ExecutionEvent)
    detail = parsed.detail
    execution_ended(
        hub(),
        detail.name,
        detail.execution_arn,
        status=detail.status,
        error=detail.error,
        cause=detail.cause,
    )
