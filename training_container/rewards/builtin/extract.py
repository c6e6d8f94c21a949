"""Finding the answer in a completion, in time linear in its length.

A regular expression with two lazy wildcards is quadratic on the text a collapsing policy produces
(one open tag after another), so tags are found by plain searching.
"""

from __future__ import annotations

from contracts.built_in_rewards import AnswerPlace

__all__ = ["answer_of", "boxed", "tagged", "without_thinking"]


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
