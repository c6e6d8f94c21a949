"""CreateEndpointConfig: create or adopt the configuration of the deploy ladder's present rung."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.deploying import create_endpoint_config
from lambdas.settings import HostingSettings


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return create_endpoint_config(hub(), event["run_id"], HostingSettings.from_environment())
