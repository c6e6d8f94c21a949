"""Trying reward sources out on sample answers, before anything is trained.

One request and one answer, whether the hub's sandbox function or the user's own machine scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from contracts.api import ApiRequest, ApiView, ProblemView
from contracts.rewards import RewardKind, RewardSpec

__all__ = [
    "MAX_SAMPLES",
    "RewardSample",
    "RewardSourceView",
    "RewardTestRequest",
    "RewardTestView",
    "SampleFailureView",
    "trial_table",
]

MAX_SAMPLES = 64
_SHOWN = 40


class RewardSample(ApiRequest):
    """An answer with everything a reward may look at."""

    completion: str
    """The answer to be scored. Its length is counted in words, as no tokenizer is at hand."""
    prompt: list[dict[str, Any]] = Field(default_factory=list)
    """The messages the policy was given, oldest first."""
    ground_truth: Any = None
    """The row's reference answer."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """The row of the data, the reference answer included."""


class RewardTestRequest(ApiRequest):
    """`POST /rewards:test`: score sample answers with reward sources as a run file writes them."""

    rewards: Annotated[list[RewardSpec], Field(min_length=1, max_length=32)]
    files: dict[str, str] = Field(default_factory=dict)
    """Text of the Python files the sources name, and of modules beside them, by relative path."""
    samples: list[RewardSample] = Field(default_factory=list, max_length=MAX_SAMPLES)
    """None: static checks only."""


class SampleFailureView(ApiView):
    """A sample that a source failed on."""

    sample: int
    """Its index in the request."""
    kind: str
    """`exception`, `timeout`, `wrong_count`, …: the name under which training counts it."""
    detail: str


class RewardSourceView(ApiView):
    """What one source made of the samples."""

    name: str
    kind: RewardKind
    weight: float
    state: Literal["scored", "failed", "refused"]
    """`failed`: it cannot be loaded, or training would end here; `refused`: it is not run in this
    place."""
    reason: str | None = None
    """Why it is not `scored`."""
    scores: list[float | None] = Field(default_factory=list)
    """After the source's `on_error`; null: no score from this source."""
    failures: list[SampleFailureView] = Field(default_factory=list)
    seconds: float = 0.0
    """Of the batch, start of the source excluded."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """What training would log about it."""
    contained: dict[str, str] = Field(default_factory=dict)
    """How code that is not the hub's was contained, by area; says where the host refused a means.
    """


class RewardTestView(ApiView):
    """Problems found without running anything, and what every source made of the samples."""

    problems: list[ProblemView] = Field(default_factory=list)
    sources: list[RewardSourceView] = Field(default_factory=list)
    rewards: list[float | None] = Field(default_factory=list)
    """The weighted sum over the sources that scored a sample; null: none did."""
    seconds: float = 0.0


def trial_table(completions: Sequence[str], view: RewardTestView) -> str:
    """The answer as a table of answers and scores, then what is to be said of each source."""
    names = [source.name for source in view.sources]
    width = max([8, *map(len, names)])
    head = ["answer".ljust(_SHOWN), *(name.rjust(width) for name in [*names, "reward"])]
    lines = ["  ".join(head)]
    for row, text in enumerate(completions):
        cells = [_cell(source, row) for source in view.sources]
        fused = view.rewards[row] if row < len(view.rewards) else None
        cells.append("–" if fused is None else f"{fused:.4g}")
        lines.append("  ".join([_shortened(text), *(cell.rjust(width) for cell in cells)]))
    for source in view.sources:
        lines += ["", *_about(source)]
    return "\n".join(lines)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…").ljust(_SHOWN)


def _cell(source: RewardSourceView, row: int) -> str:
    score = source.scores[row] if row < len(source.scores) else None
    if score is not None:
        return f"{score:.4g}"
    failed = any(failure.sample == row for failure in source.failures)
    return "failed" if failed or source.state == "failed" else "–"


def _about(source: RewardSourceView) -> Iterator[str]:
    yield f"{source.name}: {source.kind}, weight {source.weight:g}, {source.seconds:.2f} s"
    if source.reason is not None:
        yield f"  {source.state}: {source.reason}"
    for area, state in source.contained.items():
        yield f"  {area}: {state}"
    for kind in dict.fromkeys(failure.kind for failure in source.failures):
        alike = [failure for failure in source.failures if failure.kind == kind]
        yield f"  {len(alike)} failed ({kind}), for example: {alike[0].detail}"
