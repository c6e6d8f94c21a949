"""What the demo tells and measures: lines with times, the embedded mode, interruptions."""

from __future__ import annotations

import datetime as dt
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client.hub import Hub
from contracts.metrics import MARK

__all__ = ["Interruption", "Line", "Story", "embedded_mode", "measure", "take_away"]

SPEED = 20
"""The embedded mode's schedules and grace periods run this much faster than AWS's."""
_STEP = re.compile(rf"{MARK} step=(\d+)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the story."""

    seconds: float
    what: str
    text: str


@dataclass(slots=True)
class Story:
    """Prints lines with the seconds since the start, and keeps them for the report."""

    start: float = field(default_factory=time.monotonic)
    lines: list[Line] = field(default_factory=list)

    def tell(self, what: str, text: str) -> None:
        line = Line(round(time.monotonic() - self.start, 1), what, text)
        self.lines.append(line)
        print(f"{line.seconds:6.1f} s  {what:24} {text}", flush=True)


@dataclass(slots=True)
class Interruption:
    """A taking away of the instance: planned, done, measured."""

    stage: int
    stage_name: str
    after_step: int
    with_notice: bool
    hold: float
    """Seconds without capacity; beyond `in_place_wait_minutes` the job is moved."""
    at: dt.datetime | None = None
    step: int = 0
    steps_lost: int = 0
    seconds_to_training_again: float = 0.0

    def report(self) -> dict[str, Any]:
        """As the report has it."""
        return {
            "stage": self.stage_name,
            "with_notice": self.with_notice,
            "step": self.step,
            "steps_lost": self.steps_lost,
            "seconds_to_training_again": round(self.seconds_to_training_again, 1),
        }


@contextmanager
def embedded_mode(folder: Path) -> Iterator[None]:
    """`grpohub local up` as a process of its own, its state under ``folder``/.grpohub.

    Raises:
        RuntimeError: with the log's end, when it does not come up.
    """
    state = folder / ".grpohub"
    state.mkdir(parents=True, exist_ok=True)
    log = folder / "cloud.log"
    command = [*_grpohub("up", state), "--port", "0", "--speed", str(SPEED)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _await_address(process, state / "local.json", log)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _grpohub(command: str, state: Path) -> list[str]:
    return [sys.executable, "-m", "local_aws", command, "--state-dir", str(state)]


def _await_address(process: subprocess.Popen[bytes], note: Path, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        if note.is_file() and json.loads(note.read_text())["pid"] == process.pid:
            return
        time.sleep(0.2)
    raise RuntimeError(f"the embedded mode did not come up:\n{log.read_text()[-3000:]}")


def take_away(folder: Path, run_id: str, interruption: Interruption, story: Story) -> None:
    """`grpohub local interrupt`, as a person would type it."""
    command = [*_grpohub("interrupt", folder / ".grpohub"), run_id]
    command += ["--hold", str(interruption.hold)]
    command += [] if interruption.with_notice else ["--no-notice"]
    interruption.at = dt.datetime.now(dt.UTC)
    subprocess.run(command, check=True, capture_output=True)
    word = "with notice" if interruption.with_notice else "SIGKILL, no notice"
    story.tell("INTERRUPT", f"{interruption.stage_name}: the Spot instance is taken away ({word})")


def measure(hub: Hub, run_id: str, interruption: Interruption, rows: list[dict[str, Any]]) -> None:
    """Fill in what an interruption cost, from the metrics that stand and the log of all steps."""
    assert interruption.at is not None
    later = [row for row in rows if _time(row) > interruption.at]
    earlier = [row for row in rows if _time(row) <= interruption.at]
    old = {row["generation"] for row in earlier}
    again = next(row for row in later if row["generation"] not in old)
    interruption.seconds_to_training_again = (_time(again) - interruption.at).total_seconds()
    done = [
        int(match[1])
        for attempt in hub.attempts(run_id)
        if attempt.stage_index == interruption.stage
        for line in hub.logs(run_id, stage=interruption.stage, attempt=attempt.attempt)
        if (match := _STEP.search(line.message)) and line.time < _time(again)
    ]
    interruption.step = max((step for step in done), default=int(again["step"]) - 1)
    interruption.steps_lost = max(0, interruption.step - (int(again["step"]) - 1))


def _time(row: dict[str, Any]) -> dt.datetime:
    return dt.datetime.fromisoformat(row["time"])
