"""Records and run files for unit tests."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

from contracts.run_spec import RunSpec, parse_run_spec
from contracts.states import AttemptState, RunState, StageState
from lambdas.logic.decide import Observation, Transition
from lambdas.logic.records import AttemptRecord, PublishedModel, RunRecord, StageRecord
from tests.state_machine.specs import run_spec

NOW = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
RUN_ID = "demo-20260101-0a1b2c3d"


def spec(**changes: Any) -> RunSpec:
    return parse_run_spec(run_spec(**changes))


def attempt(number: int = 1, **changes: Any) -> AttemptRecord:
    """A submitted attempt."""
    record = AttemptRecord(
        run_id=RUN_ID,
        stage_index=0,
        stage="sft",
        number=number,
        job_name=f"{RUN_ID}-0-a{number:03d}",
        state=AttemptState.SUBMITTED,
        planned_at=NOW,
        rung=0,
        instance_type="ml.g5.xlarge",
        instance_count=1,
        spot=True,
        max_runtime_seconds=36000,
        max_wait_seconds=40000,
        submitted_at=NOW,
    )
    return dataclasses.replace(record, **changes)


def ended(number: int, outcome: Any, **changes: Any) -> AttemptRecord:
    return attempt(number, state=AttemptState.ENDED, outcome=outcome, **changes)


def run(**changes: Any) -> RunRecord:
    record = RunRecord(
        run_id=RUN_ID,
        name="demo",
        state=RunState.TRAINING,
        created_at=NOW,
        updated_at=NOW,
        spec_sha256="0" * 64,
        source="api",
        model_uri="s3://run-bucket/inputs/model/",
    )
    return dataclasses.replace(record, **changes)


def stage(**changes: Any) -> StageRecord:
    record = StageRecord(
        run_id=RUN_ID, index=0, name="sft", method="sft", state=StageState.RUNNING, max_steps=20
    )
    return dataclasses.replace(record, **changes)


def model(**changes: Any) -> PublishedModel:
    record = PublishedModel("s3://run-bucket/m/", "ab" * 32, "sft", 20, 15_000_000_000)
    return dataclasses.replace(record, **changes)


def observed(
    status: str, secondary: str, *history: tuple[str, float], **changes: Any
) -> Observation:
    """A job created at NOW; ``history`` gives (secondary status, minutes after NOW)."""
    transitions = tuple(
        Transition(name, NOW + dt.timedelta(minutes=minutes)) for name, minutes in history
    )
    return Observation(status, secondary, NOW, transitions=transitions, **changes)


def after(minutes: float) -> dt.datetime:
    return NOW + dt.timedelta(minutes=minutes)
