"""Rewards for what the answer says."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from contracts.built_in_rewards import Choice, ExactMatch, NumericTolerance, Regex
from training_container.rewards.builtin.extract import answer_of
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = [
    "choice",
    "exact_match",
    "numeric_tolerance",
    "regex",
]


def exact_match(sample: Sample, parameters: ExactMatch) -> float:
    """1 when the answer equals the ground truth, white space normalised, else 0. A list of ground
    truths accepts any of them."""
    answer = answer_of(sample.completion, parameters.extract)
    if answer is None:
        return 0.0
    truth = sample.ground_truth
    wanted = truth if isinstance(truth, (list, tuple)) else [truth]
    if not wanted or any(one is None for one in wanted):
        raise GroundTruthError("no ground truth")
    fold = str.casefold if parameters.ignore_case else str
    found = fold(" ".join(answer.split()))
    return float(found in {fold(" ".join(str(one).split())) for one in wanted})


def choice(sample: Sample, parameters: Choice) -> float:
    """1 when the option letter the answer settles on is the ground truth's, else 0: `B`, `(B)`,
    `B. text` and `the answer is B`, the last one named."""
    right = _letter(str(sample.ground_truth).strip(), parameters.choices)
    if right is None:
        raise GroundTruthError(f"no option letter in the reference {sample.ground_truth!r}")
    answer = answer_of(sample.completion, parameters.extract)
    return float(answer is not None and _letter(answer, parameters.choices) == right)


def _letter(text: str, choices: str) -> str | None:
    letters = re.escape(choices.upper())
    whole = re.match(rf"\(?([{letters}])(?:[).:,]|\s*$)", text.upper())
    if whole:
        return whole[1]
    # Lower-case "a" is a word; only a letter that is marked as an option counts inside a sentence.
    marked = (
        rf"(?:\b(?:answer|option|choice)\b[^A-Za-z]{{0,4}}(?:is\b)?[^A-Za-z]{{0,4}})([{letters}])\b"
    )
    found = re.findall(marked, text, re.IGNORECASE) or re.findall(
        rf"(?<!\w)([{letters}])(?!\w)", text
    )
    return str(found[-1]).upper() if found else None


def regex(sample: Sample, parameters: Regex) -> float:
    """1 when the pattern matches, else 0."""
    text = answer_of(sample.completion, parameters.extract)
    if text is None:
        return 0.0
    pattern = re.compile(parameters.pattern, re.DOTALL)
    if parameters.match == "fullmatch":
        found = pattern.fullmatch(text)
    else:
        found = functools.reduce(lambda _, match: match, pattern.finditer(text), None)
    if found is None:
        return 0.0
    if not parameters.group_equals_ground_truth:
        return 1.0
    return float(str(found[1]).strip() == str(sample.ground_truth).strip())


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?%?")


def numeric_tolerance(sample: Sample, parameters: NumericTolerance) -> float:
    """1 when the last number of the answer is within the tolerance of the ground truth, else 0."""
    wanted = _last_number(str(sample.ground_truth))
    if wanted is None:
        raise GroundTruthError(f"no number in the reference {sample.ground_truth!r}")
    answer = answer_of(sample.completion, parameters.extract)
    found = _last_number(answer) if answer is not None else None
    if found is None:
        return 0.0
    tolerance = max(parameters.absolute, parameters.relative * abs(wanted))
    return float(abs(found - wanted) <= tolerance)


def _last_number(text: str) -> float | None:
    found: list[Any] = _NUMBER.findall(text)
    if not found:
        return None
    last = found[-1]
    number = float(last.rstrip("%").replace(",", ""))
    number = number / 100 if last.endswith("%") else number
    return number if math.isfinite(number) else None
