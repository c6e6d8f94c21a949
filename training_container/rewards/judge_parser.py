"""From a judge's text to a number in [0, 1].

The last match wins, because judges quote the instructions and change their minds. What is out of
range or cannot be read is None with its kind, never a number: a 0 made up for a judge that
stuttered would count as a truly bad answer and move the whole group's baseline.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contracts.rewards import JudgeParserSpec
from training_container.rewards.interface import FailureKind

__all__ = ["UNPARSABLE", "Verdict", "in_range", "own_number", "parse_judgement"]

_SPACE = r"[^\S\n]*"
_OPENING, _CLOSING = r"[\"'*_`$({\[]*", r"[\"'*_`$)}\]]*"
_TOKEN = r"[^\s*_`\"')\]}$]*"
# What follows a label: a token that starts like a number, read as a whole, so that "0,8", "85%"
# and "7-8" are not mistaken for 0, 85 and 7.
_LABELLED = re.compile(
    rf"reward[\"'*_`]*\s*(?:[:=：]|\bis\b)[\s\"'*_`$({{\[]*([-+]?[.\d]{_TOKEN})", re.IGNORECASE
)
# And what may follow that token on its line: the same with spaces, "8 / 10", "85 %", "7 or 8".
_SCALE = re.compile(
    rf"{_CLOSING}(?:{_SPACE}(?:points?|stars?)\b)?{_SPACE}\(?"
    rf"(?:[/／]|out{_SPACE}of\b|of(?=[^\S\n]+\d)){_SPACE}{_OPENING}({_TOKEN})",
    re.IGNORECASE,
)
_NO_SINGLE_NUMBER = re.compile(
    rf"{_CLOSING}{_SPACE}\(?(?:[%％]|percent\b"
    rf"|(?:or\b|to\b|through\b|->|[-–—~→+]){_SPACE}{_OPENING}[-+]?\.?\d)",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"\[\[([^\[\]]*)\]\]")
_STARTS_AS_NUMBER = re.compile(r"[-+]?[.\d]")
_NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*/\s*(\d+(?:\.\d+)?))?")
# "[[YES]] or [[NO]]" is the choice that was offered.
_OFFER = re.compile(
    rf"\[\[\s*(?:yes|no)\s*\]\]{_CLOSING}\s*"
    r"(?:or\b|and\b|[/|,])[\s\"'*_`(]*\[\[\s*(?:yes|no)\s*\]\]",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"\[\[\s*(?P<bracketed>yes|no)\s*\]\]"
    r"|(?:verdict|answer|decision|judge?ment)[\"'*_`]*\s*"
    r"(?:(?P<colon>[:=：])|\bis\b)[\s\"'*_`(\[]*(?P<labelled>yes|no)\b",
    re.IGNORECASE,
)
_STANDS_ALONE = re.compile(rf"{_CLOSING}{_SPACE}(?:$|\n|[.,;:!(<。，；！]|(?<=\s)-|[–—])")
_OBJECT = re.compile(r'\{\s*"')
_MOST_OBJECTS = 1000
"""A text with more is no judgement; each one that is broken costs a pass over the text."""
# As floats: whole numbers have no upper end, and above some thousand digits Python refuses them.
_DECODER = json.JSONDecoder(parse_int=float)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement as a number in [0, 1], or why there is none."""

    value: float | None
    failure: FailureKind | None = None


UNPARSABLE = Verdict(None, FailureKind.UNPARSABLE)


def parse_judgement(text: str, parser: JudgeParserSpec) -> Verdict:
    """The number in ``text``, mapped from the parser's range to [0, 1]."""
    if parser.kind == "regex":
        value = own_number(text, parser)
        return UNPARSABLE if value is None else in_range(value, parser)
    text = _without_thinking(text)
    match parser.kind:
        case "reward":
            return _labelled(text, parser)
        case "brackets":
            found = [token.strip() for token in _BRACKETS.findall(text)]
            found = [one for one in found if _STARTS_AS_NUMBER.match(one)]
            return _number(found[-1], parser) if found else UNPARSABLE
        case "verdict":
            return _yes_or_no(text)
        case "json":
            return _field(text, str(parser.field), parser)


def own_number(text: str, parser: JudgeParserSpec) -> float | None:
    """The number in the user's own pattern's last match, whatever its range.

    Nothing bounds the time of such a pattern.
    """
    match = _last(re.finditer(str(parser.pattern), _without_thinking(text), re.DOTALL))
    return None if match is None else _value(match[1] or "", parser)


def _without_thinking(text: str) -> str:
    """Nothing is left of a text that was cut off before it came to a judgement."""
    if "<think>" in text and "</think>" not in text:
        return ""
    return text.rpartition("</think>")[2]


def _labelled(text: str, parser: JudgeParserSpec) -> Verdict:
    found = _last(_LABELLED.finditer(text))
    if found is None or _NO_SINGLE_NUMBER.match(text, found.end()):
        return UNPARSABLE
    scale = _SCALE.match(text, found.end())
    return _number(found[1] if scale is None else f"{found[1]}/{scale[1]}", parser)


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return functools.reduce(lambda _, match: match, matches, None)


def _number(token: str, parser: JudgeParserSpec) -> Verdict:
    value = _value(token, parser)
    return UNPARSABLE if value is None else in_range(value, parser)


def _value(token: str, parser: JudgeParserSpec) -> float | None:
    match = _NUMBER.fullmatch(token.strip().rstrip(".,;:!"))
    if match is None:
        return None
    if match[2] is not None and float(match[2]) != parser.maximum:
        return None  # "4/5" where the judge was asked for 0 to 10
    return float(match[1])


def in_range(value: float, parser: JudgeParserSpec) -> Verdict:
    """``value`` mapped from the parser's range to [0, 1]."""
    if not parser.minimum <= value <= parser.maximum:
        return Verdict(None, FailureKind.OUT_OF_RANGE)
    return Verdict((value - parser.minimum) / (parser.maximum - parser.minimum))


def _yes_or_no(text: str) -> Verdict:
    """`[[YES]]`, `Verdict: yes`, or a last line that says nothing else: whichever comes last."""
    line = text.strip().rpartition("\n")[2].strip(" \t*_`\"'.!()[]").lower()
    if line in ("yes", "no"):
        return Verdict(float(line == "yes"))
    verdict = UNPARSABLE
    for match in _VERDICT.finditer(_OFFER.sub("?", text)):
        said = match["bracketed"] or match["labelled"]
        if match["bracketed"] or _STANDS_ALONE.match(match.string, match.end()):
            verdict = Verdict(float(said.lower() == "yes"))
        elif match["colon"]:  # "Verdict: YES/NO", "Verdict: No errors found"
            verdict = UNPARSABLE
    return verdict


def _field(text: str, field: str, parser: JudgeParserSpec) -> Verdict:
    """The field of the last JSON object that has it and stands in no other one.

    Where an object breaks off the search goes on from there: what is inside of it is not the
    judgement, and no text is decoded twice.
    """
    verdict, position = UNPARSABLE, 0
    for _ in range(_MOST_OBJECTS):
        start = _OBJECT.search(text, position)
        if start is None:
            return verdict
        try:
            value, position = _DECODER.raw_decode(text, start.start())
        except json.JSONDecodeError as error:
            position = max(start.start() + 1, error.pos)
        except RecursionError:
            break
        else:
            if field in value:
                verdict = _json_value(value[field], parser)
    return UNPARSABLE


def _json_value(value: Any, parser: JudgeParserSpec) -> Verdict:
    if isinstance(value, str):
        return _number(value, parser)
    return in_range(value, parser) if isinstance(value, float) else UNPARSABLE
