"""AwaitEndpoint: keep the task's token until the endpoint is in service or has failed."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endpoints import await_endpoint
from lambdas.logic.specs import load_folder


@entry
def handler(event: dict[str, Any]) -> None:
    run = load_folder(hub(), event["run_id"]).run
    await_endpoint(hub(), str(run.endpoint_name), event["token"])
