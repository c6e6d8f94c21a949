"""Rewards for what the answer says."""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from contracts.base import Strict
from training_container.rewards.builtin.extract import AnswerPlace, answer_of
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = [
    "Choice",
    "ExactMatch",
    "NumericTolerance",
    "Regex",
    "choice",
    "exact_match",
    "numeric_tolerance",
    "regex",
]


class ExactMatch(Strict):
    """Parameters of `exact_match`."""

    extract: AnswerPlace = "auto"
    """Where the answer stands."""
    ignore_case: bool = False
    """Compare without regard to case."""


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


class Choice(Strict):
    """Parameters of `choice`."""

    choices: Annotated[str, Field(min_length=2)] = "ABCDEFGH"
    """The letters of the options."""
    extract: AnswerPlace = "auto"
    """Where the answer stands."""


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


class Regex(Strict):
    """Parameters of `regex`."""

    pattern: str
    """A Python regular expression; `.` matches line ends too."""
    match: Literal["search", "fullmatch"] = "search"
    """Anywhere in the text, or all of it."""
    extract: AnswerPlace = "whole"
    """Which part of the completion is looked at."""
    group_equals_ground_truth: bool = False
    """The first group of the last match must equal the ground truth."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value


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


class NumericTolerance(Strict):
    """Parameters of `numeric_tolerance`."""

    absolute: Annotated[float, Field(ge=0)] = 0.0
    """Largest difference that is right."""
    relative: Annotated[float, Field(ge=0)] = 1e-6
    """Or largest difference as a share of the ground truth."""
    extract: AnswerPlace = "auto"
    """Where the answer stands."""


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
