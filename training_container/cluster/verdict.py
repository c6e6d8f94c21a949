"""What a job came to, judged by the leader from the table. Pure.

| hosts | verdict |
|---|---|
| one failed for a reason of its own | that reason, at once |
| one is lost | CLUSTER, naming it; unless a reason of its own is known |
| only consequences (a lost peer) or an unforeseen error | the best of them, after a while |
| some stopped on request | STOPPED, when all have ended |
| all done | success |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.failures import ExitCode, Failure
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.table import Phase, Table

__all__ = ["Verdict", "judge", "lost_hosts"]

_CONSEQUENCES = (ExitCode.INTERNAL, ExitCode.CLUSTER)
"""Worst last: an unforeseen error says more than a lost peer, any documented code more than both.
A leader's failure reaches other ranks as INTERNAL."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """None is success."""

    failure: Failure | None


def lost_hosts(table: Table, hosts: Sequence[str], limits: ClusterLimits) -> list[int]:
    """Host ranks that were there and have not been heard of for too long."""
    return [
        rank
        for rank in range(len(hosts))
        if table.ages.get(rank, 0.0) > limits.lost and table.rows[rank].phase != Phase.LEFT
    ]


def judge(
    table: Table, hosts: Sequence[str], limits: ClusterLimits, *, troubled: float
) -> Verdict | None:
    """The verdict, or None while it is open. ``troubled``: seconds since the first bad sign."""
    failures = [(r, row.failed) for r, row in sorted(table.rows.items()) if row.failed is not None]
    stopped = [failure for _, failure in failures if failure.code is ExitCode.STOPPED]
    real = {r: failure for r, failure in failures if failure.code is not ExitCode.STOPPED}
    lost = lost_hosts(table, hosts, limits)
    ended = {r for r, row in table.rows.items() if row.failure or row.phase == Phase.DONE}
    over = set(range(len(hosts))) <= ended | set(lost)
    if real:
        rank = min(real, key=lambda r: (_badness(real[r]), r))
        cause, code = f"{table.rows[rank].name}: {real[rank].cause}", real[rank].code
        if code in _CONSEQUENCES and not (lost or over or troubled > limits.settle):
            return None
        causes = [*(_losses(table, lost) if code is ExitCode.CLUSTER else ()), cause]
        return Verdict(Failure(code, "; ".join(causes)))
    if lost:
        return Verdict(Failure(ExitCode.CLUSTER, "; ".join(_losses(table, lost))))
    if over:
        return Verdict(stopped[0] if stopped else None)
    return None


def _badness(failure: Failure) -> int:
    return 1 + _CONSEQUENCES.index(failure.code) if failure.code in _CONSEQUENCES else 0


def _losses(table: Table, lost: Sequence[int]) -> list[str]:
    return [
        f"{table.rows[rank].name} was lost: no sign of life for {table.ages[rank]:.0f} s"
        for rank in lost
    ]
