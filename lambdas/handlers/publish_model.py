"""PublishModel: the last stage's model becomes the run's."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.deploying import publish_model


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return publish_model(hub(), event["run_id"])
