"""The progress watchdog: finds ranks that hang, and says which and where. Pure.

A collective that times out names nobody: every waiting rank raises, the one they wait for does not.
Here each rank's main thread is looked at from beside it (`beacon`), so the one that does *not* wait
is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.failures import ExitCode, Failure
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.table import RankProgress

__all__ = ["StallWatch"]

_FACTOR = 5
"""A step may take this many times the longest one so far: answers grow, and some steps validate."""


class StallWatch:
    """Fed with every look at the ranks; remembers when steps were finished."""

    def __init__(self, limits: ClusterLimits) -> None:
        self._limits = limits
        self._step = -1
        self._since: float | None = None
        self._longest = 0.0

    def look(self, progress: Mapping[str, Sequence[RankProgress]], now: float) -> Failure | None:
        """A CLUSTER failure that names the culprits, or None. ``progress`` by name of the host."""
        ranks = {(host, p.rank): p for host, seen in progress.items() for p in seen}
        if not ranks:
            return None
        step = min(p.step for p in ranks.values())
        if self._since is None or step > self._step:
            if self._since is not None and self._step >= 0:
                self._longest = max(self._longest, now - self._since)
            self._step, self._since = step, now
        idle = min(p.idle for p in ranks.values())
        if idle > self._limits.idle:
            return _failure(f"no rank has moved for {idle:.0f} s", ranks)
        elapsed = now - self._since
        finished = all(p.last for p in ranks.values())  # an export is bounded by `idle` alone
        if not finished and elapsed > max(self._limits.step, _FACTOR * self._longest):
            return _failure(f"step {step + 1} has taken {elapsed:.0f} s so far", ranks)
        return None


def _failure(what: str, ranks: Mapping[tuple[str, int], RankProgress]) -> Failure:
    culprits = {key: p for key, p in ranks.items() if not p.waiting} or ranks
    named = [
        f"rank {rank} on {host} is in {p.where} (after step {max(p.step, 0)}, "
        f"unmoved for {p.idle:.0f} s)"
        for (host, rank), p in sorted(culprits.items(), key=lambda item: item[0][1])
    ]
    waiting = len(ranks) - len(culprits)
    rest = f"; {waiting} others wait for it" if waiting else ""
    return Failure(ExitCode.CLUSTER, f"hung: {what}: {', '.join(named)}{rest}")
