"""Objects appear in the run bucket: checkpoint flags, host reports, uploads, recipes."""

from __future__ import annotations

from typing import Any

from contracts.events import ObjectCreatedEvent, parse_event
from contracts.layout import parse_flag_key, parse_host_key
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.progress import on_flag, on_host_report
from lambdas.logic.uploads import on_recipe, on_upload
from lambdas.settings import read_setting


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, ObjectCreatedEvent)
    key = parsed.detail.object.key
    flag, host = parse_flag_key(key), parse_host_key(key)
    if flag is not None:
        on_flag(hub(), flag)
    elif host is not None:
        on_host_report(hub(), host)
    elif key.startswith("uploads/"):
        on_upload(hub(), parsed.detail, read_setting("STATE_MACHINE_ARN"))
    elif key.startswith("recipes/"):
        on_recipe(hub(), key)
