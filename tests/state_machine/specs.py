"""Run files for tests: valid, small, with pauses of a second."""

from __future__ import annotations

import itertools
from typing import Any


def run_spec(
    *, stages: list[dict[str, Any]] | None = None, rungs: int = 1,
    deploy: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None, spot: bool = True, **compute: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run of one SFT stage on Spot; everything may be changed."""
    types = itertools.cycle(["ml.g5.xlarge", "ml.g6.xlarge", "ml.g5.2xlarge"])
    ladder = [{"instance_type": next(types), "spot": spot} for _ in range(rungs)]
    spec: dict[str, Any] = {
        "name": "demo",
        "model": {"source": "s3://run-bucket/inputs/model/"},
        "stages": stages or [sft("sft")],
        "compute": {"ladder": ladder, "max_runtime_hours": 10, **compute},
        "recovery": {
            "capacity_backoff_seconds": 1, "failure_backoff_seconds": 1, **(recovery or {}),
        },
    }  # fmt: skip
    if deploy is not None:
        spec["deploy"] = deploy
    return spec


def sft(name: str, **more: Any) -> dict[str, Any]:
    """An SFT stage of 20 steps."""
    return {
        "name": name,
        "method": "sft",
        "data": {
            "train": "s3://run-bucket/inputs/train.jsonl",
            "validation": "s3://run-bucket/inputs/val.jsonl",
        },
        "max_steps": 20,
        **more,
    }


DEPLOY = {"instance_type": "ml.g5.xlarge"}
