"""SubmitAttempt: create or adopt the planned training job and keep the task's token."""

from __future__ import annotations

from typing import Any

from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.submitting import submit_attempt
from lambdas.settings import JobSettings


@entry
def handler(event: dict[str, Any]) -> None:
    submit_attempt(hub(), event["run_id"], event["token"], JobSettings.from_environment())
