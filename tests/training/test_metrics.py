"""Rows, the stdout line, and SageMaker's regular expressions for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.compute import TrackingSpec
from contracts.metrics import MAX_DEFINITIONS, metric_definitions, step_line
from training_container.failure import StageError
from training_container.metrics import MetricsWriter, RunIdentity, trackers

IDENTITY = RunIdentity("run-1", "strict", "grpo", 2, "g7")


def read(line: str, sources: list[str]) -> dict[str, float]:
    """What SageMaker makes of a line."""
    found = {}
    for definition in metric_definitions("grpo", sources):
        match = re.search(definition["Regex"], line)
        if match:
            found[definition["Name"]] = float(match[1])
    return found


def test_every_number_of_the_line_is_read_back() -> None:
    metrics = {
        "reward": 0.5625,
        "reward/format": 1.0,
        "reward/format/std": 0.1,
        "validation/reward": 0.25,
        "validation/reward/format": 0.75,
        "loss": -1.5e-08,
        "learning_rate": 1e-6,
        "grad_norm": 3,
        "kl/k1": "not computed",
        "entropy": None,
        "reward_std": float("nan"),
    }
    line = step_line("grpo", 12, metrics, ["format"])
    assert read(line, ["format"]) == {
        "step": 12,
        "reward": 0.5625,
        "reward/format": 1.0,
        "validation/reward": 0.25,
        "validation/reward/format": 0.75,
        "loss": -1.5e-08,
        "learning_rate": 1e-6,
        "grad_norm": 3,
    }


def test_other_output_is_not_taken_for_metrics() -> None:
    assert read("the model said reward=0.9 step=3", []) == {}


def test_definitions_stay_within_the_limits_of_sagemaker() -> None:
    definitions = metric_definitions("grpo", [f"source-{n}" for n in range(40)])
    assert len(definitions) == MAX_DEFINITIONS
    for definition in definitions:
        assert len(definition["Name"]) <= 255
        assert len(definition["Regex"]) <= 500
        assert re.compile(definition["Regex"]).groups == 1


class Failing:
    """A tracker whose service is down."""

    name = "failing"
    calls = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:  # noqa: ARG002
        self.calls += 1
        raise ConnectionError("down")

    def close(self) -> None:
        """Nothing to release."""


def test_rows_are_appended_over_restarts_and_a_broken_tracker_is_dropped(tmp_path: Path) -> None:
    """verl-project/verl#2783: the file was truncated on a resume."""
    tracker = Failing()
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, IDENTITY, trackers=[tracker], emit=lambda _line: None)
        writer.write(step, {"reward": 0.5, "loss": float("inf"), "kl/k1": "not computed"})
        writer.write(step + 10, {"reward": 0.5})
        writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 11, 2, 12]
    assert rows[0]["metrics"] == {"reward": 0.5, "loss": None, "kl/k1": "not computed"}
    assert (rows[0]["attempt"], rows[0]["generation"], rows[0]["stage"]) == (2, "g7", "strict")
    assert tracker.calls == 2


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    """hiyouga/EasyR1#315: the logger crashed on a value's type."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    built = trackers(TrackingSpec(tensorboard=True), IDENTITY, tmp_path, {})
    writer = MetricsWriter(tmp_path, IDENTITY, trackers=built, emit=lambda _line: None)
    writer.write(3, {"reward": 0.5, "updates": 2, "kl/k1": "not computed"})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "updates"}
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.5)]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    spec = TrackingSpec.model_validate(
        {"swanlab": {"project": "p", "api_key_secret": "s"}}, strict=False
    )
    with pytest.raises(StageError, match=r"tracking\.swanlab needs 'swanlab'"):
        trackers(spec, IDENTITY, tmp_path, {"s": "key"})
