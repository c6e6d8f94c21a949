"""Names of a step's metrics, the stdout line that carries them, and the expressions that read it.

SageMaker reads metrics from stdout by regular expression: at most 40 definitions, names to 255 and
expressions to 500 characters, one capture group each. Both sides of that contract are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = [
    "MARK",
    "MAX_DEFINITIONS",
    "NOT_COMPUTED",
    "STEP_METRICS",
    "metric_definitions",
    "step_line",
    "step_metrics",
]

MARK = "grpohub-step"
"""First word of the line, so that no other output is taken for metrics."""
NOT_COMPUTED = "not computed"
"""What stands for a metric that the stage's settings leave out."""
MAX_DEFINITIONS = 40
_NUMBER = r"([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)"

STEP_METRICS: dict[str, tuple[str, ...]] = {
    "grpo": (
        "reward",
        "reward_std",
        "advantage/zero_variance_fraction",
        "kl/k1",
        "kl/k3",
        "entropy",
        "clip/low_fraction",
        "clip/high_fraction",
        "length/response_mean",
        "length/truncated_fraction",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "seconds/step",
        "validation/reward",
    ),
    "sft": (
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "seconds/step",
        "validation/loss",
    ),
}
"""Metrics of the line, by method, in the order they are written; per-source rewards follow."""
_SOURCES = ("reward/{}", "validation/reward/{}")


def step_line(method: str, step: int, metrics: Mapping[str, object], sources: Sequence[str]) -> str:
    """The line of a step: `grpohub-step step=12 reward=0.5625 …`. Metrics without a number are
    left out, so that SageMaker draws a gap and not a zero."""
    parts = [MARK, f"step={step}"]
    for name in step_metrics(method, sources):
        value = metrics.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = f"{value:.9g}"
            if re.fullmatch(_NUMBER, text):  # not nan or inf
                parts.append(f"{name}={text}")
    return " ".join(parts)


def metric_definitions(method: str, sources: Sequence[str]) -> list[dict[str, str]]:
    """MetricDefinitions of a training job; of many reward sources the first that fit."""
    names = ["step", *step_metrics(method, sources)][:MAX_DEFINITIONS]
    return [
        {"Name": name, "Regex": rf"{MARK} (?:.* )?{re.escape(name)}={_NUMBER}"} for name in names
    ]


def step_metrics(method: str, sources: Sequence[str]) -> list[str]:
    """Names of the line's metrics, those of each reward source last."""
    return [
        *STEP_METRICS[method],
        *(pattern.format(source) for source in sources for pattern in _SOURCES),
    ]
