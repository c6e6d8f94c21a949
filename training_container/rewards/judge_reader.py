"""Reading judgements: here, or with a pattern of the user's own in worker processes.

`re` holds the interpreter's lock while it matches, and a pattern may take for ever: in the trainer
neither a deadline nor SIGTERM's checkpoint would come through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.rewards import JudgeParserSpec, RewardSpec
from training_container.rewards.interface import Failure, FailureKind, Sample
from training_container.rewards.judge_parser import UNPARSABLE, Verdict, in_range, parse_judgement
from training_container.rewards.sandbox import PoolConfig, WorkerPool
from training_container.rewards.worker_process import START_SECONDS

__all__ = ["JudgementReader"]

_SHOWN_CHARACTERS = 200
_READING_SHARE, _LONGEST_READING_SECONDS = 0.25, 20.0


class JudgementReader:
    """Reads texts as a judge's parser says."""

    def __init__(
        self,
        spec: RewardSpec,
        *,
        workers: int = 1,
        memory_mb: int = 4096,
        start_seconds: float = START_SECONDS,
    ) -> None:
        assert spec.judge is not None
        self._parser: JudgeParserSpec = spec.judge.parser
        self.seconds = 0.0
        """The part of the batch's deadline that reading may take."""
        self._pool: WorkerPool | None = None
        if self._parser.kind == "regex":
            share = spec.timeout_seconds * _READING_SHARE
            self.seconds = min(share, _LONGEST_READING_SECONDS)
            config = PoolConfig(
                load={"parser": self._parser.model_dump()},
                name=spec.name,
                workers=workers,
                timeout_seconds=self.seconds,
                memory_mb=memory_mb,
                start_seconds=start_seconds,
            )
            self._pool = WorkerPool(config)

    def prepare(self) -> None:
        """Start the first worker process. Raises RewardConfigError."""
        if self._pool is not None:
            self._pool.prepare()

    def confinement(self) -> Mapping[str, str]:
        """How the worker processes are contained; empty where none is needed."""
        return {} if self._pool is None else self._pool.confinement

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def read(self, texts: Sequence[str]) -> list[float | Failure]:
        """A number in [0, 1] for each text, or why there is none."""
        if self._pool is None:
            return [_outcome(parse_judgement(text, self._parser), text) for text in texts]
        found = self._pool.score([Sample(text) for text in texts])
        return [
            found.failures.get(index) or _outcome(self._verdict(value), text)
            for index, (text, value) in enumerate(zip(texts, found.values, strict=True))
        ]

    def _verdict(self, number: float | None) -> Verdict:
        return UNPARSABLE if number is None else in_range(number, self._parser)


def _outcome(verdict: Verdict, text: str) -> float | Failure:
    if verdict.value is not None:
        return verdict.value
    return Failure(verdict.failure or FailureKind.UNPARSABLE, repr(text[-_SHOWN_CHARACTERS:]))
