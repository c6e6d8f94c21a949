"""One logger, one metrics buffer and one tracer for all functions. Every log line of a run's work
carries run_id, stage and attempt, and so does its trace."""

from __future__ import annotations

from aws_lambda_powertools import Logger, Metrics, Tracer
from aws_lambda_powertools.metrics import MetricUnit

__all__ = ["bind", "count", "logger", "measure", "metrics", "tracer"]

logger = Logger(utc=True)
metrics = Metrics()
# Every AWS call becomes a subsegment. Where X-Ray does not listen (outside Lambda, or with
# POWERTOOLS_TRACE_DISABLED) Powertools makes all of it a no-op and patches nothing.
tracer = Tracer(patch_modules=("botocore",))


def bind(run_id: str, stage: str | None = None, attempt: int | None = None) -> None:
    """Put these on every further log line of this invocation, and on its trace."""
    logger.append_keys(run_id=run_id, stage=stage, attempt=attempt)
    # X-Ray keeps a trace for 30 days and adds to it for 7: a run is found by these, not by one
    # trace.
    for name, value in {"run_id": run_id, "stage": stage, "attempt": attempt}.items():
        if value is not None:
            tracer.put_annotation(name, str(value))


def count(name: str, value: float = 1) -> None:
    """Add to a counter of this invocation (CloudWatch embedded metrics: no API call)."""
    metrics.add_metric(name=name, unit=MetricUnit.Count, value=value)


def measure(name: str, seconds: float) -> None:
    """A duration."""
    metrics.add_metric(name=name, unit=MetricUnit.Seconds, value=seconds)
