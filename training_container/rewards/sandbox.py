"""Pools of killable worker processes that run reward functions.

A process and not a thread, because a hang can only be ended by killing (verl#5635: `signal.alarm`
fails off the main thread and every score silently became 0; verl#5839: without it the run hung),
and not a fork of the trainer, because CUDA, threads and credentials must not come along.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from training_container.rewards.confine import Limits
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    Sample,
    Scores,
)
from training_container.rewards.wire import (
    Channel,
    ChannelClosedError,
    DeadlineExceededError,
    FrameError,
    encode,
    to_plain,
)

__all__ = ["PoolConfig", "WorkerPool"]

_log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("worker.py")
_ROOT = Path(__file__).parents[2]
_OUR_PACKAGES = (str(_ROOT / "training_container"), str(_ROOT / "contracts"))
_PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
_NETWORK_VARIABLES = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
_START_SECONDS = 60.0
_STDERR_LINES = 40
_CHUNKS_PER_WORKER = 4
_SAMPLE_SHARE = 0.25
_RESTARTS_PER_BATCH = 8


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How a pool's processes are made."""

    load: Mapping[str, Any]
    """The `load` message: a file or a built-in with its parameters."""
    name: str
    """The source's name, for logs and errors."""
    workers: int = 1
    timeout_seconds: float = 120.0
    """Deadline of a batch. One sample of a per-sample function may use a quarter of it."""
    memory_mb: int = 4096
    network: bool = False
    read_paths: tuple[str, ...] = ()
    max_batches: int = 500
    """A worker is replaced after this many batches (verl#275: one leaked until it died)."""
    max_growth_mb: int = 512
    """Or when it has grown by this much since its first batch."""


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self.scratch = tempfile.mkdtemp(prefix="reward-")
        self.batches = 0
        self.first_resident_mb: int | None = None
        self.resident_mb = 0
        self._life_read, self._life_write = os.pipe()
        self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._tail: deque[str] = deque(maxlen=_STDERR_LINES)
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **_passed(_PASSED_VARIABLES),
            **(_passed(_NETWORK_VARIABLES) if self._config.network else {}),
            "HOME": self.scratch,
            "TMPDIR": self.scratch,
            "OMP_NUM_THREADS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), str(_ROOT), str(self._life_read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=self.scratch,
            pass_fds=[self._life_read],
            start_new_session=True,
        )

    def load(self) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Confine and load. Returns the confinement and the function's traits.

        Raises RewardConfigError with the worker's words when the function cannot be loaded.
        """
        config = self._config
        deadline = time.monotonic() + max(_START_SECONDS, config.timeout_seconds)
        limits = Limits(
            memory_mb=config.memory_mb,
            cpu_seconds=int(config.timeout_seconds * config.max_batches) + 60,
            network=config.network,
            read_paths=(*_OUR_PACKAGES, *config.read_paths),
            scratch=self.scratch,
        )
        try:
            self.channel.send(asdict(limits), deadline)
            confinement = self.channel.receive(deadline)["confinement"]
            self.channel.send({"op": "load", **config.load}, deadline)
            traits = self.channel.receive(deadline)
        except (ChannelClosedError, FrameError, DeadlineExceededError) as error:
            raise RewardConfigError(
                f"reward {config.name!r}: its worker process did not start: "
                f"{self.last_words() or error}"
            ) from error
        if "error" in traits:
            raise RewardConfigError(f"reward {config.name!r} cannot be loaded: {traits['error']}")
        return confinement, traits

    def worn_out(self) -> bool:
        grown = self.resident_mb - (self.first_resident_mb or self.resident_mb)
        return self.batches >= self._config.max_batches or grown > self._config.max_growth_mb

    def note_batch(self, resident_mb: int) -> None:
        self.batches += 1
        self.resident_mb = resident_mb
        self.first_resident_mb = self.first_resident_mb or resident_mb

    def last_words(self) -> str:
        """The end of what the process wrote to standard error, once it has ended."""
        self._drain.join(timeout=1.0)
        return "\n".join(list(self._tail)[-8:]).strip()

    def _drain_stderr(self) -> None:
        stream: IO[bytes] | None = self._process.stderr
        assert stream is not None
        for line in stream:
            text = line[:2000].decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            _log.debug("reward %s: %s", self._config.name, text)

    def end_processes(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, collect it, and remove its scratch folder."""
        self.end_processes()
        for fd in (self._life_read, self._life_write):
            os.close(fd)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._drain.join(timeout=1.0)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _passed(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


class WorkerPool:
    """Worker processes that all have one reward function loaded.

    `score` may be called from any thread, one call at a time.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._closed = False
        self._restarts = 0
        self.confinement: Mapping[str, str] = {}
        self.per_sample = False
        self.columns: tuple[str, ...] | None = None

    def prepare(self) -> None:
        """Start the first worker, so that a bad file fails before anything else is loaded."""
        worker = self._new_worker()
        for area, state in self.confinement.items():
            level = logging.WARNING if state.startswith("open") else logging.INFO
            _log.log(level, "reward %s runs with %s: %s", self._config.name, area, state)
        self._idle.put(worker)

    def _new_worker(self) -> _Worker:
        if self._closed:
            raise RewardConfigError(f"reward {self._config.name!r} is closed")
        worker = _Worker(self._config)
        with self._lock:
            self._all.add(worker)
        try:
            self.confinement, traits = worker.load()
        except RewardConfigError:
            self._discard(worker)
            raise
        self.per_sample = bool(traits["per_sample"])
        columns = traits["columns"]
        self.columns = None if columns is None else tuple(columns)
        return worker

    def _discard(self, worker: _Worker) -> None:
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
        batch = _Batch(samples, self._config, self.columns)
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

    def _take(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._new_worker()

    def _run(self, worker: _Worker, batch: _Batch, chunk: list[int]) -> list[int]:
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
        self, worker: _Worker, batch: _Batch, chunk: list[int], kind: FailureKind, detail: str
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


class _Batch:
    """A batch under way, shared by the pool's threads."""

    def __init__(
        self, samples: Sequence[Sample], config: PoolConfig, columns: tuple[str, ...] | None
    ) -> None:
        self._samples, self._columns = samples, columns
        self._name = config.name
        self.deadline = time.monotonic() + config.timeout_seconds
        self.scores = Scores([None] * len(samples))
        self.answered: set[int] = set()
        self._extra: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def message(self, chunk: Sequence[int]) -> bytes:
        """The encoded `score` message; a group's shared row travels once. Raises FrameError."""
        rows: dict[int, int] = {}
        columns: list[Any] = []
        samples = []
        for index in chunk:
            sample = self._samples[index]
            if id(sample.columns) not in rows:
                rows[id(sample.columns)] = len(columns)
                columns.append(self._read(sample.columns))
            samples.append(
                {
                    "completion": sample.completion,
                    "prompt": [dict(message) for message in sample.prompt],
                    "response_length": sample.response_length,
                    "truncated": sample.truncated,
                    "ground_truth": sample.ground_truth,
                    "columns": rows[id(sample.columns)],
                }
            )
        return encode({"op": "score", "samples": samples, "columns": columns})

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = row if self._columns is None else [n for n in self._columns if n in row]
        return {name: to_plain(row[name], f"column {name!r}") for name in names}

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
        value, extra = frame.get("value"), frame.get("extra", {})
        if not (value is None or isinstance(value, float)) or not isinstance(extra, dict):
            raise FrameError("a score that is no number")
        with self._lock:
            self.answered.add(index)
            self.scores.values[index] = value
            for key, number in extra.items():
                self._extra.setdefault(str(key), []).append(float(number))

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


def _failure(frame: Mapping[str, Any]) -> tuple[FailureKind, str]:
    try:
        kind, detail = frame["failed"]
        return FailureKind(kind), str(detail)[:4000]
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError("no answer to a score message") from error
