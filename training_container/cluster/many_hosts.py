"""`Peers` for a job of several hosts: a Ray cluster that all have joined, and a table that all
read.

Whoever fails writes it into its row; the leader judges (`verdict`) and writes the verdict into its
own; all others take that over, so every host ends with the same code and words. Who cannot reach
the table any more takes the leader for lost.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

from contracts.checkpoints import CheckpointId
from contracts.failures import ExitCode, Failure
from contracts.layout import StageLayout
from training_container.checkpoints.stop import StopSignal
from training_container.checkpoints.store import Store
from training_container.cluster.addresses import interface_of, own_address
from training_container.cluster.beacon import ProgressReader
from training_container.cluster.joining import Joining
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.members import Member
from training_container.cluster.stall import StallWatch
from training_container.cluster.table import Phase, Row, Table
from training_container.cluster.view import View
from training_container.failure import write_failure_file
from training_container.sagemaker_env import SageMakerEnv
from training_container.supervisor import Supervisor

__all__ = ["ManyHosts"]

log = logging.getLogger("grpohub.cluster")

T = TypeVar("T")
_POLL_SECONDS = 0.1
_ROW_SECONDS = 0.5
_FAREWELL_SECONDS = 30.0


class ManyHosts:
    """One host's part in its job."""

    def __init__(
        self,
        env: SageMakerEnv,
        store: Store,
        layout: StageLayout,
        attempt: int,
        *,
        supervisor: Supervisor,
        work: Path,
        environ: Mapping[str, str],
        limits: ClusterLimits,
    ) -> None:
        self._env, self._limits = env, limits
        self._member = Member(supervisor, environ, work, lost_seconds=limits.lost)
        self.interface = interface_of(env.network_interface, env.current_host)
        self.address = own_address(env.current_host, self.interface)
        row = Row(env.host_rank, env.current_host, self.address, env.ranks_per_host, _gpus())
        self._view = View(row, env.hosts, member=self._member, supervisor=supervisor, limits=limits)
        self._joining = Joining(
            self._view, self._member, store, layout, attempt, supervisor=supervisor, limits=limits
        )
        self._rounds = 0
        self._stop: StopSignal | None = None
        self._progress: ProgressReader | None = None
        self._watch = StallWatch(limits)

    @property
    def agreement(self) -> ManyHosts:
        return self

    def join(self) -> None:
        self._joining.join()

    # Agreeing

    def settle(self, name: str, value: T) -> T:
        if self._view.leads:
            self._view.post(name, value)
            return value
        return self._wait(lambda table: table.posted(name).get(0), f"the leader's {name}")

    def from_leader(self, choice: CheckpointId | None) -> CheckpointId | None:
        """`Agreement`: the leader's choice, on every host."""
        self._rounds += 1
        mine = [choice.step, choice.generation] if choice else []
        step_and_generation = self.settle(f"choice-{self._rounds}", mine)
        return CheckpointId(*step_and_generation) if step_and_generation else None

    def problems(self, problem: str | None) -> list[str]:
        """`Agreement`: what any host found wrong."""
        self._rounds += 1
        name = f"problem-{self._rounds}"
        self._view.post(name, problem or "")

        def everyone(table: Table) -> dict[int, str] | None:
            posted = table.posted(name)
            return posted if len(posted) == self._env.num_hosts else None

        found = self._wait(everyone, "the other hosts' downloads")
        return [found[rank] for rank in sorted(found) if found[rank]]

    def _wait(self, ready: Callable[[Table], T | None], what: str) -> T:
        """Until ``ready`` answers. Not bounded by time, but by the life of the hosts waited for,
        each of which is bounded in what it does.

        Raises:
            StageError: what the job has failed of meanwhile.
        """
        while True:
            table = self._view.read()
            if table is not None and (value := ready(table)) is not None:
                return value
            if failure := self._view.trouble():
                log.error("waiting for %s: %s", what, failure.cause)
                raise self._view.adopt(failure)
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def guard(self, output: Path) -> Iterator[None]:
        """The main thread may be deep in a download, so a timer looks around in its place. There
        is nothing to save yet."""

        def tick(_number: int, _frame: FrameType | None) -> None:
            self._view.read()
            if failure := self._view.trouble():
                signal.setitimer(signal.ITIMER_REAL, 0)
                failure = self._verdict_of(failure)
                log.error("%s", failure.text())
                self.announce(failure)
                write_failure_file(output, failure)
                os._exit(int(failure.code))

        former = signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    # Training

    def train(self, stop: StopSignal, progress: ProgressReader) -> None:
        self._stop, self._progress = stop, progress
        self._view.row.phase = Phase.TRAINING

    def look(self) -> Failure | None:
        view, now = self._view, time.monotonic()
        table = view.read()
        if now - view.written > _ROW_SECONDS:
            assert self._stop is not None
            assert self._progress is not None
            view.row.progress = self._progress.read(now)
            view.row.stop = self._stop.requested
            view.write()
            if table is not None and table.stop:
                self._stop.trigger()
        failure = view.trouble()
        if failure is None and view.leads and table is not None:
            seen = {row.name: row.progress for row in table.rows.values()}
            failure = self._watch.look(seen, now)
        if failure is not None:
            view.adopted = failure
            if view.leads:  # at once: flushing uploads may take a while
                view.rule(failure)
                view.write()
        return failure

    def hurry(self) -> bool:
        self._view.read()
        return bool(self._view.lost() or self._view.broken())

    def report(self, failure: Failure | None) -> None:
        if failure is not None and failure != self._view.adopted:
            self._view.row.failure = (int(failure.code), failure.cause)
        if failure is not None:
            self._view.row.phase = Phase.DONE
        self._view.write()

    # Ending

    def outcome(self, failure: Failure | None) -> Failure | None:
        self.report(failure)
        self._view.row.phase = Phase.DONE
        self._view.write()
        if failure is not None and failure == self._view.adopted:
            return self._verdict_of(failure)
        return self._decide(failure) if self._view.leads else self._hear(failure)

    def _decide(self, failure: Failure | None) -> Failure | None:
        """The leader: judge until the verdict is in."""
        seconds = self._limits.uploads if failure is None else self._limits.lost * 3 + 150
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            table = self._view.read()
            if ruled := self._view.ruled():
                return ruled.failure
            if (problem := self._view.broken()) or table is None:
                return failure or Failure(ExitCode.CLUSTER, problem or "there is no cluster")
            if verdict := self._view.judge():
                return verdict.failure
            time.sleep(_POLL_SECONDS)
        assert self._view.table is not None
        rows = self._view.table.rows.values()
        late = [row.name for row in rows if not row.failure and row.phase != Phase.DONE]
        return failure or Failure(
            ExitCode.CLUSTER, f"{', '.join(late)} did not end within {seconds:.0f} s"
        )

    def _hear(self, failure: Failure | None) -> Failure | None:
        """Another host: the leader's verdict; its own failure when there is no leader left."""
        while True:
            table = self._view.read()
            if verdict := self._view.verdict_from_leader():
                return verdict.failure
            problem = self._view.broken()
            if problem or table is None:
                own = failure is not None and failure.code is not ExitCode.CLUSTER
                lost = problem or (failure.cause if failure else "there is no cluster")
                return failure if own else Failure(ExitCode.CLUSTER, lost)
            time.sleep(_POLL_SECONDS)

    def announce(self, failure: Failure | None) -> None:
        if self._view.leads:
            self._view.rule(failure)
        else:
            self._view.row.phase = Phase.LEFT
        self._view.write()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and not self._heard() and not self._view.broken():
            time.sleep(_POLL_SECONDS)
            self._view.read()

    def _heard(self) -> bool:
        """Leader: everybody who lives has taken the verdict. Others: the farewell has arrived.
        Without a table there is nobody to hear it."""
        table = self._view.table
        if table is None:
            return True
        if not self._view.leads:
            return table.rows[self._env.host_rank].phase == Phase.LEFT
        gone = self._view.lost()
        others = [r for rank, r in table.rows.items() if rank not in (0, *gone)]
        return all(row.phase == Phase.LEFT for row in others)

    def close(self) -> None:
        self._member.stop()

    def _verdict_of(self, failure: Failure) -> Failure:
        """What the leader has written down, if it has: `failure` may be an older judgement."""
        ruled = self._view.ruled()
        return (ruled.failure if ruled else None) or failure


def _gpus() -> int:
    """GPUs that the driver shows, for Ray's own account of the node."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
