"""Every five minutes: look at everything that is not terminal and finish what an event missed."""

from __future__ import annotations

from typing import Any

from lambdas.adapters.aws import AWS_ERRORS
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.reconcile import reconcile
from lambdas.settings import read_setting


@entry
def handler(event: dict[str, Any]) -> dict[str, int]:  # noqa: ARG001 (a schedule's event says nothing)
    machine, stack = read_setting("STATE_MACHINE_ARN"), read_setting("STACK_NAME")
    return reconcile(hub(), machine, stack=stack, catch=AWS_ERRORS)
