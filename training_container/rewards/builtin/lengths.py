"""Rewards and penalties for how long and how repetitive a completion is."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from contracts.base import Strict
from training_container.rewards.builtin import maths, texts
from training_container.rewards.interface import Sample

__all__ = [
    "CosineLength",
    "Length",
    "Repetition",
    "SoftOverlong",
    "cosine_length",
    "length",
    "repetition",
    "soft_overlong",
]


class Length(Strict):
    """Parameters of `length`; all in tokens."""

    minimum: Annotated[int, Field(ge=0)] = 0
    """Shortest completion with full reward."""
    maximum: Annotated[int, Field(ge=1)]
    """Longest completion with full reward."""
    slack: Annotated[int, Field(ge=0)] = 0
    """Tokens outside the range over which the reward falls to 0."""

    @model_validator(mode="after")
    def _ordered(self) -> Length:
        if self.minimum > self.maximum:
            raise ValueError("`minimum` must not exceed `maximum`")
        return self


def length(sample: Sample, parameters: Length) -> float:
    """1 between minimum and maximum tokens, falling linearly to 0 over `slack` tokens outside."""
    count = sample.response_length
    outside = max(parameters.minimum - count, count - parameters.maximum, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1.0 - outside / (parameters.slack + 1))


class SoftOverlong(Strict):
    """Parameters of `soft_overlong`; both in tokens."""

    max_length: Annotated[int, Field(ge=1)]
    """The length at which the penalty is full."""
    cache: Annotated[int, Field(ge=1)]
    """Tokens before that over which the penalty grows."""

    @model_validator(mode="after")
    def _fits(self) -> SoftOverlong:
        if self.cache > self.max_length:
            raise ValueError("`cache` must not exceed `max_length`")
        return self


def soft_overlong(sample: Sample, parameters: SoftOverlong) -> float:
    """DAPO's overlong punishment: 0 up to max_length − cache tokens, then linear to −1 at
    max_length, and −1 beyond."""
    over = sample.response_length - (parameters.max_length - parameters.cache)
    return -min(max(over, 0) / parameters.cache, 1.0)


class CosineLength(Strict):
    """Parameters of `cosine_length`."""

    max_length: Annotated[int, Field(ge=1)]
    """Tokens at which the schedule ends; longer completions get the value at the end."""
    correct_by: Literal["open_math", "boxed_math", "exact_match"] = "open_math"
    """The built-in that says whether the answer is right."""
    shortest_correct: float = 1.0
    """Right, at 0 tokens."""
    longest_correct: float = 0.5
    """Right, at max_length."""
    shortest_wrong: float = -0.5
    """Wrong, at 0 tokens."""
    longest_wrong: float = 0.0
    """Wrong, at max_length."""


def cosine_length(sample: Sample, parameters: CosineLength) -> float:
    """Half a cosine from the value at 0 tokens to the value at max_length, one pair of values for
    right answers and one for wrong ones (Yeo et al., arXiv:2502.03373)."""
    match parameters.correct_by:
        case "open_math":
            right = maths.open_math(sample, maths.OpenMath())
        case "boxed_math":
            right = maths.boxed_math(sample, maths.BoxedMath())
        case "exact_match":
            right = texts.exact_match(sample, texts.ExactMatch())
    start, end = (
        (parameters.shortest_correct, parameters.longest_correct)
        if right
        else (parameters.shortest_wrong, parameters.longest_wrong)
    )
    # Clamped: unclamped, the cosine comes back up beyond its end.
    progress = min(max(sample.response_length, 0) / parameters.max_length, 1.0)
    return end + (start - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


class Repetition(Strict):
    """Parameters of `repetition`."""

    n: Annotated[int, Field(ge=1)] = 3
    """Units in one n-gram."""
    max_penalty: Annotated[float, Field(le=0)] = -1.0
    """Penalty if everything were repetition."""


# Scripts written without spaces: Thai, Lao, Myanmar, Khmer, kana, Han with its extensions. A run
# of over 40 other characters is no word of any language: cut to characters as well, or a policy
# that repeats itself without a space would go unpunished.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_LONGEST_WORD = 40


def repetition(sample: Sample, parameters: Repetition) -> float:
    """−(1 − unique/total) × |max_penalty| over n-grams of words, or of characters in scripts that
    put no spaces between words; 0 when shorter than one n-gram."""
    units: list[str] = []
    for unit in _UNIT.findall(sample.completion.lower()):
        units.extend(unit if len(unit) > _LONGEST_WORD else [unit])
    total = len(units) - parameters.n + 1
    if total < 1:
        return 0.0
    unique = len({tuple(units[at : at + parameters.n]) for at in range(total)})
    return (1.0 - unique / total) * parameters.max_penalty
