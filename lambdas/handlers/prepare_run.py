"""PrepareRun: check the run's inputs and say where it begins."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.training import prepare_run


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return prepare_run(hub(), event["run_id"], event["execution_arn"])
