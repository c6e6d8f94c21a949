"""Run a reward function on samples. This function's role may do nothing but write its log."""

from __future__ import annotations

from typing import Any

from lambdas.logic.dry_run import dry_run
from lambdas.observability import logger


@logger.inject_lambda_context(clear_state=True)
def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 (read by Powertools)
    return dry_run(event).model_dump(mode="json")
