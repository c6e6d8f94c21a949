"""What one host knows of its job: the row that it writes, the table that it reads, and what they
come to.

Who cannot reach the table any more takes the leader for lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from contracts.failures import ExitCode, Failure
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.members import Member
from training_container.cluster.table import Row, Table
from training_container.cluster.verdict import Verdict, judge, lost_hosts
from training_container.failure import StageError
from training_container.supervisor import Supervisor

__all__ = ["View"]


class View:
    """One host's row and table. ``hosts`` are the job's, by host rank."""

    def __init__(
        self,
        row: Row,
        hosts: Sequence[str],
        *,
        member: Member,
        supervisor: Supervisor,
        limits: ClusterLimits,
    ) -> None:
        self.row, self.hosts = row, hosts
        self.table: Table | None = None
        self.written = 0.0
        """When the row was last written, monotonic."""
        self.adopted: Failure | None = None
        """A failure that this host has from the others."""
        self._member, self._supervisor, self._limits = member, supervisor, limits
        self._troubled: float | None = None

    @property
    def leads(self) -> bool:
        return self.row.host_rank == 0

    def read(self) -> Table | None:
        """The newest table; None before there is one."""
        self._supervisor.poll()
        self.table = self._member.table()
        return self.table

    def write(self) -> None:
        self.written = time.monotonic()
        self._member.write(self.row)

    def post(self, name: str, value: object) -> None:
        """Tell all hosts ``value`` under ``name``."""
        self.row.posts[name] = value
        self.write()

    def lost(self) -> list[int]:
        """Host ranks that have not been heard of for too long."""
        return lost_hosts(self.table, self.hosts, self._limits) if self.table is not None else []

    def judge(self) -> Verdict | None:
        """The leader's verdict, or None while it is open."""
        table, now = self.table, time.monotonic()
        if table is None:
            return None
        bad = any(row.failure for row in table.rows.values()) or bool(self.lost())
        self._troubled = (self._troubled or now) if bad else None
        troubled = now - self._troubled if self._troubled is not None else 0.0
        return judge(table, self.hosts, self._limits, troubled=troubled)

    def broken(self) -> str | None:
        """Why the table can no longer be relied on."""
        if problem := self._member.trouble():
            return self._lost_leader(problem)
        table = self.table
        if table is not None and (age := time.monotonic() - table.at) > self._limits.lost:
            return self._lost_leader(f"no word for {age:.0f} s")
        return None

    def trouble(self) -> Failure | None:
        """Why this host must not go on: the verdict, or on the leader what it comes to."""
        if problem := self.broken():
            return Failure(ExitCode.CLUSTER, problem)
        if self.leads:
            verdict = self.judge()
            return verdict.failure if verdict is not None else None
        return self.failure_from_leader()

    def failure_from_leader(self) -> Failure | None:
        """The failure in the leader's verdict, if there is one."""
        verdict = self.verdict_from_leader()
        return verdict.failure if verdict is not None else None

    def verdict_from_leader(self) -> Verdict | None:
        """The leader's verdict, if it has been given."""
        leader = self.table.leader if self.table is not None else None
        return Verdict(_failure(leader.verdict)) if leader is not None and leader.verdict else None

    def adopt(self, failure: Failure) -> StageError:
        """To be raised: this host fails of what others told it."""
        self.adopted = failure
        return StageError(failure.code, failure.cause)

    def rule(self, failure: Failure | None) -> None:
        """The leader's verdict is ``failure``; None is success."""
        self.row.verdict = (int(failure.code), failure.cause) if failure else (0, "")

    def ruled(self) -> Verdict | None:
        """What this leader has written down, if it has."""
        return Verdict(_failure(self.row.verdict)) if self.row.verdict is not None else None

    def _lost_leader(self, why: str) -> str:
        if self.leads:
            return f"the cluster is broken on its leader: {why}"
        return f"the leader {self.hosts[0]} was lost: {why}"


def _failure(verdict: tuple[int, str]) -> Failure | None:
    code, cause = verdict
    return Failure(ExitCode(code), cause) if code else None
