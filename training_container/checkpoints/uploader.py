"""The host's uploader: a process of its own, so that neither a busy trainer nor its death stops an
upload.

It takes finished steps from the spool, oldest first, uploads their files, checks the fence, and
writes the host's flag last. SIGTERM asks it to finish what is there and leave. A failed step is
tried again with growing pauses, unless S3 refused it, then given up: no flag, a count in the
status, and training goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from contracts.checkpoints import Flag, FlagFile, write_flag
from contracts.layout import RunLayout, StageLayout
from training_container.checkpoints.fence import read_control
from training_container.checkpoints.outputs import OutputsMirror
from training_container.checkpoints.prune import BestRule, prune
from training_container.checkpoints.spool import Spool, SpooledStep
from training_container.checkpoints.store import Store, StoreError
from training_container.failure import StageError
from training_container.logs import set_up_logging

__all__ = ["Uploader", "UploaderConfig", "main"]

log = logging.getLogger("grpohub.uploader")

DRAINING_PAUSE_SECONDS = 5.0
"""Longest pause between two tries once asked to finish."""


@dataclass(frozen=True, slots=True)
class UploaderConfig:
    """Everything the process needs; travels as one JSON file."""

    bucket: str
    run_id: str
    stage_index: int
    stage: str
    attempt: int
    generation: str
    host_rank: int
    num_hosts: int
    world_size: int
    local_ranks: int
    spool: str
    outputs: str
    keep: int
    pinned_steps: tuple[int, ...] = ()
    best_metric: str | None = None
    best_mode: str = "max"
    tries: int = 6
    """Of one step; each upload inside is retried by botocore as well."""
    pause_seconds: float = 2.0
    """Before the second try; doubles after each, up to a minute."""
    outputs_seconds: float = 10.0
    """Between uploads of metrics and samples."""

    @property
    def layout(self) -> StageLayout:
        return RunLayout(self.run_id).stage(self.stage_index, self.stage)

    @property
    def is_leader(self) -> bool:
        return self.host_rank == 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> UploaderConfig:
        values = json.loads(path.read_text())
        return cls(**{**values, "pinned_steps": tuple(values["pinned_steps"])})


class Uploader:
    """One host's uploads. ``drain`` is set when no more steps will come."""

    def __init__(
        self,
        config: UploaderConfig,
        store: Store,
        drain: threading.Event,
        *,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.spool = Spool(Path(config.spool), config.local_ranks)
        self.outputs = OutputsMirror(
            store, config.layout, Path(config.outputs), config.attempt, config.generation
        )
        self._drain = drain
        self._sleep = sleep or self._pause
        self._reported = time.monotonic()
        self._status = self.spool.status()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Upload until asked to drain and nothing is left."""
        mirror = threading.Thread(target=self._mirror_outputs, name="outputs", daemon=True)
        mirror.start()
        while True:
            draining = self._drain.is_set()
            ready = self.spool.ready()
            for spooled in ready:
                self._attempt_step(spooled)
            if draining and not ready:
                break
            self._drain.wait(0.1)
        if self.config.is_leader:
            self._try_outputs()

    def _attempt_step(self, spooled: SpooledStep) -> None:
        """Upload one step with retries; afterwards it is gone from the spool, committed or not."""
        for attempt in range(1, self.config.tries + 1):
            try:
                if self._status.fenced_by == 0:
                    self._upload_step(spooled)
                break
            except StageError as error:
                log.warning("step %d, try %d: %s", spooled.step, attempt, error)
                self._update(failures=self._status.failures + 1, last_error=str(error))
                refused = isinstance(error, StoreError) and error.refused
                if refused or attempt == self.config.tries:
                    log.error("step %d is given up: no flag is written", spooled.step)
                    self._update(abandoned=[*self._status.abandoned, spooled.step])
                    break
                self._sleep(min(60.0, self.config.pause_seconds * 2 ** (attempt - 1)) * _jitter())
        self.spool.remove(spooled.step)

    def _upload_step(self, spooled: SpooledStep) -> None:
        started = time.monotonic()
        layout, config = self.config.layout, self.config
        prefix = layout.host_prefix(spooled.step, config.generation, config.host_rank)
        files = spooled.files()
        keys = {path: prefix + name for name, path in files.items()}
        with ThreadPoolExecutor(2) as hashers:
            hashes = hashers.map(_sha256, keys)
            self.store.upload(keys, self._count)
            listed = tuple(
                FlagFile(key=key, size=path.stat().st_size, sha256=sha256)
                for (path, key), sha256 in zip(keys.items(), hashes, strict=True)
            )
        if config.is_leader:
            # Rows up to this step must be in S3 before anyone can resume after it.
            self.outputs.sync()
        control = read_control(self.store, layout.control)
        if not control.allows(config.attempt):
            log.error("attempt %d has taken over: step %d is not committed", control.attempt,
                      spooled.step)  # fmt: skip
            self._update(fenced_by=control.attempt)
            return
        flag = self._flag(spooled, listed)
        self.store.put(
            layout.flag(spooled.step, config.generation, config.host_rank), write_flag(flag)
        )
        self._update(
            committed_step=spooled.step,
            committed_seconds=time.monotonic() - started,
            committed_bytes=sum(file.size for file in listed),
            last_error="",
        )
        log.info("step %d is committed: %d files, %d bytes", spooled.step, len(listed),
                 sum(file.size for file in listed))  # fmt: skip
        if config.is_leader:
            self._prune()

    def _flag(self, spooled: SpooledStep, files: tuple[FlagFile, ...]) -> Flag:
        config = self.config
        return Flag(
            run_id=config.run_id,
            stage=config.stage,
            step=spooled.step,
            attempt=config.attempt,
            generation=config.generation,
            host_rank=config.host_rank,
            num_hosts=config.num_hosts,
            world_size=config.world_size,
            files=files,
            metrics=spooled.metrics,
        )

    def _prune(self) -> None:
        """Old checkpoints cost money, not correctness: a failure here waits for the next commit."""
        config = self.config
        best = BestRule(config.best_metric, config.best_mode) if config.best_metric else None
        try:
            prune(
                self.store,
                config.layout,
                keep=config.keep,
                best=best,
                pinned_steps=frozenset(config.pinned_steps),
            )
        except StoreError as error:
            log.warning("pruning failed: %s", error)
            self._update(last_error=str(error))

    def _mirror_outputs(self) -> None:
        """Every few seconds, but never more than a twentieth of the time: files only grow."""
        pause = self.config.outputs_seconds
        while self.config.is_leader and not self._drain.wait(pause):
            started = time.monotonic()
            self._try_outputs()
            pause = max(self.config.outputs_seconds, 20 * (time.monotonic() - started))

    def _pause(self, seconds: float) -> None:
        """Wait between two tries; less when asked to finish, for the time left may be short."""
        if self._drain.wait(seconds):
            time.sleep(min(seconds, DRAINING_PAUSE_SECONDS))

    def _try_outputs(self) -> None:
        try:
            self.outputs.sync()
        except StoreError as error:
            log.warning("metrics and samples: %s", error)
            self._update(failures=self._status.failures + 1, last_error=str(error))

    def _count(self, sent: int) -> None:
        with self._lock:
            self._status.uploaded_bytes += sent
        # Progress is worth a file twice a second, not one per part.
        if time.monotonic() - self._reported > 0.5:
            self._reported = time.monotonic()
            self._update()

    def _update(self, **changes: object) -> None:
        with self._lock:
            for name, value in changes.items():
                setattr(self._status, name, value)
            self.spool.report(self._status)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _jitter() -> float:
    return random.uniform(0.5, 1.0)


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """`python -m training_container.checkpoints.uploader <config file>`."""
    set_up_logging(environ)
    drain = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: drain.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = UploaderConfig.load(Path(argv[0]))
    Uploader(config, Store(config.bucket), drain).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
