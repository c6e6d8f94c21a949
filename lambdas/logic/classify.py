"""What a FailureReason means. The words were read in public reports of real jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from contracts.failures import EXIT_MEANINGS, ExitCode, parse_failure
from contracts.states import Outcome

__all__ = ["Classified", "classify_failure", "is_capacity_error"]


@dataclass(frozen=True, slots=True)
class Classified:
    """Outcome of a failed job, and its cause in words."""

    outcome: Outcome
    cause: str
    code: str | None = None
    """Exit code name of our container, when it could say one."""


_RULES: tuple[tuple[re.Pattern[str], Outcome], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), outcome)
    for pattern, outcome in (
        (r"CapacityError", Outcome.OUT_OF_CAPACITY),
        (r"InsufficientInstanceCapacity|InsufficientCapacity", Outcome.OUT_OF_CAPACITY),
        (r"Unable to provision requested ML compute capacity", Outcome.OUT_OF_CAPACITY),
        (r"ResourceLimitExceeded", Outcome.OUT_OF_QUOTA),
        (r"account-level service limit", Outcome.OUT_OF_QUOTA),
        (r"InternalServerError|We encountered an internal error", Outcome.INFRASTRUCTURE_FAILURE),
        (r"MaxRuntimeExceeded", Outcome.TIMED_OUT),
        (r"ClientError", Outcome.USER_FAILURE),
        (r"AccessDenied|is not authorized to perform", Outcome.USER_FAILURE),
        (r"No S3 objects found|NoSuchBucket|NoSuchKey", Outcome.USER_FAILURE),
        (r"CannotStartContainerError|manifest unknown", Outcome.USER_FAILURE),
    )
)
_EXIT = re.compile(r"exit\s*code:?\s*(\d+)", re.IGNORECASE)


def classify_failure(reason: str | None) -> Classified:
    """Outcome of a job whose status is Failed.

    Our container's own first line decides when it is there. Then SageMaker's known words, then the
    exit code. What nobody knows is an infrastructure failure: a small budget bounds its
    resubmissions, while taking it for the user's fault would end a run that the next attempt may
    finish.
    """
    text = (reason or "").strip()
    ours = parse_failure(text)
    if ours is not None:
        return Classified(ours.outcome, ours.cause or text, ours.code.name.lower())
    for pattern, outcome in _RULES:
        if pattern.search(text):
            return Classified(outcome, text)
    exit_code = _EXIT.search(text)
    if exit_code and int(exit_code[1]) in set(ExitCode):
        code = ExitCode(int(exit_code[1]))
        outcome, _, meaning = EXIT_MEANINGS[code]
        if code is not ExitCode.OK:
            return Classified(outcome, f"{meaning}: {text}", code.name.lower())
    return Classified(Outcome.INFRASTRUCTURE_FAILURE, text or "SageMaker gave no reason")


def is_capacity_error(reason: str | None) -> bool:
    """Whether a failed endpoint may do better on another instance type."""
    outcome = classify_failure(reason).outcome
    return outcome in (Outcome.OUT_OF_CAPACITY, Outcome.OUT_OF_QUOTA)
