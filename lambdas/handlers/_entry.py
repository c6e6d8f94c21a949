"""What every handler has around it: log keys, metrics, a trace, and AWS's passing troubles by the
name the machine retries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lambdas.adapters.aws import AWS_ERRORS, as_transient
from lambdas.observability import logger, metrics, tracer

__all__ = ["entry"]

Event = dict[str, Any]


def entry(function: Callable[[Event], Any]) -> Callable[[Event, Any], Any]:
    """Make a Lambda handler of a function of the event."""

    @functools.wraps(function)
    def handler(event: Event, context: Any) -> Any:  # noqa: ARG001 (read by Powertools)
        try:
            return function(event)
        except AWS_ERRORS as error:
            transient = as_transient(error)
            if transient is None:
                raise
            raise transient from error
        finally:
            if metrics.metric_set:
                metrics.flush_metrics()

    # Answers stay out of traces: chats and logs pass through the API.
    traced = tracer.capture_lambda_handler(handler, capture_response=False)
    logged: Callable[[Event, Any], Any] = logger.inject_lambda_context(traced, clear_state=True)
    return logged
