"""ConcludeFailure: end the execution with the run's failure, or go on after a redrive."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endings import conclude_failure


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return conclude_failure(hub(), event["run_id"], event["execution"])
