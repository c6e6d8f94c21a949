"""A source's raw scores under its policy, and the numbers that are logged about it.

`on_error` says what becomes of a sample a source failed on:

| policy | score | for whom |
|---|---|---|
| `none` (default) | no score from this source | an outage or a bug is no bad answer |
| `zero` | 0 | failing is the completion's own fault, as with code that crashes |
| `raise` | the run ends with the reason | a run with inexact rewards is worth nothing |

`none` is the default because a made-up number moves the baseline of the whole group; that a broken
source cannot go unnoticed is the job of its failure-rate ceiling, not of a number.
"""

from __future__ import annotations

import math
import statistics

from contracts.rewards import RewardSpec
from training_container.rewards.interface import Failure, FailureKind, RewardError, Scores

__all__ = ["checked", "enforce", "source_metrics"]


def checked(scores: Scores, count: int) -> Scores:
    """``scores`` with one finite number or None per sample; anything else becomes a failure.

    Every kind of source passes here, so that none can hand NaN, inf or a short list to training.
    """
    if len(scores.values) != count:
        detail = f"{len(scores.values)} scores for {count} samples"
        return Scores.all_failed(count, FailureKind.WRONG_COUNT, detail)
    values, failures = list(scores.values), dict(scores.failures)
    for index, value in enumerate(values):
        if index in failures or (isinstance(value, float) and math.isnan(value)):
            values[index] = None
        elif value is not None and not isinstance(value, (int, float)):
            failures[index] = Failure(FailureKind.WRONG_TYPE, f"a {type(value).__name__}")
            values[index] = None
        elif value is not None and math.isinf(value):
            failures[index] = Failure(FailureKind.NOT_FINITE, f"a score of {value}")
            values[index] = None
    return Scores(values, failures, scores.metrics)


def enforce(spec: RewardSpec, scores: Scores) -> list[float | None]:
    """The scores after ``on_error``. Raises RewardError with the first failure's reason."""
    failures = scores.failures
    if not failures:
        return scores.values
    index, first = next(iter(sorted(failures.items())))
    example = f"sample {index}: {first.kind}: {first.detail}"
    if spec.on_error == "raise":
        raise RewardError(f"reward {spec.name!r} failed, and its on_error is raise. {example}")
    rate = len(failures) / len(scores.values)
    if rate > spec.max_failure_rate:
        raise RewardError(
            f"reward {spec.name!r} failed on {len(failures)} of {len(scores.values)} samples "
            f"({rate:.0%}), above its max_failure_rate of {spec.max_failure_rate:.0%}. {example}"
        )
    if spec.on_error == "zero":
        return [0.0 if i in failures else value for i, value in enumerate(scores.values)]
    return scores.values


def source_metrics(
    name: str, scores: list[float | None], raw: Scores, seconds: float
) -> dict[str, float]:
    """What is logged of one source: `reward/<name>` is the unweighted mean of its scores.

    The standard deviation has ddof 1.
    """
    known = [score for score in scores if score is not None]
    count = len(scores)
    metrics = {f"reward/{name}/seconds": seconds}
    if known:
        metrics[f"reward/{name}"] = statistics.fmean(known)
    if len(known) > 1:
        metrics[f"reward/{name}/std"] = statistics.stdev(known)
    if count:
        unscored = count - len(known)
        metrics[f"reward/{name}/none_rate"] = unscored / count
        metrics[f"reward/{name}/failure_rate"] = len(raw.failures) / count
    for failure in raw.failures.values():
        key = f"reward/{name}/failed_{failure.kind}"
        metrics[key] = metrics.get(key, 0.0) + 1.0
    return metrics | {f"reward/{name}/{key}": value for key, value in raw.metrics.items()}
