"""Rewards and penalties for how long and how repetitive a completion is."""

from __future__ import annotations

import math
import re

from contracts.built_in_rewards import (
    BoxedMath,
    CosineLength,
    ExactMatch,
    Length,
    OpenMath,
    Repetition,
    SoftOverlong,
)
from training_container.rewards.builtin import maths, texts
from training_container.rewards.builtin.extract import UNSPACED
from training_container.rewards.interface import Sample

__all__ = [
    "cosine_length",
    "length",
    "repetition",
    "soft_overlong",
]


def length(sample: Sample, parameters: Length) -> float:
    """1 between minimum and maximum tokens, falling linearly to 0 over `slack` tokens outside."""
    count = sample.response_length
    outside = max(parameters.minimum - count, count - parameters.maximum, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1.0 - outside / (parameters.slack + 1))


def soft_overlong(sample: Sample, parameters: SoftOverlong) -> float:
    """DAPO's overlong punishment: 0 up to max_length − cache tokens, then linear to −1 at
    max_length, and −1 beyond."""
    over = sample.response_length - (parameters.max_length - parameters.cache)
    return -min(max(over, 0) / parameters.cache, 1.0)


def cosine_length(sample: Sample, parameters: CosineLength) -> float:
    """Half a cosine from the value at 0 tokens to the value at max_length, one pair of values for
    right answers and one for wrong ones (Yeo et al., arXiv:2502.03373)."""
    match parameters.correct_by:
        case "open_math":
            right = maths.open_math(sample, OpenMath())
        case "boxed_math":
            right = maths.boxed_math(sample, BoxedMath())
        case "exact_match":
            right = texts.exact_match(sample, ExactMatch())
    start, end = (
        (parameters.shortest_correct, parameters.longest_correct)
        if right
        else (parameters.shortest_wrong, parameters.longest_wrong)
    )
    # Clamped: unclamped, the cosine comes back up beyond its end.
    progress = min(max(sample.response_length, 0) / parameters.max_length, 1.0)
    return end + (start - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


# A run of over 40 characters of a spaced script is no word of any language: cut to characters as
# well, or a policy that repeats itself without a space would go unpunished.
_UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
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
