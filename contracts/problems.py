"""One report for everything that is wrong with a user's input: path, value, reason, fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["InvalidInputError", "Problem", "nearest", "shorten"]

_VALUE_LIMIT = 120


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend: where it is, what was found there, why it is wrong, and what to do."""

    path: str
    value: Any
    reason: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "value": shorten(self.value)}

    def __str__(self) -> str:
        return f"{self.path}: {self.reason} (found {shorten(self.value)}). {self.fix}"


class InvalidInputError(ValueError):
    """Raised with *all* problems of an input at once, never with the first one only."""

    def __init__(self, problems: Iterable[Problem], *, subject: str = "run file") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.subject = subject
        count = len(self.problems)
        head = f"{subject}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def nearest(word: object, valid: Sequence[str]) -> str | None:
    """The valid name most like ``word``, or None when nothing is close enough to suggest."""
    matches = difflib.get_close_matches(str(word), valid, n=1, cutoff=0.6)
    return matches[0] if matches else None


def shorten(value: Any) -> str:
    """``value`` as a person would want it in one line of a report."""
    text = repr(value)
    return text if len(text) <= _VALUE_LIMIT else f"{text[: _VALUE_LIMIT - 1]}…"
