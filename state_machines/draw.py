"""Draw `docs/grpo_run.png` from the state machine's definition.

    python state_machines/draw.py

Tasks are blue (with a thick edge where they wait for a token), choices yellow, the pause green. The
ways of failure are one sentence in the picture instead of twenty arrows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
DEFINITION = ROOT / "state_machines" / "grpo_run.asl.json"
PICTURE = ROOT / "docs" / "grpo_run.png"
COLOURS = {"Task": "#dbe9f6", "Choice": "#fdf1cf", "Wait": "#e4f2df"}

# Column (training, deployment, failure) and row of each state, in reading order.
PLACES: Mapping[str, tuple[float, float]] = {
    "PrepareRun": (0, 0), "RoutePrepared": (0, 1), "PlanAttempt": (0, 2), "RoutePlan": (0, 3),
    "BackOff": (-1, 3.5), "SubmitAttempt": (0, 4.5), "RouteOutcome": (0, 5.5),
    "FinishStage": (0, 6.5), "RouteStage": (0, 7.5),
    "PublishModel": (1.5, 0), "DeployWanted": (1.5, 1), "CreateModel": (1.5, 2),
    "CreateEndpointConfig": (1.5, 3), "CreateOrUpdateEndpoint": (1.5, 4),
    "AwaitEndpoint": (1.5, 5), "RouteEndpoint": (1.5, 6), "SmokeTest": (1.5, 7),
    "FinishRun": (1.5, 8),
    "CleanUp": (3, 5.5), "ConcludeFailure": (3, 6.5), "RouteConcluded": (3, 7.5),
}  # fmt: skip


def edges(states: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(from, to, label) of every transition but those of `Catch`."""
    for name, state in states.items():
        if "Next" in state:
            yield name, state["Next"], ""
        for choice in state.get("Choices", ()):
            yield name, choice["Next"], choice["StringEquals"]
        if "Default" in state:
            yield name, state["Default"], "else"


def main() -> None:
    states = json.loads(DEFINITION.read_text())["States"]
    assert set(PLACES) == set(states), set(PLACES) ^ set(states)
    figure, axes = plt.subplots(figsize=(13, 13))
    merged: dict[tuple[str, str], list[str]] = {}
    for start, end, label in edges(states):
        merged.setdefault((start, end), []).append(label)
    for (start, end), labels in merged.items():
        if end != "CleanUp":
            _arrow(axes, start, end, "\n".join(filter(None, labels)))
    for name, state in states.items():
        _box(axes, name, state)
    axes.text(
        3, 5.1, "The Catch of every task\nand the default of every choice\nlead to CleanUp.",
        ha="center", fontsize=9, color="#a33",
    )  # fmt: skip
    axes.set_xlim(-1.7, 3.8)
    axes.set_ylim(8.6, -0.6)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=80, metadata={"Software": None})


def _box(axes: Axes, name: str, state: Mapping[str, Any]) -> None:
    x, y = PLACES[name]
    style = {"Task": "round", "Choice": "sawtooth", "Wait": "round4"}[state["Type"]]
    waits = str(state.get("Resource", "")).endswith(".waitForTaskToken")
    axes.text(
        x, y, name + ("\n(waits for its token)" if waits else ""), ha="center", va="center",
        fontsize=9.5, zorder=3,
        bbox={"boxstyle": f"{style},pad=0.45", "facecolor": COLOURS[state["Type"]],
              "edgecolor": "#333", "linewidth": 2.2 if waits else 1},
    )  # fmt: skip


def _arrow(axes: Axes, start: str, end: str, label: str) -> None:
    (x0, y0), (x1, y1) = PLACES[start], PLACES[end]
    straight = x0 == x1 and 0 < y1 - y0 <= 1.6
    bend = 0.0 if straight else (0.28 if y1 < y0 else -0.16)
    axes.annotate(
        "", xy=(x1, y1), xytext=(x0, y0),
        arrowprops={"arrowstyle": "-|>", "color": "#444", "shrinkA": 22, "shrinkB": 22,
                    "connectionstyle": f"arc3,rad={bend}"},
    )  # fmt: skip
    if label:
        shift = 0.03 if straight else 0.2
        axes.text((x0 + x1) / 2 + shift, (y0 + y1) / 2, label, fontsize=7.5, color="#333")


if __name__ == "__main__":
    main()
