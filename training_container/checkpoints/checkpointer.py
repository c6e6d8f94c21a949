"""The `Checkpointer` that training loops talk to: saves into the host's spool, restores from a
folder.

S3 is somebody else's business: the uploader process empties the spool, and the host process has
downloaded and verified what `restore` reads.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contracts.failures import ExitCode
from training_container.checkpoints.fence import ControlWatch
from training_container.checkpoints.schedule import MAX_BACKLOG, Facts, Interval, Verdict, decide
from training_container.checkpoints.spool import Spool
from training_container.checkpoints.stop import StopSignal
from training_container.checkpoints.tensors import local_bytes, read_tensors, write_tensors
from training_container.engine.distributed import World
from training_container.engine.state import Decision, PolicyWeights, TrainState
from training_container.failure import StageError

__all__ = ["CheckpointRules", "SpoolCheckpointer"]

log = logging.getLogger("grpohub.checkpoints")

ASSUMED_BYTES_PER_SECOND = 100e6
"""Upload rate of one rank that a first save is planned with; later ones use what was measured."""


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """What the run file says about saving."""

    interval_seconds: float
    pinned_steps: frozenset[int] = frozenset()
    """Steps that later stages start from."""
    best_metric: str | None = None


class SpoolCheckpointer:
    """One rank's checkpointer.

    ``resume`` and ``weights``: folders of opened checkpoints, or None. ``watch``: the leader's eye
    on control.json. Methods are called by all ranks in the same order; each step costs one small
    gloo exchange.
    """

    def __init__(
        self,
        world: World,
        spool: Spool,
        rules: CheckpointRules,
        *,
        local_rank: int = 0,
        resume: Path | None = None,
        weights: Path | None = None,
        stop: StopSignal | None = None,
        watch: ControlWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._world, self._spool, self._rules = world, spool, rules
        self._local_rank = local_rank
        self._resume, self._weights = resume, weights
        self._stop = stop or StopSignal()
        self._watch = watch
        self._clock = clock
        self._on_step = on_step
        # Background writes talk over a group of their own: collectives of one group must not mix.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._interval = Interval(rules.interval_seconds, clock())
        self._write: _Write | None = None
        self._save_seconds = 0.0
        self._last_saved = 0
        self._metrics: dict[str, float] = {}
        self._reported_bytes = 0

    def load_weights(self, weights: PolicyWeights) -> bool:
        """Weights of the checkpoint that the stage continues from; False when it names none."""
        if self._weights is None:
            return False
        weights.load_state_dict(read_tensors(weights.state_dict(), self._weights))
        return True

    def restore(self, state: TrainState) -> bool:
        """Resume from the opened checkpoint; False when the stage starts from step 0.

        Raises:
            StageError: CHECKPOINT when it does not hold what this stage needs.
        """
        if self._watch is not None:
            self._watch.poll()
        if self._resume is not None:
            state.load_state_dict(read_tensors(state.state_dict(), self._resume))
            log.info("resumed after step %d", state.progress.step)
        self._save_seconds = local_bytes(state.policy.module) / ASSUMED_BYTES_PER_SECOND
        self._interval.saved(self._clock())
        return self._resume is not None

    def after_step(
        self,
        state: TrainState,
        step: int,
        metrics: Mapping[str, Any],
        *,
        last: bool,
        step_seconds: float,
    ) -> Decision:
        """Save if due, and say whether to go on. The step's metrics row must already be written.

        Raises:
            StageError: FENCED when a newer attempt has taken over.
        """
        if self._on_step is not None:
            self._on_step(step, last)
        pinned = step in self._rules.pinned_steps
        facts = self._exchange(self._facts(step_seconds))
        self._drop_opened()
        best = self._is_best(state, step)
        verdict = decide(facts, must_save=last or pinned, best=best)
        if verdict.fenced_by:
            raise StageError(
                ExitCode.FENCED, f"attempt {verdict.fenced_by} of this stage has taken over"
            )
        if verdict.save:
            started = self._clock()
            self._wait(verdict)
            self._save(state, step, metrics)
            stalled = self._metrics.get("checkpoint/stall_seconds", 0.0)
            self._metrics["checkpoint/stall_seconds"] = stalled + self._clock() - started
        if verdict.stop:
            self._finish_write()
            log.info("stopping after step %d, %s", step, "saved" if verdict.save else "unsaved")
            return Decision.STOP
        return Decision.CONTINUE

    def take_metrics(self) -> dict[str, float]:
        """`checkpoint/...` numbers since the last call; only the leader has any."""
        if not self._world.is_leader:
            return {}
        taken, self._metrics = self._metrics, {}
        status = self._spool.status()
        taken["checkpoint/uploaded_bytes"] = float(status.uploaded_bytes - self._reported_bytes)
        taken["checkpoint/upload_failures"] = float(status.failures)
        taken["checkpoint/backlog"] = float(self._spool.backlog())
        if status.committed_step >= 0:
            taken["checkpoint/committed_step"] = float(status.committed_step)
            taken["checkpoint/upload_seconds"] = status.committed_seconds
        self._reported_bytes = status.uploaded_bytes
        return taken

    def close(self) -> None:
        """Wait until the last save is in the spool; the uploader process carries on from there."""
        self._finish_write()

    def _facts(self, step_seconds: float) -> Facts:
        now, status, watch = self._clock(), self._spool.status(), self._watch
        if self._write is not None and self._write.done.is_set():
            self._finish_write()
        if watch is not None:
            watch.poll()
        return Facts(
            writing=self._write is not None,
            backlog=self._spool.backlog(),
            stop_seconds=self._stop.seconds_left(),
            save_seconds=self._save_seconds + status.committed_seconds,
            fenced_by=max(status.fenced_by, watch.fenced_by if watch else 0),
            due=self._interval.due(now, step_seconds),
            requested=watch is not None and watch.requested,
            stop_after=watch is not None and watch.stop_after,
        )

    def _exchange(self, facts: Facts) -> list[Facts]:
        if self._world.size == 1:
            return [facts]
        mine = torch.tensor(facts.vector(), dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(everyone, mine)
        return [Facts.from_vector(vector.tolist()) for vector in everyone]

    def _drop_opened(self) -> None:
        """Free the disk of the checkpoints read: every rank has, as it has ended a step."""
        for folder in filter(None, (self._resume, self._weights)):
            if self._local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        self._resume = self._weights = None

    def _is_best(self, state: TrainState, step: int) -> bool:
        best = state.progress.best
        return self._rules.best_metric is not None and best is not None and best.step == step

    def _wait(self, verdict: Verdict) -> None:
        self._finish_write()
        # The uploader gives a failing step up after a bounded number of tries, so room comes.
        while verdict.wait and not verdict.stop and self._spool.backlog() >= MAX_BACKLOG:
            time.sleep(0.05)

    def _save(self, state: TrainState, step: int, metrics: Mapping[str, Any]) -> None:
        started = self._clock()
        if self._local_rank == 0:
            # What failed saves left. The save before this one may still be under way on a slower
            # rank; those before it are not, for every rank has begun that one.
            self._spool.drop_unfinished(before=self._last_saved)
        self._last_saved = step
        name = self._rules.best_metric or ""
        value = metrics.get(name)
        chosen = {name: float(value)} if isinstance(value, int | float) else {}
        futures = write_tensors(
            state.state_dict(),
            self._spool.folder(step),
            group=self._group,
            first_on_host=self._local_rank == 0,
        )
        self._write = _Write(
            futures, lambda: self._spool.finish(step, self._local_rank, chosen), self._clock
        )
        self._write.started = started
        self._interval.saved(started)
        if self._watch is not None:
            self._watch.served()

    def _finish_write(self) -> None:
        """Wait for the save under way, if any, and take its numbers."""
        if self._write is None:
            return
        self._write.done.wait()
        done, self._write = self._write, None
        if done.error is None:
            self._save_seconds = self._metrics["checkpoint/seconds"] = done.ended - done.started
            return
        # A full disk or a lost file costs this checkpoint, not the run.
        log.error("a checkpoint was not written: %s", done.error)
        failures = self._metrics.get("checkpoint/write_failures", 0.0)
        self._metrics["checkpoint/write_failures"] = failures + 1


class _Write:
    """Background writes of one step on one rank; ``finished`` is called when all went well."""

    def __init__(
        self,
        futures: list[Future[Any]],
        finished: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.started = self.ended = 0.0
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._left, self._lock = len(futures), threading.Lock()
        self._finished, self._clock = finished, clock
        if not futures:
            self._end()
        for future in futures:
            future.add_done_callback(self._one_done)

    def _one_done(self, future: Future[Any]) -> None:
        with self._lock:
            self.error = self.error or future.exception()
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _end(self) -> None:
        try:
            if self.error is None:
                self._finished()
        except OSError as error:  # the marker could not be written: the disk is full
            self.error = error
        finally:
            self.ended = self._clock()
            self.done.set()
