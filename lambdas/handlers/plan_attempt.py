"""PlanAttempt: plan the run's next training job, or give up."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.training import plan_next


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return plan_next(hub(), event["run_id"])
