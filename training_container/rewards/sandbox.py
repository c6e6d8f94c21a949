"""Pools of killable worker processes that run reward functions.

A process and not a thread, because a hang can only be ended by killing (verl#5635: `signal.alarm`
fails off the main thread and every score silently became 0; verl#5839: without it the run hung),
and not a fork of the trainer, because CUDA, threads and credentials must not come along.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    Sample,
    Scores,
)
from training_container.rewards.wire import (
    ChannelClosedError,
    DeadlineExceededError,
    FrameError,
    encode,
    to_plain,
)
from training_container.rewards.worker_process import PoolConfig, WorkerProcess

__all__ = ["PoolConfig", "WorkerPool"]

_log = logging.getLogger(__name__)

_CHUNKS_PER_WORKER = 4
_SAMPLE_SHARE = 0.25
_RESTARTS_PER_BATCH = 8
_MOST_EXTRA_METRICS = 32


class WorkerPool:
    """Worker processes that all have one reward function loaded.

    `score` may be called from any thread, one call at a time.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._all: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._closed = False
        self._restarts = 0
        self.confinement: Mapping[str, str] = {}
        self.per_sample = False
        self._reads = _Reads()

    def prepare(self) -> None:
        """Start the first worker, so that a bad file fails before anything else is loaded."""
        worker = self._new_worker()
        for area, state in self.confinement.items():
            level = logging.WARNING if state.startswith("open") else logging.INFO
            _log.log(level, "reward %s runs with %s: %s", self._config.name, area, state)
        self._idle.put(worker)

    def _new_worker(self) -> WorkerProcess:
        if self._closed:
            raise RewardConfigError(f"reward {self._config.name!r} is closed")
        worker = WorkerProcess(self._config)
        with self._lock:
            self._all.add(worker)
        try:
            self.confinement, traits = worker.load()
        except RewardConfigError:
            self._discard(worker)
            raise
        try:
            self.per_sample = bool(traits["per_sample"])
            columns = traits["columns"]
            self._reads = _Reads(
                None if columns is None else tuple(map(str, columns)), bool(traits["prompt"])
            )
        except (KeyError, TypeError) as error:  # written by the file as it was imported
            self._discard(worker)
            raise RewardConfigError(
                f"reward {self._config.name!r}: its file interferes with the worker's answers"
            ) from error
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()

    def close(self) -> None:
        """End all processes; a batch under way ends with failures."""
        self._closed = True
        with self._lock:
            for worker in self._all:
                worker.end_processes()
        with self._busy:  # the pipes are still in use until the batch has noticed
            for worker in list(self._all):
                self._discard(worker)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score a batch; whatever goes wrong becomes the failure of the samples it concerns."""
        with self._busy:
            return self._score(samples)

    def _score(self, samples: Sequence[Sample]) -> Scores:
        if self._idle.empty():
            # The last one was lost: starting another is not the batch's time.
            try:
                self._idle.put(self._new_worker())
            except RewardConfigError as error:
                return Scores.all_failed(len(samples), FailureKind.CRASH, str(error))
        batch = _Batch(samples, self._config, self._reads)
        self._restarts = 0
        count = len(samples)
        if not count:
            return batch.scores
        if not self.per_sample:
            chunks = [list(range(count))]
        else:
            size = max(1, -(-count // (self._config.workers * _CHUNKS_PER_WORKER)))
            chunks = [list(range(at, min(at + size, count))) for at in range(0, count, size)]
        pending: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for chunk in chunks:
            pending.put(chunk)
        threads = [
            threading.Thread(target=self._work, args=(batch, pending), daemon=True)
            for _ in range(min(self._config.workers, len(chunks)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return batch.finish(FailureKind.TIMEOUT, self._late())

    def _late(self) -> str:
        return f"not scored within {self._config.timeout_seconds:g} s"

    def _work(self, batch: _Batch, pending: queue.SimpleQueue[list[int]]) -> None:
        while time.monotonic() < batch.deadline:
            try:
                chunk = pending.get_nowait()
            except queue.Empty:
                return
            try:
                worker = self._take()
            except RewardConfigError as error:
                batch.fail(chunk, FailureKind.CRASH, str(error))
                continue
            rest = self._run(worker, batch, chunk)
            if rest:
                pending.put(rest)

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._new_worker()

    def _run(self, worker: WorkerProcess, batch: _Batch, chunk: list[int]) -> list[int]:
        """Score a chunk on a worker. Returns what is left to do after the worker was lost."""
        try:
            message = batch.message(chunk)
        except FrameError as error:  # a value of the row that has no JSON form
            self._idle.put(worker)
            batch.fail(chunk, FailureKind.EXCEPTION, str(error))
            return []
        try:
            worker.channel.send_frame(message, batch.deadline)
            while True:
                frame = worker.channel.receive(self._sample_deadline(batch))
                if "done" in frame:
                    batch.must_have(chunk)
                    break
                batch.take(chunk, frame)
        except DeadlineExceededError:
            return self._lost(worker, batch, chunk, FailureKind.TIMEOUT, self._late_sample())
        except FrameError as error:
            return self._lost(worker, batch, chunk, FailureKind.CRASH, f"bad answer: {error}")
        except ChannelClosedError:
            words = worker.last_words() or "the worker process ended"
            return self._lost(worker, batch, chunk, FailureKind.CRASH, words)
        worker.note_batch(int(frame.get("resident_mb", 0)))
        if worker.worn_out():
            self._discard(worker)
        else:
            self._idle.put(worker)
        return []

    def _sample_deadline(self, batch: _Batch) -> float:
        if not self.per_sample:
            return batch.deadline
        share = self._config.timeout_seconds * _SAMPLE_SHARE
        return min(batch.deadline, time.monotonic() + share)

    def _late_sample(self) -> str:
        if not self.per_sample:
            return self._late()
        return f"one sample took over {self._config.timeout_seconds * _SAMPLE_SHARE:g} s"

    def _lost(
        self, worker: WorkerProcess, batch: _Batch, chunk: list[int], kind: FailureKind, detail: str
    ) -> list[int]:
        self._discard(worker)
        left = [index for index in chunk if index not in batch.answered]
        with self._lock:
            self._restarts += 1
            exhausted = self._restarts > _RESTARTS_PER_BATCH
        if not self.per_sample or exhausted:
            batch.fail(left, kind, detail)
            return []
        batch.fail(left[:1], kind, detail)  # the one it was working on
        return left[1:]


@dataclass(frozen=True, slots=True)
class _Reads:
    """What a function looks at; nothing else is sent to it."""

    columns: tuple[str, ...] | None = None
    """None: all of them."""
    prompt: bool = True


class _Batch:
    """A batch under way, shared by the pool's threads."""

    def __init__(self, samples: Sequence[Sample], config: PoolConfig, reads: _Reads) -> None:
        self._samples, self._reads = samples, reads
        self._name = config.name
        self.deadline = time.monotonic() + config.timeout_seconds
        self.scores = Scores([None] * len(samples))
        self.answered: set[int] = set()
        self._extra: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def message(self, chunk: Sequence[int]) -> bytes:
        """The encoded `score` message; a group's shared row travels once. Raises FrameError."""
        rows: dict[tuple[int, int], int] = {}
        shared: list[Any] = []
        samples = []
        for index in chunk:
            sample = self._samples[index]
            row = (id(sample.columns), id(sample.prompt))
            if row not in rows:
                rows[row] = len(shared)
                shared.append({"columns": self._columns(sample), "prompt": self._prompt(sample)})
            samples.append(
                {
                    "completion": sample.completion,
                    "response_length": sample.response_length,
                    "truncated": sample.truncated,
                    "ground_truth": sample.ground_truth,
                    "row": rows[row],
                }
            )
        return encode({"op": "score", "samples": samples, "rows": shared})

    def _columns(self, sample: Sample) -> dict[str, Any]:
        row, wanted = sample.columns, self._reads.columns
        names = row if wanted is None else [name for name in wanted if name in row]
        return {name: to_plain(row[name], f"column {name!r}") for name in names}

    def _prompt(self, sample: Sample) -> list[Any]:
        return [dict(message) for message in sample.prompt] if self._reads.prompt else []

    def take(self, chunk: Sequence[int], frame: Mapping[str, Any]) -> None:
        """Note one answer. Raises FrameError when it is not one: the worker is not trusted."""
        if "index" not in frame:
            kind, detail = _failure(frame)
            self.fail([index for index in chunk if index not in self.answered], kind, detail)
            return
        position = frame["index"]
        if not isinstance(position, int) or not 0 <= position < len(chunk):
            raise FrameError("no such sample")
        index = chunk[position]
        if "failed" in frame:
            self.fail([index], *_failure(frame))
            return
        value, extra = frame.get("value"), _extra(frame)
        if not (value is None or isinstance(value, float)):
            raise FrameError("a score that is no number")
        with self._lock:
            self.answered.add(index)
            self.scores.values[index] = value
            for key, number in extra.items():
                if key in self._extra or len(self._extra) < _MOST_EXTRA_METRICS:
                    self._extra.setdefault(key, []).append(number)

    def must_have(self, chunk: Sequence[int]) -> None:
        """Raises FrameError when a worker says it is done with samples it has not answered."""
        if not self.answered.issuperset(chunk):
            raise FrameError("samples without an answer")

    def finish(self, kind: FailureKind, detail: str) -> Scores:
        """The scores; what nobody answered failed with ``kind``."""
        rest = [index for index in range(len(self._samples)) if index not in self.answered]
        self.fail(rest, kind, detail)
        self.scores.metrics.update({k: sum(v) / len(v) for k, v in self._extra.items()})
        return self.scores

    def fail(self, indices: Sequence[int], kind: FailureKind, detail: str) -> None:
        with self._lock:
            self.answered.update(indices)
            for index in indices:
                self.scores.failures[index] = Failure(kind, detail)


def _extra(frame: Mapping[str, Any]) -> dict[str, float]:
    extra = frame.get("extra", {})
    if not isinstance(extra, dict) or not all(isinstance(v, float) for v in extra.values()):
        raise FrameError("a metric that is no number")
    return {str(key)[:64]: value for key, value in extra.items() if math.isfinite(value)}


def _failure(frame: Mapping[str, Any]) -> tuple[FailureKind, str]:
    try:
        kind, detail = frame["failed"]
        return FailureKind(kind), str(detail)[:4000]
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError("no answer to a score message") from error
