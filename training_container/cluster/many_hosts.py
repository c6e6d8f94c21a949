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
from training_container.cluster.addresses import interface_of, own_address, reachable, resolve
from training_container.cluster.beacon import ProgressReader
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.members import Member
from training_container.cluster.stall import StallWatch
from training_container.cluster.table import Phase, Row, Table, missing_hosts
from training_container.cluster.ticket import Ticket, publish_ticket, read_ticket
from training_container.cluster.verdict import Verdict, judge, lost_hosts
from training_container.failure import StageError, write_failure_file
from training_container.sagemaker_env import SageMakerEnv
from training_container.supervisor import Supervisor

__all__ = ["ManyHosts"]

log = logging.getLogger("grpohub.cluster")

T = TypeVar("T")
_POLL_SECONDS = 0.1
_TICKET_SECONDS = 1.0
_ROW_SECONDS = 0.5
_FAREWELL_SECONDS = 30.0
_ASSEMBLED = "assembled"


class ManyHosts:
    """One host's view of its job."""

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
        self._env, self._store, self._layout, self._attempt = env, store, layout, attempt
        self._supervisor, self._limits = supervisor, limits
        self._member = Member(supervisor, environ, work, lost_seconds=limits.lost)
        self.interface = interface_of(env.network_interface, env.current_host)
        self.address = own_address(env.current_host, self.interface)
        self._row = Row(env.host_rank, env.current_host, self.address, env.ranks_per_host, _gpus())
        self._rounds = 0
        self._stop: StopSignal | None = None
        self._progress: ProgressReader | None = None
        self._watch = StallWatch(limits)
        self._table: Table | None = None
        self._written = 0.0
        self._troubled: float | None = None
        self._adopted: Failure | None = None
        """A failure that this host has from the others."""

    @property
    def agreement(self) -> ManyHosts:
        return self

    # Joining

    def join(self) -> None:
        deadline = time.monotonic() + self._limits.join
        if self._env.is_leader:
            self._lead(deadline)
        else:
            self._follow(deadline)
        log.info("all %d hosts are there", self._env.num_hosts)

    def _lead(self, deadline: float) -> None:
        self._announce_cluster(deadline)
        while True:
            self._read()
            missing = self._missing()
            if not missing:
                break
            if (problem := self._member.trouble()) and time.monotonic() < deadline:
                log.warning("%s; starting the cluster again", problem)
                self._member.stop()
                self._announce_cluster(deadline)
            if time.monotonic() > deadline:
                waited = f"after {self._limits.join:.0f} s"
                raise StageError(
                    ExitCode.CLUSTER, f"{waited}, hosts are missing: {'; '.join(missing)}"
                )
            time.sleep(_POLL_SECONDS)
        self._post(_ASSEMBLED, True)

    def _announce_cluster(self, deadline: float) -> None:
        ticket = self._member.start_head(self._row, deadline)
        publish_ticket(self._store, self._layout, self._attempt, ticket)
        log.info("waiting for %d hosts, session %s", self._env.num_hosts, ticket.session)

    def _missing(self) -> list[str]:
        return missing_hosts(
            self._table, self._env.hosts, ranks=self._row.ranks, gpus=self._row.gpus
        )

    def _follow(self, deadline: float) -> None:
        """Try tickets until one lets this host in: the first may be of a past incarnation."""
        leader, seen = self._env.hosts[0], "has not announced itself"
        while True:
            ticket = read_ticket(self._store, self._layout, self._attempt)
            if ticket is not None:
                address = resolve(leader, deadline, turn=self._supervisor.poll)
                seen = f"announced {address}:{ticket.port}, where nothing answers"
                if reachable(address, ticket.port):
                    seen = f"at {address}:{ticket.port} did not let this host in"
                    if self._try(ticket, f"{address}:{ticket.port}", deadline):
                        return
            if time.monotonic() > deadline:
                raise StageError(
                    ExitCode.CLUSTER, f"the leader {leader} {seen} in {self._limits.join:.0f} s"
                )
            self._supervisor.poll()
            time.sleep(_TICKET_SECONDS)

    def _try(self, ticket: Ticket, head: str, deadline: float) -> bool:
        """Join with ``ticket``; False when it was refused or replaced meanwhile."""
        self._member.start_worker(self._row, head, ticket)
        asked = time.monotonic()
        while time.monotonic() < deadline:
            table = self._read()
            if table is not None and table.posted(_ASSEMBLED):
                return True
            if table is not None and (failure := self._failure_from_leader(table)):
                raise self._adopt(failure)
            if problem := self._member.trouble():
                log.warning("%s; asking for the ticket again", problem)
                break
            if table is None and time.monotonic() - asked > _TICKET_SECONDS:
                asked = time.monotonic()
                if read_ticket(self._store, self._layout, self._attempt) != ticket:
                    break
            time.sleep(_POLL_SECONDS)
        self._member.stop()
        self._table = None
        return False

    # Agreeing

    def settle(self, name: str, value: T) -> T:
        if self._env.is_leader:
            self._post(name, value)
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
        self._post(name, problem or "")

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
            table = self._read()
            if table is not None and (value := ready(table)) is not None:
                return value
            if failure := self._trouble():
                log.error("waiting for %s: %s", what, failure.cause)
                raise self._adopt(failure)
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def guard(self, output: Path) -> Iterator[None]:
        """The main thread may be deep in a download, so a timer looks around in its place. There
        is nothing to save yet."""

        def tick(_number: int, _frame: FrameType | None) -> None:
            self._read()
            if failure := self._trouble():
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
        self._row.phase = Phase.TRAINING

    def look(self) -> Failure | None:
        table = self._read()
        now = time.monotonic()
        if now - self._written > _ROW_SECONDS:
            assert self._stop is not None
            assert self._progress is not None
            self._row.progress = self._progress.read(now)
            self._row.stop = self._stop.requested
            self._write()
            if table is not None and table.stop:
                self._stop.trigger()
        failure = self._trouble()
        if failure is None and self._env.is_leader and table is not None:
            seen = {row.name: row.progress for row in table.rows.values()}
            failure = self._watch.look(seen, now)
        if failure is not None:
            self._adopted = failure
            if self._env.is_leader:  # at once: flushing uploads may take a while
                self._row.verdict = (int(failure.code), failure.cause)
                self._write()
        return failure

    def hurry(self) -> bool:
        self._read()
        table = self._table
        gone = table is not None and lost_hosts(table, self._env.hosts, self._limits)
        return bool(gone or self._broken())

    def report(self, failure: Failure | None) -> None:
        if failure is not None and failure != self._adopted:
            self._row.failure = (int(failure.code), failure.cause)
        if failure is not None:
            self._row.phase = Phase.DONE
        self._write()

    # Ending

    def outcome(self, failure: Failure | None) -> Failure | None:
        self.report(failure)
        self._row.phase = Phase.DONE
        self._write()
        if failure is not None and failure == self._adopted:
            return self._verdict_of(failure)
        return self._decide(failure) if self._env.is_leader else self._hear(failure)

    def _decide(self, failure: Failure | None) -> Failure | None:
        """The leader: judge until the verdict is in."""
        seconds = self._limits.uploads if failure is None else self._limits.lost * 3 + 150
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read()
            if self._row.verdict is not None:
                return _failure(self._row.verdict)
            if (problem := self._broken()) or self._table is None:
                return failure or Failure(ExitCode.CLUSTER, problem or "there is no cluster")
            verdict = self._judge()
            if verdict is not None:
                return verdict.failure
            time.sleep(_POLL_SECONDS)
        assert self._table is not None
        rows = self._table.rows.values()
        late = [row.name for row in rows if not row.failure and row.phase != Phase.DONE]
        return failure or Failure(
            ExitCode.CLUSTER, f"{', '.join(late)} did not end within {seconds:.0f} s"
        )

    def _hear(self, failure: Failure | None) -> Failure | None:
        """Another host: the leader's verdict; its own failure when there is no leader left."""
        while True:
            table = self._read()
            if table is not None and table.leader is not None and table.leader.verdict is not None:
                return _failure(table.leader.verdict)
            problem = self._broken()
            if problem or table is None:
                own = failure is not None and failure.code is not ExitCode.CLUSTER
                lost = problem or (failure.cause if failure else "there is no cluster")
                return failure if own else Failure(ExitCode.CLUSTER, lost)
            time.sleep(_POLL_SECONDS)

    def announce(self, failure: Failure | None) -> None:
        if self._env.is_leader:
            self._row.verdict = (int(failure.code), failure.cause) if failure else (0, "")
        else:
            self._row.phase = Phase.LEFT
        self._write()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and not self._heard() and not self._broken():
            time.sleep(_POLL_SECONDS)
            self._read()

    def _heard(self) -> bool:
        """Leader: everybody who lives has taken the verdict. Others: the farewell has arrived."""
        table = self._table
        if table is None:
            return False
        if not self._env.is_leader:
            return table.rows[self._env.host_rank].phase == Phase.LEFT
        gone = lost_hosts(table, self._env.hosts, self._limits)
        others = [r for rank, r in table.rows.items() if rank not in (0, *gone)]
        return all(row.phase == Phase.LEFT for row in others)

    def close(self) -> None:
        self._member.stop()

    # What this host knows

    def _read(self) -> Table | None:
        self._supervisor.poll()
        self._table = self._member.table()
        return self._table

    def _write(self) -> None:
        self._written = time.monotonic()
        self._member.write(self._row)

    def _post(self, name: str, value: object) -> None:
        self._row.posts[name] = value
        self._write()

    def _judge(self) -> Verdict | None:
        table, now = self._table, time.monotonic()
        if table is None:
            return None
        bad = any(row.failure for row in table.rows.values())
        bad = bad or bool(lost_hosts(table, self._env.hosts, self._limits))
        self._troubled = (self._troubled or now) if bad else None
        troubled = now - self._troubled if self._troubled is not None else 0.0
        return judge(table, self._env.hosts, self._limits, troubled=troubled)

    def _broken(self) -> str | None:
        """Why the table can no longer be relied on."""
        if problem := self._member.trouble():
            return self._lost_leader(problem)
        table = self._table
        if table is not None and (age := time.monotonic() - table.at) > self._limits.lost:
            return self._lost_leader(f"no word for {age:.0f} s")
        return None

    def _lost_leader(self, why: str) -> str:
        if self._env.is_leader:
            return f"the cluster is broken on its leader: {why}"
        return f"the leader {self._env.hosts[0]} was lost: {why}"

    def _trouble(self) -> Failure | None:
        """Why this host must not go on: the verdict, or on the leader what it comes to."""
        if problem := self._broken():
            return Failure(ExitCode.CLUSTER, problem)
        if self._env.is_leader:
            verdict = self._judge()
            return verdict.failure if verdict is not None else None
        return self._failure_from_leader(self._table) if self._table is not None else None

    def _failure_from_leader(self, table: Table) -> Failure | None:
        leader = table.leader
        return _failure(leader.verdict) if leader is not None and leader.verdict else None

    def _adopt(self, failure: Failure) -> StageError:
        self._adopted = failure
        return StageError(failure.code, failure.cause)

    def _verdict_of(self, failure: Failure) -> Failure:
        """What the leader has written down, if it has: `failure` may be an older judgement."""
        return (_failure(self._row.verdict) if self._row.verdict else None) or failure


def _failure(verdict: tuple[int, str]) -> Failure | None:
    code, cause = verdict
    return Failure(ExitCode(code), cause) if code else None


def _gpus() -> int:
    """GPUs that the driver shows, for Ray's own account of the node."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
