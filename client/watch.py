"""A live view of a run: stages, attempt, step, reward, checkpoint, interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from client.hub import ApiError, Hub, UnreachableError
from client.render import moment, size_text, state_text
from contracts.api import AttemptView, CheckpointView, RunView, TimelineEntry
from contracts.states import RunState, is_terminal

__all__ = ["Watch"]

_PATIENCE = 20
"""Observations in a row that may fail before watching ends: the run goes on without its watcher."""


@dataclass(slots=True)
class Watch:
    """Follows one run until it ends.

    On a terminal the view is redrawn in place; elsewhere (a log, a pipe) what happens is printed
    line by line.
    """

    hub: Hub
    run_id: str
    console: Console
    seconds_between: float = 2.0
    run: RunView | None = None
    attempts: list[AttemptView] = field(default_factory=list)
    checkpoints: list[CheckpointView] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Newest metrics row of each stage index."""
    timeline: list[TimelineEntry] = field(default_factory=list)

    def follow(self) -> RunView:
        """Watch until the run has ended; its last state."""
        if not self.console.is_terminal:
            return self._follow(self._print_news)
        with Live(console=self.console, auto_refresh=False) as live:
            return self._follow(lambda: live.update(self.view(), refresh=True))

    def _follow(self, show: Any) -> RunView:
        failures = 0
        while True:
            try:
                run = self.observe()
                failures = 0
            except (UnreachableError, ApiError) as error:
                gone = isinstance(error, ApiError) and error.problem.status < 500
                failures += 1
                if gone or failures > _PATIENCE:
                    raise
            else:
                show()
                if is_terminal(run.state):
                    return run
            time.sleep(self.seconds_between)

    def observe(self) -> RunView:
        """Ask the hub for everything the view shows."""
        run = self.hub.run(self.run_id)
        self.timeline = self.hub.timeline(self.run_id)
        self.attempts = self.hub.attempts(self.run_id)
        if self.attempts:
            stage = self.attempts[-1].stage_index
            self.checkpoints = self.hub.checkpoints(self.run_id, stage=stage)
            known = self.rows.get(stage)
            start = None if known is None else int(known["step"])
            for row in self.hub.metrics(self.run_id, stage=stage, from_step=start):
                self.rows[stage] = merged(self.rows.get(stage), row)
        self.run = run
        return run

    def view(self) -> RenderableType:
        """The picture of the last observation."""
        assert self.run is not None
        head = Text.assemble((self.run.run_id, "bold"), "  ", state_text(self.run.state))
        if self.run.reason:
            head.append(f"  {self.run.reason}", "yellow")
        return Group(head, self._stages(), *self._now(), self._news(8))

    def _stages(self) -> Table:
        assert self.run is not None
        table = Table(box=None, pad_edge=False)
        for column in ("stage", "method", "state", "attempts", "step", "reward", "validation"):
            table.add_column(column)
        for stage in self.run.stages:
            metrics: Mapping[str, Any] = self.rows.get(stage.index, {}).get("metrics", {})
            step = self.rows.get(stage.index, {}).get("step", stage.step)
            table.add_row(
                stage.name,
                stage.method,
                state_text(stage.state),
                str(stage.attempts),
                f"{step if step is not None else '-'}/{stage.max_steps or '?'}",
                number(metrics.get("reward", metrics.get("loss"))),
                number(metrics.get("validation/reward", metrics.get("validation/loss"))),
            )
        return table

    def _now(self) -> list[RenderableType]:
        lines: list[RenderableType] = []
        if self.attempts:
            job = self.attempts[-1]
            kind = "Spot" if job.spot else "on demand"
            text = (
                f"{job.job_name}: {job.secondary_status or job.state}, {job.instance_count} × "
                f"{job.instance_type} {kind}, {job.interruptions} interruption(s) in place"
            )
            if job.resumed_from_step is not None:
                text += f", resumed from step {job.resumed_from_step}"
            lines.append(Text(text))
        newest = next((item for item in self.checkpoints if item.complete), None)
        if newest is not None:
            lines.append(Text(f"checkpoint: step {newest.step}, {size_text(newest.size)}"))
        return lines

    def _news(self, count: int) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for entry in self.timeline[-count:]:
            table.add_row(
                Text(moment(entry.time), "dim"), Text(entry.kind, "cyan"), Text(entry.text)
            )
        return table

    def _print_news(self) -> None:
        for entry in self.timeline:
            # By content and not by place: what is told of late may have happened earlier.
            if entry not in self._printed:
                self._printed.add(entry)
                line = f"{moment(entry.time)} {entry.kind} {escape(entry.text)}"
                self.console.print(line, soft_wrap=True)
        assert self.run is not None
        for stage, row in self.rows.items():
            if self._steps.get(stage) == row["step"]:
                continue
            self._steps[stage] = row["step"]
            metrics = row["metrics"]
            shown = [
                f"{name} {number(metrics[name])}"
                for name in ("loss", "reward", "validation/loss", "validation/reward")
                if metrics.get(name) is not None
            ]
            name = self.run.stages[stage].name
            line = f"{name} step {row['step']}: {', '.join(shown)}"
            self.console.print(line, soft_wrap=True)

    _printed: set[TimelineEntry] = field(default_factory=set)
    _steps: dict[int, int] = field(default_factory=dict)


def merged(known: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the last known value of each metric that it lacks, such as validation's."""
    before = {} if known is None else known["metrics"]
    return {**row, "metrics": {**before, **row["metrics"]}}


def number(value: Any) -> str:
    """A metric for people; nothing for what was not measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return f"{value:.4g}"


def exit_code(run: RunView) -> int:
    """0 when the run succeeded, else 1."""
    return 0 if run.state is RunState.SUCCEEDED else 1
