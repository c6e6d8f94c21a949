"""All reward sources of a stage, scored together."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contracts.rewards import RewardSpec
from training_container.rewards.interface import (
    FailureKind,
    PlaneResult,
    RewardConfigError,
    RewardError,
    RewardRequest,
    RewardSource,
    Sample,
    Scores,
    SourceResult,
)
from training_container.rewards.policy import checked, enforce, source_metrics
from training_container.rewards.sources import SourceContext, build_source

__all__ = ["RewardPlane"]

_log = logging.getLogger(__name__)

_GRACE_SECONDS = 30.0
"""Sources keep their own deadlines, of a worker process's start and of the batch; this much past
both they are taken to hang."""
_ZERO_BATCHES = 5
_LOGGED_CHARACTERS = 2000


_Policy = Callable[[RewardSpec, Scores], list[float | None]]


@dataclass(frozen=True, slots=True)
class _Scored:
    scores: Scores
    seconds: float
    error: BaseException | None = None


class RewardPlane:
    """Scores batches with every source of a stage, at once.

    `prepare` first, then `dry_run` on real rows, both before any weights load; then `score` from
    any one thread at a time; `close` at the end, or use it as a context manager.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        context: SourceContext | None = None,
        sources: Sequence[RewardSource] | None = None,
    ) -> None:
        """`sources` replaces what the specs describe, one for one, for callers with their own.

        Raises RewardConfigError naming the source.
        """
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise RewardConfigError(f"reward names are not unique: {', '.join(names)}")
        if not specs:
            raise RewardConfigError("a stage needs at least one reward source")
        self._specs = tuple(specs)
        context = context or SourceContext()
        self._start_seconds = context.start_seconds
        built = sources if sources is not None else [build_source(s, context) for s in specs]
        if len(built) != len(specs):
            raise RewardConfigError(f"{len(built)} sources for {len(specs)} specs")
        self._sources = tuple(built)
        self._zero_batches = dict.fromkeys(names, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names, in the order of the scores' columns."""
        return tuple(spec.name for spec in self._specs)

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights, in the same order."""
        return tuple(spec.weight for spec in self._specs)

    def __enter__(self) -> RewardPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Load and probe every source. Raises RewardConfigError with what to do about it."""
        for source in self._sources:
            source.prepare()

    def close(self) -> None:
        """End every process and connection."""
        for source in self._sources:
            source.close()

    def dry_run(self, samples: Sequence[Sample]) -> PlaneResult:
        """Score real rows before anything is trained, so that a broken reward costs seconds.

        Raises RewardConfigError when a source fails on every sample, whatever its policy.
        """
        request = RewardRequest(tuple(samples), phase="dry_run")
        result = self._assemble(request, self._finished(request), _as_they_are)
        for source in result.sources:
            if samples and len(source.failures) == len(samples):
                failure = source.failures[0]
                raise RewardConfigError(
                    f"reward {source.name!r} failed on all {len(samples)} rows of the dry run: "
                    f"{failure.kind}: {failure.detail}"
                )
        return result

    def try_out(self, samples: Sequence[Sample]) -> tuple[PlaneResult, dict[str, str]]:
        """Score samples for a person to look at: no source's fault hides what the others say.

        Returns the scores under each source's policy, and by name the reason for which training
        would end. Raises RewardError when a source hangs past its deadline.
        """
        request = RewardRequest(tuple(samples), phase="dry_run")
        scored = self._run_all(request)
        ends = {
            spec.name: repr(one.error)
            for spec, one in zip(self._specs, scored, strict=True)
            if one.error is not None
        }

        def policy(spec: RewardSpec, scores: Scores) -> list[float | None]:
            try:
                return enforce(spec, scores)
            except RewardError as error:
                ends.setdefault(spec.name, str(error))
                return scores.values

        return self._assemble(request, scored, policy), ends

    def score(self, request: RewardRequest) -> PlaneResult:
        """Scores of every source for every sample.

        Raises RewardError when a source's policy or ceiling ends the run.
        """
        result = self._assemble(request, self._finished(request), enforce)
        self._watch_for_zeros(request, result)
        self._log_unscored(request, result)
        return result

    def _finished(self, request: RewardRequest) -> list[_Scored]:
        """What every source made of the batch. Raises RewardError for a fault of a source."""
        scored = self._run_all(request)
        for spec, one in zip(self._specs, scored, strict=True):
            if one.error is not None:
                raise RewardError(f"reward {spec.name!r}: {one.error}") from one.error
        return scored

    def _run_all(self, request: RewardRequest) -> list[_Scored]:
        answers: queue.SimpleQueue[tuple[int, _Scored]] = queue.SimpleQueue()
        for index, source in enumerate(self._sources):
            # Daemon threads: one that hangs must not keep the process from ending.
            threading.Thread(
                target=_score_one, args=(index, source, request, answers), daemon=True
            ).start()
        longest = self._start_seconds + max(spec.timeout_seconds for spec in self._specs)
        deadline = time.monotonic() + longest + _GRACE_SECONDS
        scored: dict[int, _Scored] = {}
        while len(scored) < len(self._sources):
            try:
                index, one = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = [s.name for i, s in enumerate(self._specs) if i not in scored]
                raise RewardError(
                    f"rewards hang, past their deadlines: {', '.join(late)}"
                ) from None
            scored[index] = one
        return [scored[index] for index in range(len(self._sources))]

    def _assemble(
        self, request: RewardRequest, scored: Sequence[_Scored], policy: _Policy
    ) -> PlaneResult:
        results = []
        for spec, source, one in zip(self._specs, self._sources, scored, strict=True):
            raw = checked(one.scores, len(request))
            scores = policy(spec, raw)
            metrics = source_metrics(spec.name, scores, raw, one.seconds)
            results.append(
                SourceResult(
                    name=spec.name,
                    weight=spec.weight,
                    scores=scores,
                    seconds=one.seconds,
                    failures=raw.failures,
                    metrics=metrics,
                    confinement=source.confinement(),
                )
            )
        results = _combined(self._specs, results)
        matrix = [
            [math.nan if (score := result.scores[row]) is None else score for result in results]
            for row in range(len(request))
        ]
        metrics = {key: value for result in results for key, value in result.metrics.items()}
        result = PlaneResult(self.names, self.weights, matrix, tuple(results), metrics)
        metrics["reward/unscored_samples"] = float(len(result.unscored))
        return result

    def _watch_for_zeros(self, request: RewardRequest, result: PlaneResult) -> None:
        """EasyR1#232: after an update every reward was 0, and nobody was told."""
        if request.phase != "train":
            return
        for source in result.sources:
            known = [score for score in source.scores if score is not None]
            zero = bool(known) and not any(known)
            count = self._zero_batches[source.name] + 1 if zero else 0
            self._zero_batches[source.name] = count
            result.metrics[f"reward/{source.name}/zero_batches"] = float(count)
            if count == _ZERO_BATCHES:
                _log.warning(
                    "reward %s has been 0 for every sample of %d batches", source.name, count
                )

    @staticmethod
    def _log_unscored(request: RewardRequest, result: PlaneResult) -> None:
        if not result.unscored:
            return
        sample = request.samples[result.unscored[0]]
        shown = {
            "prompt": list(sample.prompt),
            "completion": sample.completion,
            "ground_truth": sample.ground_truth,
            "columns": dict(sample.columns),
            "failures": {
                source.name: f"{failure.kind}: {failure.detail}"
                for source in result.sources
                if (failure := source.failures.get(result.unscored[0])) is not None
            },
        }
        _log.warning(
            "no source with a weight scored %d of %d samples of step %d; the first: %s",
            len(result.unscored),
            len(request),
            request.step,
            json.dumps(shown, default=_brief, ensure_ascii=False)[:_LOGGED_CHARACTERS],
        )


def _as_they_are(_: RewardSpec, scores: Scores) -> list[float | None]:
    return scores.values


def _brief(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _score_one(
    index: int,
    source: RewardSource,
    request: RewardRequest,
    answers: queue.SimpleQueue[tuple[int, _Scored]],
) -> None:
    started = time.monotonic()
    try:
        scores, error = source.score(request), None
    except BaseException as caught:  # noqa: BLE001 - re-raised by the caller's thread
        scores = Scores.all_failed(len(request), FailureKind.EXCEPTION, repr(caught))
        error = caught
    answers.put((index, _Scored(scores, time.monotonic() - started, error)))


def _combined(specs: Sequence[RewardSpec], results: list[SourceResult]) -> list[SourceResult]:
    """A judge's scores against those of the source it names: the larger or the smaller.

    Where one of the two has no score the other one's stands.
    """
    by_name = {result.name: result for result in results}
    combined = []
    for spec, result in zip(specs, results, strict=True):
        judge = spec.judge
        if judge is None or judge.combine is None or judge.combine_with is None:
            combined.append(result)
            continue
        pick = max if judge.combine == "max" else min
        pairs = zip(result.scores, by_name[judge.combine_with].scores, strict=True)
        scores = [
            own if other is None else other if own is None else pick(own, other)
            for own, other in pairs
        ]
        combined.append(replace(result, scores=scores))
    return combined
