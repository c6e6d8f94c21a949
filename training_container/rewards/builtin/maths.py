"""Mathematical equality by math-verify.

Runs in worker processes only: math-verify bounds its own time with SIGALRM, which works on a main
thread and nowhere else (Math-Verify#50, verl#5635: elsewhere every score silently became 0).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from contracts.built_in_rewards import BoxedMath, MathSettings, OpenMath
from training_container.rewards.builtin.extract import (
    HANGUL,
    UNSPACED,
    boxed,
    plain_minus,
    reference_of,
    tagged,
    without_thinking,
)
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = ["boxed_math", "open_math"]

_PLAIN_NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{1,9})?")
_LATEX = re.compile(r"[\\^_{}]")
_EASTERN = f"{UNSPACED}{HANGUL}\u3000-\u303f\uff01-\uff0c\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
"""Scripts that join words to numbers, and their full-width punctuation."""
_JOINT = re.compile(rf"(?<=[{_EASTERN}])(?=[^\s{_EASTERN}])|(?<=[^\s{_EASTERN}])(?=[{_EASTERN}])")


def boxed_math(sample: Sample, parameters: BoxedMath) -> float:
    r"""1 when the last \boxed{…} after the thinking equals the ground truth mathematically, else
    0; without a box 0."""
    truth = reference_of(sample)
    gold = _gold(truth, parameters.seconds)
    answer = boxed(without_thinking(sample.completion))
    if answer is None:
        return 0.0
    if _same_number(answer, truth):
        return 1.0
    return _equal(gold, f"\\boxed{{{answer}}}", parameters)


def open_math(sample: Sample, parameters: OpenMath) -> float:
    """1 when the last expression after the thinking (in the answer tag if there is one) equals
    the ground truth mathematically, else 0."""
    gold = _gold(reference_of(sample), parameters.seconds)
    after = without_thinking(sample.completion)
    answer = tagged(after, "answer")
    # math-verify finds a bare number between spaces only.
    spaced = _JOINT.sub(" ", after if answer is None else answer)
    return _equal(gold, spaced, parameters)


def _same_number(answer: str, gold: Any) -> bool:
    left, right = answer.strip(), str(gold).strip()
    return left == right and _PLAIN_NUMBER.fullmatch(left) is not None


def _gold(ground_truth: Any, seconds: int) -> list[Any]:
    """The reference, parsed. Raises GroundTruthError: the data is at fault, so 0 would be a lie."""
    return list(_parsed_gold(str(ground_truth).strip(), seconds))


@functools.lru_cache(maxsize=4096)
def _parsed_gold(text: str, seconds: int) -> tuple[Any, ...]:
    """Remembered, because all answers of a group share it."""
    candidates = [text, f"${text}$"]
    if "$" not in text and _LATEX.search(text):
        candidates.reverse()  # bare LaTeX: without dollars only its numbers would be read
    for candidate in candidates:
        parsed = _in_time(
            lambda candidate=candidate: _parse(candidate, seconds), "reading the reference"
        )
        if parsed:
            return tuple(parsed)
    raise GroundTruthError(f"no mathematical expression in the reference {text[:200]!r}")


def _equal(gold: list[Any], answer: str, parameters: MathSettings) -> float:
    from math_verify import verify

    parsed = _in_time(lambda: _parse(answer, parameters.seconds), "reading the answer")
    if not parsed:
        return 0.0
    same = _in_time(
        lambda: verify(
            gold,
            parsed,
            float_rounding=parameters.precision,
            timeout_seconds=parameters.seconds,
            raise_on_error=True,
        ),
        "comparing",
    )
    return float(bool(same))


def _parse(text: str, seconds: int) -> list[Any]:
    from math_verify import parse

    return list(parse(plain_minus(text), parsing_timeout=seconds, raise_on_error=True))


def _in_time(work: Callable[[], Any], what: str) -> Any:
    from math_verify.errors import TimeoutException

    try:
        return work()
    except TimeoutException as error:  # a BaseException, so that nothing swallows it by chance
        raise TimeoutError(f"math-verify gave up {what}") from error
