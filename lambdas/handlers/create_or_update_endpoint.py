"""CreateOrUpdateEndpoint: create the endpoint, or update one of ours blue/green."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.deploying import start_or_update
from lambdas.settings import HostingSettings


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return start_or_update(
        hub(), event["run_id"], event["rung"], HostingSettings.from_environment()
    )
