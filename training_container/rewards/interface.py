"""What the training loop hands to rewards and what it gets back.

B = samples of a batch (prompts x group size), K = reward sources of the stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = [
    "Failure",
    "FailureKind",
    "GroundTruthError",
    "PlaneResult",
    "RewardConfigError",
    "RewardError",
    "RewardRequest",
    "RewardSource",
    "Sample",
    "Scores",
    "SourceResult",
]


class RewardError(RuntimeError):
    """A reward source failed in a way that its policy turns into the end of the run."""


class RewardConfigError(ValueError):
    """A reward source cannot work as configured; found before any weights load."""


class GroundTruthError(ValueError):
    """The row's reference answer cannot be used: the data is at fault, not the completion."""


class FailureKind(StrEnum):
    """Why one sample got no score from a source. Each is counted under its own metric."""

    EXCEPTION = "exception"
    WRONG_COUNT = "wrong_count"
    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    TIMEOUT = "timeout"
    CRASH = "crash"
    GROUND_TRUTH = "ground_truth"
    UNREACHABLE = "unreachable"
    UNPARSABLE = "unparsable"
    OUT_OF_RANGE = "out_of_range"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class Failure:
    """One sample a source failed on."""

    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with everything a reward may look at.

    `columns` is the dataset row; the samples of one group share the same mapping object, which
    is sent to a worker process once.
    """

    completion: str
    """Decoded without special tokens."""
    prompt: Sequence[Mapping[str, Any]] = ()
    """The messages the policy was given, oldest first."""
    response_length: int = 0
    """Tokens of the completion."""
    truncated: bool = False
    """The completion hit the token limit before it ended."""
    ground_truth: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A batch to be scored."""

    samples: tuple[Sample, ...]
    step: int = 0
    phase: str = "train"
    """`train` or `validation`; only `train` counts towards the alarm for scores that stay 0."""

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(slots=True)
class Scores:
    """What a source makes of a batch, before the plane applies the source's policy.

    A sample is scored, deliberately unscored (None: not applicable), or failed.
    """

    values: list[float | None]
    failures: dict[int, Failure] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers, already averaged over the batch."""

    @classmethod
    def of_outcomes(cls, count: int, outcomes: Sequence[Mapping[str, Any]]) -> Scores:
        """From what `scorer.Scorer.outcomes` yields, one outcome per sample."""
        scores = cls([None] * count)
        for index, outcome in enumerate(outcomes):
            if "failed" in outcome:
                kind, detail = outcome["failed"]
                scores.failures[index] = Failure(FailureKind(kind), detail)
            else:
                scores.values[index] = outcome["value"]
        return scores

    @classmethod
    def all_failed(cls, count: int, kind: FailureKind, detail: str) -> Scores:
        failure = Failure(kind, detail)
        return cls([None] * count, dict.fromkeys(range(count), failure))


class RewardSource(Protocol):
    """One kind of scorer. `score` may be called from any thread, one call at a time."""

    name: str

    def prepare(self) -> None:
        """Load or probe. Raises RewardConfigError with what to do about it."""

    def score(self, request: RewardRequest) -> Scores:
        """Score a batch within the source's deadline. Bad samples are failures, not exceptions."""

    def confinement(self) -> Mapping[str, str]:
        """How code that is not ours is contained; empty where none is run."""

    def close(self) -> None:
        """End processes and connections."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """A source's scores after its policy, with what happened on the way."""

    name: str
    weight: float
    scores: list[float | None]
    seconds: float
    failures: dict[int, Failure]
    """By sample index; the samples that could not be scored."""
    metrics: dict[str, float]
    confinement: Mapping[str, str]

    @property
    def failure_counts(self) -> dict[str, int]:
        """Failures by kind."""
        counts: dict[str, int] = {}
        for failure in self.failures.values():
            counts[failure.kind] = counts.get(failure.kind, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class PlaneResult:
    """All sources' scores of a batch."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    scores_B_K: list[list[float]]
    """NaN where a source gave no score."""
    sources: tuple[SourceResult, ...]
    metrics: dict[str, float]
    """`reward/<source>`, `reward/<source>/std`, `.../failure_rate`, `.../seconds` and so on."""

    def fused(self) -> list[float | None]:
        """Weighted sum over the sources that scored a sample, None where none with a weight other
        than 0 did: what `engine.advantages.fuse_rewards` makes of the scores, without torch."""
        rewards: list[float | None] = []
        for scores in self.scores_B_K:
            pairs = zip(self.weights, scores, strict=True)
            known = [(w, s) for w, s in pairs if w != 0 and not math.isnan(s)]
            rewards.append(sum(weight * score for weight, score in known) if known else None)
        return rewards

    @property
    def unscored(self) -> tuple[int, ...]:
        """Samples without a fused reward; they take no part in the group's statistics."""
        return tuple(index for index, reward in enumerate(self.fused()) if reward is None)
