"""`make demo`, as a person runs it: what it leaves behind, read by somebody who was not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_demo_trains_is_interrupted_recovers_deploys_and_answers(tmp_path: Path) -> None:
    """Its exit code vouches for all of it; the report is what it says about itself."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.tv_navigation.demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    folder = tmp_path / ".grpohub/demo"
    report = json.loads((folder / "report.json").read_text())

    stages = report["stages"]
    assert [(s["name"], s["method"]) for s in stages] == [
        ("warm-up", "sft"), ("smooth", "grpo"), ("strict", "grpo"),
    ]  # fmt: skip
    assert all(s["start_step"] < s["end_step"] for s in stages)
    assert all(s["attempts"] >= 1 and s["seconds"] > 0 for s in stages)
    gain = stages[2]["held_out_accuracy_after"] - stages[0]["held_out_accuracy_after"]
    assert gain >= 0.30
    assert 0 <= stages[0]["held_out_accuracy_before"] < stages[0]["held_out_accuracy_after"] <= 1

    noticed, killed = report["interruptions"]
    assert (noticed["with_notice"], killed["with_notice"]) == (True, False)
    assert noticed["steps_lost"] == 0, "a warned job saves before it goes"
    assert all(i["step"] > 0 and i["seconds_to_training_again"] > 0 for i in (noticed, killed))
    interrupted = next(s for s in stages if s["name"] == killed["stage"])
    assert interrupted["attempts"] == 2

    assert report["run_id"].startswith("tv-navigation-")
    assert report["endpoint"] == "tv-navigation"
    assert report["question"]
    assert report["answer"]
    assert (folder / "reward.png").read_bytes().startswith(PNG)
