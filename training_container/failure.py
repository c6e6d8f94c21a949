"""Failures with an exit code, and `/opt/ml/output/failure`.

Any part of the container raises `StageError` with the documented code; the rank that raised leaves
a note for the supervisor, which decides what the job reports and writes the one file that
SageMaker reads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from contracts.failures import ExitCode, Failure

__all__ = [
    "RankFailure",
    "StageError",
    "failure_of",
    "note_rank_failure",
    "read_rank_failures",
    "root_cause",
    "write_atomically",
    "write_failure_file",
]


class StageError(Exception):
    """A failure whose meaning is known: exit code and a cause written for people."""

    def __init__(self, code: ExitCode, cause: str) -> None:
        self.code = code
        super().__init__(cause)

    def __reduce__(self) -> tuple[type[StageError], tuple[ExitCode, str]]:
        """Ranks tell each other of failures by pickle, which would call us with the cause only."""
        return StageError, (self.code, str(self))


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What one rank died of, and when (seconds since the epoch)."""

    rank: int
    at: float
    failure: Failure


def failure_of(error: BaseException) -> Failure:
    """Failure that an exception means. Out-of-memory errors are known by type, the rest is
    INTERNAL.
    """
    if isinstance(error, StageError):
        return Failure(error.code, str(error))
    # torch.OutOfMemoryError derives from RuntimeError; by name, because this module must not
    # import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failure(ExitCode.OUT_OF_MEMORY, f"{type(error).__name__}: {error}")
    return Failure(ExitCode.INTERNAL, f"{type(error).__name__}: {error}")


def note_rank_failure(folder: Path, rank: int, failure: Failure) -> None:
    """Leave the note; the first one of a rank stays."""
    path = folder / f"failure-{rank:05d}.json"
    if not path.exists():
        body = {"rank": rank, "at": time.time(), "code": int(failure.code), "cause": failure.cause}
        write_atomically(path, json.dumps(body).encode())


def read_rank_failures(folder: Path) -> list[RankFailure]:
    """Notes of all ranks of this host."""
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    return [
        RankFailure(note["rank"], note["at"], Failure(ExitCode(note["code"]), note["cause"]))
        for note in notes
    ]


def root_cause(failures: Iterable[RankFailure]) -> RankFailure | None:
    """The failure that caused the others. A lost peer is a consequence, so CLUSTER notes come last;
    a leader's failure reaches other ranks as INTERNAL, so those come before them.
    """
    last = (ExitCode.INTERNAL, ExitCode.CLUSTER)

    def order(note: RankFailure) -> tuple[int, float]:
        code = note.failure.code
        return (last.index(code) + 1 if code in last else 0, note.at)

    return min(failures, key=order, default=None)


def write_failure_file(output: Path, failure: Failure) -> None:
    """`/opt/ml/output/failure`; SageMaker copies its first 1024 characters into FailureReason."""
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "failure", failure.text().encode())


def write_atomically(path: Path, body: bytes) -> None:
    """Write so that a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(body)
    os.replace(temporary, path)
