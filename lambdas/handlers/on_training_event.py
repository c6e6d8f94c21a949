"""A training job changed state. The event is a hint; DescribeTrainingJob is asked for the truth."""

from __future__ import annotations

from typing import Any

from contracts.events import TrainingJobEvent, parse_event
from contracts.layout import parse_job_name
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.attempts import observe
from lambdas.logic.endings import finish_cancel


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, TrainingJobEvent)
    coordinates = parse_job_name(parsed.detail.training_job_name)
    # The rule passes every training job of the account: most are not ours.
    if coordinates is None or observe(hub(), *coordinates) is None:
        return
    finish_cancel(hub(), coordinates[0])
