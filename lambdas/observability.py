"""One logger and one metrics buffer for all functions. Every line of a run's work carries run_id,
stage and attempt."""

from __future__ import annotations

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit

__all__ = ["bind", "count", "logger", "measure", "metrics"]

logger = Logger(utc=True)
metrics = Metrics()


def bind(run_id: str, stage: str | None = None, attempt: int | None = None) -> None:
    """Put these on every further log line of this invocation."""
    logger.append_keys(run_id=run_id, stage=stage, attempt=attempt)


def count(name: str, value: float = 1) -> None:
    """Add to a counter of this invocation (CloudWatch embedded metrics: no API call)."""
    metrics.add_metric(name=name, unit=MetricUnit.Count, value=value)


def measure(name: str, seconds: float) -> None:
    """A duration."""
    metrics.add_metric(name=name, unit=MetricUnit.Seconds, value=seconds)
