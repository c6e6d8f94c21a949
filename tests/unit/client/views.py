"""Answers of the API for tests."""

from __future__ import annotations

import datetime as dt
from typing import Any

from contracts.api import (
    AttemptView,
    CheckpointView,
    EndpointView,
    InfoView,
    RunView,
    StageView,
    TimelineEntry,
)

NOON = dt.datetime(2026, 1, 2, 12, 0, tzinfo=dt.UTC)
INFO = InfoView(
    version="0.1.0",
    region="us-east-1",
    bucket="hub-bucket",
    state_machine_arn="arn:machine",
    training_image="train",
    inference_image="serve",
)


def run_view(state: str = "TRAINING", **changes: Any) -> RunView:
    fields: dict[str, Any] = {
        "run_id": "tv-20260102-abc123",
        "name": "tv",
        "state": state,
        "created_at": NOON,
        "updated_at": NOON,
        "source": "api",
        "spec": {},
        "stages": [
            StageView(
                index=0, name="warm-up", method="sft", state="SUCCEEDED", attempts=1, max_steps=10
            ),
            StageView(
                index=1, name="smooth", method="grpo", state="RUNNING", attempts=2, max_steps=20
            ),
        ],
    }
    return RunView.model_validate({**fields, **changes})


def attempt_view(**changes: Any) -> AttemptView:
    fields: dict[str, Any] = {
        "stage_index": 1,
        "stage": "smooth",
        "attempt": 2,
        "job_name": "tv-20260102-abc123-1-a002",
        "state": "RUNNING",
        "instance_type": "ml.m5.xlarge",
        "instance_count": 1,
        "spot": True,
        "secondary_status": "Training",
        "interruptions": 1,
        "resumed_from_step": 4,
        "planned_at": NOON,
    }
    return AttemptView.model_validate({**fields, **changes})


def checkpoint_view(step: int, **changes: Any) -> CheckpointView:
    fields: dict[str, Any] = {
        "stage_index": 1,
        "stage": "smooth",
        "step": step,
        "generation": "g",
        "complete": True,
        "size": 12_300_000,
        "metrics": {"validation/reward": 0.5},
    }
    return CheckpointView.model_validate({**fields, **changes})


def endpoint_view(**changes: Any) -> EndpointView:
    fields: dict[str, Any] = {
        "name": "tv",
        "state": "IN_SERVICE",
        "run_id": "tv-20260102-abc123",
        "model_version": "f" * 64,
        "instance_type": "ml.m5.large",
        "instance_count": 1,
        "created_at": NOON,
        "updated_at": NOON,
    }
    return EndpointView.model_validate({**fields, **changes})


def happened(kind: str, text: str, **changes: Any) -> TimelineEntry:
    return TimelineEntry.model_validate({"time": NOON, "kind": kind, "text": text, **changes})


def metric_row(step: int, stage: str = "smooth", **metrics: Any) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": 1,
        "generation": "g",
        "time": NOON.isoformat(),
        "stage": stage,
        "metrics": metrics,
    }
