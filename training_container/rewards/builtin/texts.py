"""Rewards for what the answer says."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from contracts.built_in_rewards import Choice, ExactMatch, NumericTolerance, Regex
from training_container.rewards.builtin.extract import (
    HANGUL,
    UNSPACED,
    answer_of,
    plain_minus,
    reference_of,
)
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
    truth = reference_of(sample)
    wanted = truth if isinstance(truth, (list, tuple)) else [truth]
    if not wanted or any(one is None for one in wanted):
        raise GroundTruthError(f"no ground truth in {truth!r}")
    answer = answer_of(sample.completion, parameters.extract)
    if answer is None:
        return 0.0
    fold = str.casefold if parameters.ignore_case else str
    found = fold(" ".join(answer.split()))
    return float(found in {fold(" ".join(str(one).split())) for one in wanted})


def choice(sample: Sample, parameters: Choice) -> float:
    """1 when the option letter the answer settles on is the ground truth's, else 0: `B`, `(B)`,
    `B. text` and `the answer is B`, the last one named."""
    truth = reference_of(sample)
    right = _letter(str(truth).strip(), parameters.choices)
    if right is None:
        raise GroundTruthError(f"no option letter in the reference {truth!r}")
    answer = answer_of(sample.completion, parameters.extract)
    return float(answer is not None and _letter(answer, parameters.choices) == right)


# A character that makes a letter beside it part of a word; 答案是B has the letter by itself.
_IN_WORD = rf"[^\W{UNSPACED}{HANGUL}]"
_ANSWER = rf"(?:(?<!{_IN_WORD})answer(?!{_IN_WORD})|答案)"
_MARK = rf"(?:{_ANSWER}|(?<!{_IN_WORD})(?:option|choice)(?!{_IN_WORD})|(?<!不)[选選])"
_GAP = rf"[^A-Za-z不]{{0,4}}(?:is(?!{_IN_WORD}))?[^A-Za-z不]{{0,4}}"


def _letter(text: str, choices: str) -> str | None:
    letter = rf"([{re.escape(choices.upper())}])"
    alone = rf"{letter}(?!{_IN_WORD})"
    first = re.match(rf"\(?{letter}(?:[).:,]|\s*$)", text.upper())
    listed = re.findall(rf"^[^\w\n]{{0,4}}{letter}[).:]", text.upper(), re.MULTILINE)
    # `B. text` is an answer, unless it opens the options said again or an answer follows it.
    if first and len(set(listed)) < 2 and not re.search(rf"(?i:{_ANSWER}{_GAP}){alone}", text):
        return first[1]
    # Lower-case "a" is a word; only a letter that is marked as an option counts inside a sentence.
    found = re.findall(rf"{_MARK}{_GAP}{alone}", text, re.IGNORECASE) or re.findall(
        rf"(?<!{_IN_WORD}){alone}", text
    )
    return str(found[-1]).upper() if found else None


def regex(sample: Sample, parameters: Regex) -> float:
    """1 when the pattern matches, else 0."""
    wanted = reference_of(sample) if parameters.group_equals_ground_truth else None
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
    if wanted is None:
        return 1.0
    return float(found[1] is not None and found[1].strip() == str(wanted).strip())


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?%?")


def numeric_tolerance(sample: Sample, parameters: NumericTolerance) -> float:
    """1 when the last number of the answer is within the tolerance of the ground truth, else 0."""
    truth = reference_of(sample)
    wanted = _last_number(str(truth))
    if wanted is None:
        raise GroundTruthError(f"no number in the reference {truth!r}")
    answer = answer_of(sample.completion, parameters.extract)
    found = _last_number(answer) if answer is not None else None
    if found is None:
        return 0.0
    tolerance = max(parameters.absolute, parameters.relative * abs(wanted))
    return float(abs(found - wanted) <= tolerance)


def _last_number(text: str) -> float | None:
    found: list[Any] = _NUMBER.findall(plain_minus(text))
    if not found:
        return None
    last = found[-1]
    number = float(last.rstrip("%").replace(",", ""))
    number = number / 100 if last.endswith("%") else number
    return number if math.isfinite(number) else None
