"""SmokeTest: ask the new endpoint one real question, keep the answer, set up scaling."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.deploying import smoke_test
from lambdas.settings import HostingSettings


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return smoke_test(hub(), event["run_id"], HostingSettings.from_environment())
