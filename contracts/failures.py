"""How a container tells the control plane what went wrong, and the exit codes it ends with.

SageMaker copies the first 1024 characters of `/opt/ml/output/failure` into FailureReason. Its first
line is for the machine, the rest for people.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from contracts.states import Outcome

__all__ = ["EXIT_MEANINGS", "START_FAILED", "ExitCode", "Failure", "parse_failure"]

START_FAILED = "grpohub: start failed: "
"""What the inference container begins its last line with when it cannot serve; the cause follows.
Hosting has no failure file."""
_LIMIT = 1024
_LINE = re.compile(
    r"outcome=(?P<outcome>[a-z_]+) retryable=(?P<retryable>true|false) code=(?P<code>[a-z_]+)"
)


class ExitCode(IntEnum):
    """Exit codes of the training container. 0 means the model is exported and verified."""

    OK = 0
    INTERNAL = 1
    BAD_INPUT = 10
    DATA = 11
    REWARD = 12
    OUT_OF_MEMORY = 13
    NON_FINITE = 14
    EXPORT = 15
    CHECKPOINT = 16
    FENCED = 17
    CLUSTER = 20
    STORAGE = 21
    STOPPED = 30


EXIT_MEANINGS: dict[ExitCode, tuple[Outcome, bool, str]] = {
    ExitCode.OK: (Outcome.COMPLETED, False, "trained, exported and verified"),
    ExitCode.INTERNAL: (Outcome.INFRASTRUCTURE_FAILURE, True, "an error nobody foresaw"),
    ExitCode.BAD_INPUT: (Outcome.USER_FAILURE, False, "run file or hyperparameters are wrong"),
    ExitCode.DATA: (Outcome.USER_FAILURE, False, "data missing, empty, unreadable or changed"),
    ExitCode.REWARD: (Outcome.USER_FAILURE, False, "a reward source failed beyond its ceiling"),
    ExitCode.OUT_OF_MEMORY: (Outcome.USER_FAILURE, False, "device or host memory ran out"),
    ExitCode.NON_FINITE: (Outcome.USER_FAILURE, False, "loss or gradient is NaN or infinite"),
    ExitCode.EXPORT: (Outcome.INFRASTRUCTURE_FAILURE, True, "the exported model failed its check"),
    ExitCode.CHECKPOINT: (
        Outcome.USER_FAILURE, False, "a checkpoint that should be there is not, or is unusable"
    ),
    ExitCode.FENCED: (Outcome.CANCELLED, False, "a newer attempt has taken over"),
    ExitCode.CLUSTER: (Outcome.INFRASTRUCTURE_FAILURE, True, "a host or rank was lost or hung"),
    ExitCode.STORAGE: (Outcome.INFRASTRUCTURE_FAILURE, True, "S3 refused or failed for too long"),
    ExitCode.STOPPED: (Outcome.INTERRUPTED, True, "stopped on request after a checkpoint"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """First line of the failure file, and the cause."""

    code: ExitCode
    cause: str

    @property
    def outcome(self) -> Outcome:
        return EXIT_MEANINGS[self.code][0]

    @property
    def retryable(self) -> bool:
        return EXIT_MEANINGS[self.code][1]

    def text(self) -> str:
        """Body of the failure file, at most 1024 characters."""
        line = (
            f"outcome={self.outcome.value} retryable={str(self.retryable).lower()} "
            f"code={self.code.name.lower()}"
        )
        return f"{line}\n{self.cause}"[:_LIMIT]


def parse_failure(reason: str) -> Failure | None:
    """Our line found anywhere in a FailureReason (SageMaker puts its own words around); None if
    absent."""
    match = _LINE.search(reason)
    if match is None or match["code"].upper() not in ExitCode.__members__:
        return None
    return Failure(ExitCode[match["code"].upper()], reason[match.end() :].strip())
