"""One worker process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import logging
import os
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

import pydantic

from training_container.rewards.confine import Limits
from training_container.rewards.egress import own_services
from training_container.rewards.interface import RewardConfigError
from training_container.rewards.wire import (
    Channel,
    ChannelClosedError,
    DeadlineExceededError,
    FrameError,
)

__all__ = ["START_SECONDS", "PoolConfig", "WorkerProcess"]

_log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("worker.py")
_ROOT = Path(__file__).parents[2]
_LIBRARIES = Path(pydantic.__file__).parents[1]
"""Where our libraries are: on Lambda a layer, which an isolated interpreter does not look into."""
_READABLE = (str(_ROOT / "training_container"), str(_ROOT / "contracts"), str(_LIBRARIES))
_PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
_NETWORK_VARIABLES = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
START_SECONDS = 300.0  # a file that imports torch from a cold disk
_STDERR_LINES, _LINE_BYTES = 40, 2000
_ANSWER_BYTES = 4 * 1024 * 1024
"""Longest frame taken from a worker: an answer is a number, some metrics or a reason."""


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
    start_seconds: float = START_SECONDS
    """Deadline of a worker's start."""
    max_batches: int = 500
    """A worker is replaced after this many batches (verl#275: one leaked until it died)."""
    max_growth_mb: int = 512
    """Or when it has grown by this much since its first batch."""


class WorkerProcess:
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
        self.channel = Channel(
            self._process.stdout.fileno(), self._process.stdin.fileno(), _ANSWER_BYTES
        )
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
            [sys.executable, "-I", _WORKER, _ROOT, str(self._life_read), _LIBRARIES],
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
        deadline = time.monotonic() + config.start_seconds
        limits = Limits(
            memory_mb=config.memory_mb,
            cpu_seconds=int(config.timeout_seconds * config.max_batches) + 60,
            network=config.network,
            services=own_services(os.environ) if config.network else (),
            read_paths=(*_READABLE, *config.read_paths),
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
        # In pieces: a line may be of any length, and this is the trainer's memory.
        for line in iter(lambda: stream.readline(_LINE_BYTES), b""):
            text = line.decode("utf-8", "replace").rstrip()
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
