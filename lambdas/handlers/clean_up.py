"""CleanUp: every failing path comes here."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.endings import clean_up


@entry
def handler(event: dict[str, Any]) -> dict[str, Any]:
    return clean_up(hub(), event["run_id"], event["state"])
