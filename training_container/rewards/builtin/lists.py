"""Rewards for lists of scores, as in judging the quality of a translation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from contracts.built_in_rewards import ScoreSide
from training_container.rewards.builtin.extract import plain_minus, without_thinking
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = ["score_side"]

_NUMBER = r"[-+]?\d{1,6}(?:\.\d{1,6})?"
# Possessive, or a long run of white space in an unclosed list would cost its length squared.
_LIST = re.compile(rf"\[\s*+({_NUMBER}(?:\s*+,\s*+{_NUMBER})*+)\s*+,?\s*+\]")


def score_side(sample: Sample, parameters: ScoreSide) -> float:
    """1 when the predicted scores fall on the same sides of the threshold as the labelled ones,
    else 0; reads the last bracketed list of numbers after the thinking. A missing list or one of
    another length is 0."""
    label = _label(sample.ground_truth)
    predicted = _last_list(without_thinking(sample.completion))
    if predicted is None or len(predicted) != len(label):
        return 0.0
    wanted = [score >= parameters.threshold for score in label]
    found = [score >= parameters.threshold for score in predicted]
    match parameters.compare:
        case "each":
            return float(found == wanted)
        case "any_below":
            return float(all(found) == all(wanted))
        case "fraction":
            agree = sum(a == b for a, b in zip(found, wanted, strict=True))
            return agree / len(wanted)


def _last_list(text: str) -> list[float] | None:
    found = _LIST.findall(plain_minus(text))
    return [float(part) for part in found[-1].split(",")] if found else None


def _label(ground_truth: Any) -> Sequence[float]:
    value = ground_truth
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = _last_list(value)
    if isinstance(value, (int, float)):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise GroundTruthError(f"the reference {ground_truth!r} is no list of scores")
    try:
        return [float(score) for score in value]
    except (TypeError, ValueError) as error:
        raise GroundTruthError(f"the reference {ground_truth!r} is no list of scores") from error
