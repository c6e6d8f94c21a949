"""Finding the answer and the reference of a sample, in time linear in the completion's length.

A regular expression with two lazy wildcards is quadratic on the text a collapsing policy produces
(one open tag after another), so tags are found by plain searching.
"""

from __future__ import annotations

from typing import Any

from contracts.built_in_rewards import AnswerPlace
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = [
    "HANGUL",
    "UNSPACED",
    "answer_of",
    "boxed",
    "plain_minus",
    "reference_of",
    "tagged",
    "without_thinking",
]

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
"""Scripts written without spaces, for a character class: Thai, Lao, Myanmar, Khmer, kana, Han with
its extensions."""
HANGUL = "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"
"""Written with spaces, but what follows a number or a Latin letter is joined to it."""


def reference_of(sample: Sample) -> Any:
    """The sample's ground truth. Raises GroundTruthError when it has none: 0 would be a lie."""
    if sample.ground_truth is None:
        raise GroundTruthError("no ground truth")
    return sample.ground_truth


def plain_minus(text: str) -> str:
    """With the typographic minus sign (U+2212) as the hyphen that numbers are read with."""
    return text.replace("\u2212", "-")


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last complete ``<tag>…</tag>``."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end]


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, its braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        character = text[position]
        if character == "{" and text[position - 1] != "\\":
            depth += 1
        elif character == "}" and text[position - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[begin:position]
    return None


def without_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of the text when there is none."""
    return text.rpartition("</think>")[2]


def answer_of(text: str, place: AnswerPlace = "auto") -> str | None:
    """The answer, stripped; None when the completion has none in that place."""
    found: str | None
    match place:
        case "answer_tag":
            found = tagged(text, "answer")
        case "boxed":
            found = boxed(without_thinking(text))
        case "whole":
            found = text
        case "auto":
            after = without_thinking(text)
            found = tagged(after, "answer")
            found = boxed(after) if found is None else found
            found = after if found is None else found
    return None if found is None else found.strip()
