"""CloudWatch alarms that belong to endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lambdas.adapters.aws import client

__all__ = ["Alarms"]


class Alarms:
    """Create and delete alarms by name; both may be repeated."""

    def __init__(self) -> None:
        self._cloudwatch = client("cloudwatch")

    def put(self, request: Mapping[str, Any]) -> None:
        """PutMetricAlarm: creates the alarm, or makes the one of that name so."""
        self._cloudwatch.put_metric_alarm(**request)

    def delete(self, name: str) -> None:
        """DeleteAlarms; CloudWatch passes over names that it does not know."""
        self._cloudwatch.delete_alarms(AlarmNames=[name])
