"""Trying reward sources out on sample answers: the trainer's own sources, for people to look at.

The hub's sandbox function (`reward_dry_run.py`) and the command on a user's machine (`__main__.py`)
both run this, so that what they print is what training will do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from contracts.reward_trial import (
    RewardSourceView,
    RewardTestRequest,
    RewardTestView,
    SampleFailureView,
)
from contracts.rewards import RewardSpec
from training_container.rewards.interface import (
    FailureKind,
    RewardConfigError,
    RewardError,
    RewardRequest,
    RewardSource,
    Sample,
    Scores,
    SourceResult,
)
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext, build_source

__all__ = ["columns_of", "samples_of", "try_out"]

_LONGEST_DETAIL = 1000


class _Absent:
    """In place of a source that cannot be used: every sample is without its score."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def prepare(self) -> None:
        """Nothing to load."""

    def score(self, request: RewardRequest) -> Scores:
        return Scores([None] * len(request))

    def confinement(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Nothing to end."""


def samples_of(request: RewardTestRequest) -> list[Sample]:
    """The request's samples. Equal rows share their columns, as the answers of a group do."""
    shared: dict[str, Mapping[str, Any]] = {}
    return [
        Sample(
            completion=given.completion,
            prompt=tuple(given.prompt),
            response_length=len(given.completion.split()),
            ground_truth=given.ground_truth,
            columns=shared.setdefault(repr(given.columns), given.columns),
        )
        for given in request.samples
    ]


def columns_of(request: RewardTestRequest) -> tuple[str, ...]:
    """Names of the dataset columns that the samples carry."""
    return tuple(sorted({name for sample in request.samples for name in sample.columns}))


def try_out(
    request: RewardTestRequest,
    context: SourceContext,
    *,
    refusal: Callable[[RewardSpec], str | None] | None = None,
) -> RewardTestView:
    """Load, probe and run every source on the request's samples.

    ``refusal`` says why a source is not run in this place. A source that cannot be loaded is
    reported and the others are run all the same.
    """
    begun = time.monotonic()
    refused = {}
    if refusal is not None:
        refused = {one.name: why for one in request.rewards if (why := refusal(one)) is not None}
    made = _all_started(request.rewards, context, refused)
    unusable = {one.name: one.reason for one in made if isinstance(one, _Absent)}
    with RewardPlane(request.rewards, context, made) as plane:
        try:
            result, ends = plane.try_out(samples_of(request))
        except RewardError as error:
            return _all_failed(request, str(error), time.monotonic() - begun)
    reasons = {**ends, **unusable}
    views = [
        _view(spec, one, reasons.get(spec.name), refused=spec.name in refused)
        for spec, one in zip(request.rewards, result.sources, strict=True)
    ]
    return RewardTestView(
        sources=views, rewards=result.fused(), seconds=round(time.monotonic() - begun, 3)
    )


def _all_started(
    specs: Sequence[RewardSpec], context: SourceContext, refused: Mapping[str, str]
) -> list[RewardSource]:
    """Worker processes start together; models load one after another, because transformers' lazy
    imports do not bear threads."""
    with ThreadPoolExecutor(len(specs)) as starters:
        processes = {
            spec.name: starters.submit(_started, spec, context, refused.get(spec.name))
            for spec in specs
            if spec.kind in ("function", "file")
        }
        return [
            processes[spec.name].result()
            if spec.name in processes
            else _started(spec, context, refused.get(spec.name))
            for spec in specs
        ]


def _started(spec: RewardSpec, context: SourceContext, refused: str | None) -> RewardSource:
    if refused is not None:
        return _Absent(spec.name, refused)
    try:
        source = build_source(spec, context)
        source.prepare()
    except RewardConfigError as error:
        return _Absent(spec.name, str(error))
    return source


def _view(
    spec: RewardSpec, result: SourceResult, reason: str | None, *, refused: bool
) -> RewardSourceView:
    failures = [
        SampleFailureView(sample=index, kind=failure.kind, detail=failure.detail[-_LONGEST_DETAIL:])
        for index, failure in sorted(result.failures.items())
    ]
    prefix = f"reward/{spec.name}"
    return RewardSourceView(
        name=spec.name,
        kind=spec.kind,
        weight=spec.weight,
        state="refused" if refused else "scored" if reason is None else "failed",
        reason=reason,
        scores=result.scores,
        failures=failures,
        seconds=round(result.seconds, 3),
        metrics={
            key.removeprefix(prefix).lstrip("/") or "mean": value
            for key, value in result.metrics.items()
        },
        contained=dict(result.confinement),
    )


def _all_failed(request: RewardTestRequest, reason: str, seconds: float) -> RewardTestView:
    nothing: Sequence[None] = [None] * len(request.samples)
    views = [
        RewardSourceView(
            name=spec.name,
            kind=spec.kind,
            weight=spec.weight,
            state="failed",
            reason=f"{FailureKind.TIMEOUT}: {reason}",
            scores=list(nothing),
        )
        for spec in request.rewards
    ]
    return RewardTestView(sources=views, rewards=list(nothing), seconds=round(seconds, 3))
