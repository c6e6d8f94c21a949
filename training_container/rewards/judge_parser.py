"""From a judge's text to a number in [0, 1].

The last match wins, because judges quote the instructions and change their minds. What is out of
range or cannot be read is None with its kind, never a number: a 0 made up for a judge that
stuttered would count as a truly bad answer and move the whole group's baseline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contracts.rewards import JudgeParserSpec
from training_container.rewards.interface import FailureKind

__all__ = ["Verdict", "parse_judgement"]

# What follows a label: a token that starts like a number, read as a whole, so that "0,8", "85%"
# and "7-8" are not mistaken for 0, 85 and 7.
_LABELLED = re.compile(
    r"reward[\"'*_`]*\s*(?:[:=：]|\bis\b)[\s\"'*_`$({\[]*([-+]?[.\d][^\s*_`\"')\]}$]*)",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"\[\[\s*([-+]?[.\d][^\[\]]*?)\s*\]\]")
_NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*/\s*(\d+(?:\.\d+)?))?")
_VERDICT_BRACKETS = re.compile(r"\[\[\s*(yes|no)\s*\]\]", re.IGNORECASE)
_VERDICT_LABEL = re.compile(
    r"(?:verdict|answer|decision|judge?ment)[\"'*_`]*\s*(?:[:=：]|\bis\b)[\s\"'*_`(\[]*(yes|no)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement as a number in [0, 1], or why there is none."""

    value: float | None
    failure: FailureKind | None = None


_UNPARSABLE = Verdict(None, FailureKind.UNPARSABLE)


def parse_judgement(text: str, parser: JudgeParserSpec) -> Verdict:
    """The number in ``text``, mapped from the parser's range to [0, 1]."""
    if "<think>" in text and "</think>" not in text:
        return _UNPARSABLE  # cut off before it came to a judgement
    text = text.rpartition("</think>")[2]
    match parser.kind:
        case "reward":
            return _last_number(_LABELLED.findall(text), parser)
        case "brackets":
            return _last_number(_BRACKETS.findall(text), parser)
        case "verdict":
            return _yes_or_no(text)
        case "json":
            return _field(text, str(parser.field), parser)
        case "regex":
            return _last_number(_own_pattern(text, str(parser.pattern)), parser)


def _own_pattern(text: str, pattern: str) -> list[str]:
    return [match[1] or "" for match in re.finditer(pattern, text, re.DOTALL)]


def _last_number(found: list[str], parser: JudgeParserSpec) -> Verdict:
    return _number(found[-1], parser) if found else _UNPARSABLE


def _number(token: str, parser: JudgeParserSpec) -> Verdict:
    match = _NUMBER.fullmatch(token.strip().rstrip(".,;:!"))
    if match is None:
        return _UNPARSABLE
    if match[2] is not None and float(match[2]) != parser.maximum:
        return _UNPARSABLE  # "4/5" where the judge was asked for 0 to 10
    return _in_range(float(match[1]), parser)


def _in_range(value: float, parser: JudgeParserSpec) -> Verdict:
    if not parser.minimum <= value <= parser.maximum:
        return Verdict(None, FailureKind.OUT_OF_RANGE)
    return Verdict((value - parser.minimum) / (parser.maximum - parser.minimum))


def _yes_or_no(text: str) -> Verdict:
    """`[[YES]]`, `Verdict: yes`, or a last line that says nothing else."""
    found = _VERDICT_BRACKETS.findall(text) or _VERDICT_LABEL.findall(text)
    if found:
        return Verdict(float(found[-1].lower() == "yes"))
    last = text.strip().rpartition("\n")[2].strip(" \t*_`\"'.!()[]").lower()
    return Verdict(float(last == "yes")) if last in ("yes", "no") else _UNPARSABLE


def _field(text: str, field: str, parser: JudgeParserSpec) -> Verdict:
    for value in _objects(text):
        if field in value:
            found = value[field]
            if isinstance(found, str):
                return _number(found, parser)
            if isinstance(found, bool) or not isinstance(found, (int, float)):
                return _UNPARSABLE
            return _in_range(float(found), parser)
    return _UNPARSABLE


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that stand in a text, the last one first."""
    decoder = json.JSONDecoder()
    position = len(text)
    while (position := text.rfind("{", 0, position)) >= 0:
        try:
            value, _ = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
