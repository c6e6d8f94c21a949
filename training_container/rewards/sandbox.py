"""Pools of killable worker processes that run reward functions.

A process and not a thread, because a hang can only be ended by killing (verl#5635: `signal.alarm`
fails off the main thread and every score silently became 0; verl#5839: without it the run hung),
and not a fork of the trainer, because CUDA, threads and credentials must not come along.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
        self._changed = threading.Condition()
        """Guards the next three; notified when a worker is free, or may be started."""
        self._idle: deque[WorkerProcess] = deque()
        self._all: set[WorkerProcess] = set()
        self._room = config.workers
        self._busy = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._restarts = 0
        self.confinement: Mapping[str, str] = {}
        self.per_sample = False
        self._reads = _Reads()

    def prepare(self) -> None:
        """Start the first worker, so that a bad file fails before anything else is loaded."""
        self._put(self._take(time.monotonic()))
        for area, state in self.confinement.items():
            level = logging.WARNING if state.startswith("open") else logging.INFO
            _log.log(level, "reward %s runs with %s: %s", self._config.name, area, state)

    def _take(self, until: float) -> WorkerProcess:
        """An idle worker, or where there is room a new one, which may take `start_seconds` more.

        Raises RewardConfigError when the new one does not start, when neither comes by ``until``,
        or when the pool is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._idle or self._room, until - time.monotonic()
            )
            if self._closed:
                raise RewardConfigError(f"reward {self._config.name!r} is closed")
            if self._idle:
                return self._idle.popleft()
            if not self._room:
                raise RewardConfigError(f"reward {self._config.name!r}: no worker process is free")
            worker = WorkerProcess(self._config)
            self._room -= 1
            self._all.add(worker)
        return self._loaded(worker)

    def _put(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._idle.append(worker)
            self._changed.notify_all()

    def _loaded(self, worker: WorkerProcess) -> WorkerProcess:
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
        with self._changed:
            self._all.remove(worker)
        worker.kill()
        with self._changed:
            self._room += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all processes; a batch under way ends with failures."""
        with self._changed:
            self._closed = True
            for worker in self._all:
                worker.end_processes()
            self._changed.notify_all()
        with self._busy:  # the pipes are still in use until the batch and its threads have noticed
            for thread in self._threads:
                thread.join()
            self._idle.clear()
            for worker in list(self._all):
                self._discard(worker)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score a batch; whatever goes wrong becomes the failure of the samples it concerns."""
        with self._busy:
            return self._score(samples)

    def _score(self, samples: Sequence[Sample]) -> Scores:
        count = len(samples)
        if not count:
            return Scores([])
        try:
            # Where the last one was lost or retired, starting another is not the batch's time.
            self._put(self._take(time.monotonic() + self._config.start_seconds))
        except RewardConfigError as error:
            return Scores.all_failed(count, FailureKind.CRASH, str(error))
        if not self.per_sample:
            chunks = [list(range(count))]
        else:
            size = max(1, -(-count // (self._config.workers * _CHUNKS_PER_WORKER)))
            chunks = [list(range(at, min(at + size, count))) for at in range(0, count, size)]
        threads = min(self._config.workers, len(chunks))
        batch = _Batch(samples, self._config, self._reads, chunks, threads)
        self._restarts = 0
        # A thread that is still starting a worker when the batch is done goes on without it.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(threads):
            thread = threading.Thread(target=self._work, args=(batch,), daemon=True)
            thread.start()
            self._threads.append(thread)
        batch.wait()
        self._retire()
        if batch.refusal and time.monotonic() < batch.deadline:
            return batch.finish(FailureKind.CRASH, batch.refusal)
        return batch.finish(FailureKind.TIMEOUT, self._late())

    def _retire(self) -> None:
        """End workers that are worn out: between batches, for a start may outlast a batch."""
        with self._changed:
            worn = [worker for worker in self._idle if worker.worn_out()]
            for worker in worn:
                self._idle.remove(worker)
        for worker in worn:
            self._discard(worker)

    def _late(self) -> str:
        return f"not scored within {self._config.timeout_seconds:g} s"

    def _work(self, batch: _Batch) -> None:
        """One of a batch's threads: a worker first, so that no chunk waits for a start."""
        try:
            while batch.has_chunks():
                worker = self._take(batch.deadline)
                with batch.chunk() as chunk:
                    if not chunk:
                        self._put(worker)
                        continue
                    try:
                        batch.again(self._run(worker, batch, chunk))
                    except BaseException:
                        self._discard(worker)  # else its room would be lost
                        raise
        except RewardConfigError as error:
            if not self._closed:
                _log.warning("%s", error)
            batch.refusal = str(error)
        finally:
            batch.leave()

    def _run(self, worker: WorkerProcess, batch: _Batch, chunk: list[int]) -> list[int]:
        """Score a chunk on a worker. Returns what is left to do after the worker was lost."""
        try:
            message = batch.message(chunk)
        except FrameError as error:  # a value of the row that has no JSON form
            self._put(worker)
            batch.fail(chunk, FailureKind.EXCEPTION, str(error))
            return []
        try:
            worker.channel.send_frame(message, batch.deadline)
            while True:
                frame = worker.channel.receive(self._sample_deadline(batch))
                if "done" in frame:
                    batch.must_have(chunk)
                    worker.note_batch(_resident_mb(frame))
                    break
                batch.take(chunk, frame)
        except DeadlineExceededError:
            return self._lost(worker, batch, chunk, FailureKind.TIMEOUT, self._late_sample())
        except FrameError as error:
            return self._lost(worker, batch, chunk, FailureKind.CRASH, f"bad answer: {error}")
        except ChannelClosedError:
            words = worker.last_words() or "the worker process ended"
            return self._lost(worker, batch, chunk, FailureKind.CRASH, words)
        self._put(worker)
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
        with self._changed:
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

    def __init__(
        self,
        samples: Sequence[Sample],
        config: PoolConfig,
        reads: _Reads,
        chunks: Sequence[list[int]],
        threads: int,
    ) -> None:
        """``chunks`` are the indices that one message asks for; ``threads`` will `leave`."""
        self._samples, self._reads = samples, reads
        self._name = config.name
        self.deadline = time.monotonic() + config.timeout_seconds
        self.refusal = ""
        """Why a worker process did not start."""
        self._changed = threading.Condition()
        self._pending = deque(chunks)
        self._at_work, self._threads = 0, threads
        self.scores = Scores([None] * len(samples))
        self.answered: set[int] = set()
        self._extra: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def has_chunks(self) -> bool:
        """Whether there is something to do and time for it."""
        return bool(self._pending) and time.monotonic() < self.deadline

    @contextlib.contextmanager
    def chunk(self) -> Iterator[list[int]]:
        """The next indices to score, none where nothing is left; at work within the block."""
        with self._changed:
            taken = self._pending.popleft() if self.has_chunks() else []
            self._at_work += 1
        try:
            yield taken
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def again(self, rest: list[int]) -> None:
        """What is left of a chunk whose worker was lost."""
        if rest:
            self._pending.append(rest)

    def leave(self) -> None:
        """A thread takes no more chunks."""
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is scored, time is up or no thread is left; no chunk is at work afterwards.

        A thread that is only starting a worker is not waited for.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._at_work and not (self._pending and self._threads),
                self.deadline - time.monotonic(),
            )
            self._pending.clear()
            # Each ends by the same deadline.
            self._changed.wait_for(lambda: not self._at_work)
            self._pending.clear()

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
        if index in self.answered:
            raise FrameError("a sample answered twice")
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


def _resident_mb(frame: Mapping[str, Any]) -> int:
    number = frame.get("resident_mb")
    if not isinstance(number, int):
        raise FrameError("a size that is no number")
    return number


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
