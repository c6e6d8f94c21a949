"""FinishRun: the run has succeeded."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.deploying import finish_run


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return finish_run(hub(), event["run_id"])
