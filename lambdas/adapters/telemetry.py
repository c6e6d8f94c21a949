"""CloudWatch: logs of jobs and endpoints, and how much an endpoint is used."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from botocore.exceptions import ClientError

from contracts.failures import START_FAILED
from lambdas.adapters.aws import client, error_code

__all__ = ["LoggedLine", "Telemetry"]

_JOBS = "/aws/sagemaker/TrainingJobs"
_ENDPOINTS = "/aws/sagemaker/Endpoints/{}"
_LONGEST_DEPLOYMENT = dt.timedelta(hours=3)
"""Provisioning, download and health check may take an hour each. Lines from before are of another
deployment to the same endpoint."""


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """One line of a log stream."""

    time: dt.datetime
    stream: str
    message: str


class Telemetry:
    """What CloudWatch knows."""

    def __init__(self) -> None:
        self._logs = client("logs")
        self._cloudwatch = client("cloudwatch")

    def job_lines(
        self, job: str, token: str | None, start: dt.datetime | None
    ) -> tuple[list[LoggedLine], str | None]:
        """(lines of all hosts of a job since ``start``, token of the next page)."""
        return self._filter(_JOBS, f"{job}/", token, start, 1000)

    def endpoint_lines(self, endpoint: str, limit: int = 20) -> list[LoggedLine]:
        """What the containers of an endpoint's latest deployment said: the one line that our image
        ends a failed start with, else the first lines."""
        group = _ENDPOINTS.format(endpoint)
        since = dt.datetime.now(dt.UTC) - _LONGEST_DEPLOYMENT
        pattern = f'"{START_FAILED.strip()}"'
        failed, _ = self._filter(group, None, None, since, limit, pattern=pattern)
        return failed[-1:] or self._filter(group, None, None, since, limit)[0]

    def invocations(self, endpoint: str, variant: str, since: dt.datetime, now: dt.datetime) -> int:
        """Requests to an endpoint between two times."""
        answer = self._cloudwatch.get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName="Invocations",
            Dimensions=[
                {"Name": "EndpointName", "Value": endpoint},
                {"Name": "VariantName", "Value": variant},
            ],
            StartTime=since,
            EndTime=now,
            Period=3600,
            Statistics=["Sum"],
        )
        return int(sum(point["Sum"] for point in answer["Datapoints"]))

    def _filter(
        self,
        group: str,
        prefix: str | None,
        token: str | None,
        start: dt.datetime | None,
        limit: int,
        *,
        pattern: str | None = None,
    ) -> tuple[list[LoggedLine], str | None]:
        request: dict[str, object] = {"logGroupName": group, "limit": limit}
        if pattern is not None:
            request["filterPattern"] = pattern
        if prefix is not None:
            request["logStreamNamePrefix"] = prefix
        if token is not None:
            request["nextToken"] = token
        if start is not None:
            request["startTime"] = int(start.timestamp() * 1000)
        try:
            answer = self._logs.filter_log_events(**request)
        except ClientError as error:
            if error_code(error) == "ResourceNotFoundException":  # Nothing was ever logged.
                return [], None
            raise
        lines = [
            LoggedLine(
                dt.datetime.fromtimestamp(event["timestamp"] / 1000, tz=dt.UTC),
                event["logStreamName"],
                event["message"].rstrip("\n"),
            )
            for event in answer["events"]
        ]
        return lines, answer.get("nextToken")
