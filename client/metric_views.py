"""Metrics as a table, as lines in the terminal, and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from client.hub import Hub
from contracts.api import RunView, TimelineEntry
from contracts.problems import InvalidInputError, Problem, nearest
from contracts.states import StageState

__all__ = ["check_names", "metric_table", "plot_png", "plot_terminal", "rows_of_run", "series"]

MAIN = ("loss", "reward", "validation/loss", "validation/reward", "kl/k3", "entropy", "grad_norm",
        "length/response_mean", "tokens_per_second")  # fmt: skip
_BLOCKS = "▁▂▃▄▅▆▇█"
Row = dict[str, Any]
Series = list[tuple[int, float]]


def rows_of_run(hub: Hub, run: RunView, stage: int | None = None) -> list[Row]:
    """Metric rows of one stage, or of every stage that has begun, in order."""
    begun = [item.index for item in run.stages if item.state is not StageState.PENDING]
    wanted = begun if stage is None else [stage]
    return [row for index in wanted for row in hub.metrics(run.run_id, stage=index)]


def series(rows: Iterable[Row], name: str) -> Series:
    """(step, value) of a metric where it was measured and finite."""
    found: Series = []
    for row in rows:
        value = row["metrics"].get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.append((int(row["step"]), float(value)))
    return found


def by_stage(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each stage, in order of appearance."""
    stages: dict[str, list[Row]] = {}
    for row in rows:
        stages.setdefault(str(row["stage"]), []).append(row)
    return stages


def check_names(rows: Sequence[Row], names: Sequence[str] | None) -> None:
    """Refuse metrics that no row has.

    Raises:
        InvalidInputError: naming each, and the measured ones.
    """
    known = sorted({name for row in rows for name in row["metrics"]})
    problems = []
    for name in names or ():
        if rows and name not in known:
            guess = nearest(name, known)
            fix = f"Did you mean `{guess}`?" if guess else f"Measured are: {', '.join(known)}."
            problems.append(Problem("--name", name, "was not measured", fix))
    if problems:
        raise InvalidInputError(problems, subject="metrics")


def _chosen(rows: Sequence[Row], names: Sequence[str] | None) -> list[str]:
    if names:
        return list(names)
    present = {name for row in rows for name in row["metrics"]}
    return [name for name in MAIN if name in present]


def metric_table(rows: Sequence[Row], names: Sequence[str] | None = None) -> Table:
    """One line for each step, the main metrics or those named."""
    chosen = _chosen(rows, names)
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "step", *chosen):
        justify: Literal["left", "right"] = "left" if column == "stage" else "right"
        table.add_column(escape(column), justify=justify, overflow="fold")
    for row in rows:
        cells = [row["metrics"].get(name) for name in chosen]
        # A metric that was "not computed" has a reason that its own documentation gives.
        shown = [f"{c:.4g}" if isinstance(c, int | float) else "-" if c else "" for c in cells]
        table.add_row(str(row["stage"]), str(row["step"]), *shown)
    return table


def plot_terminal(
    rows: Sequence[Row], names: Sequence[str] | None = None, *, width: int = 60
) -> RenderableType:
    """One line of blocks for each stage and metric, with its first, best and last value."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "metric", "first", "", "last"):
        table.add_column(column)
    for stage, own in by_stage(rows).items():
        for name in _chosen(own, names):
            points = [value for _, value in series(own, name)]
            if points:
                line = Text(sparkline(points, width), "cyan")
                ends = (f"{points[0]:.4g}", line, f"{points[-1]:.4g}")
                table.add_row(stage, escape(name), *ends)
    return Group(table)


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as blocks, averaged down to at most ``width`` of them."""
    count = min(width, len(values))
    bins = [
        values[index * len(values) // count : (index + 1) * len(values) // count]
        for index in range(count)
    ]
    means = [sum(part) / len(part) for part in bins]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def plot_png(
    rows: Sequence[Row],
    path: Path,
    *,
    names: Sequence[str] | None = None,
    timeline: Sequence[TimelineEntry] = (),
    stage_names: Sequence[str] = (),
    title: str = "",
) -> None:
    """Draw metrics over the run's steps, stages side by side, interruptions as dashed lines.

    Steps count from 1 in each stage; here a stage begins where the one before ended. Entries of
    ``timeline`` name their stage by its index in ``stage_names``.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    chosen = [name for name in _chosen(rows, names) if series(rows, name)]
    figure, axes = pyplot.subplots(
        max(1, len(chosen)), 1, figsize=(9, 2.2 * max(1, len(chosen))), sharex=True, squeeze=False
    )
    offset = 0
    for index, (stage, own) in enumerate(by_stage(rows).items()):
        marks = _interruptions(timeline, stage_names, stage)
        last = max(int(row["step"]) for row in own)
        for axis, name in zip(axes[:, 0], chosen, strict=False):
            points = series(own, name)
            marker = "o" if name.startswith("validation/") else None
            steps = [offset + step for step, _ in points]
            axis.plot(steps, [value for _, value in points], color=f"C{index}", marker=marker)
            axis.axvline(offset, color="0.8", linewidth=0.8)
            for step in marks:
                axis.axvline(offset + step, color="C3", linestyle="--")
        axes[0, 0].text(offset, 1.02, stage, transform=axes[0, 0].get_xaxis_transform())
        offset += last
    for axis, name in zip(axes[:, 0], chosen, strict=False):
        axis.set_ylabel(name)
    axes[-1, 0].set_xlabel("step")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _interruptions(
    timeline: Sequence[TimelineEntry], stage_names: Sequence[str], stage: str
) -> list[int]:
    """Steps at which a stage was interrupted."""
    return [
        entry.step
        for entry in timeline
        if "interrupted" in entry.kind
        and entry.step is not None
        and entry.stage_index is not None
        and stage_names[entry.stage_index : entry.stage_index + 1] == [stage]
    ]
