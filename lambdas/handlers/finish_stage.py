"""FinishStage: verify a stage's exported model."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.training import finish_stage


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return finish_stage(hub(), event["run_id"])
