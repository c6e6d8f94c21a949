"""The adapters that a use case works with, made once per process."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lambdas.adapters.alarms import Alarms
from lambdas.adapters.bucket import Bucket
from lambdas.adapters.executions import Executions
from lambdas.adapters.hosting import Hosting
from lambdas.adapters.jobs import TrainingJobs
from lambdas.adapters.table import Table
from lambdas.adapters.telemetry import Telemetry
from lambdas.settings import HubSettings

__all__ = ["Hub", "hub"]


@dataclass(frozen=True, slots=True)
class Hub:
    """Table, bucket and services."""

    table: Table
    bucket: Bucket
    jobs: TrainingJobs
    hosting: Hosting
    executions: Executions
    telemetry: Telemetry
    alarms: Alarms


@functools.cache
def hub() -> Hub:
    """The process's hub. Clients are kept over invocations of a warm function."""
    settings = HubSettings.from_environment()
    return Hub(
        table=Table(settings.table),
        bucket=Bucket(settings.bucket),
        jobs=TrainingJobs(),
        hosting=Hosting(),
        executions=Executions(),
        telemetry=Telemetry(),
        alarms=Alarms(),
    )
