"""The table that all hosts of a job share: one row per host, written by that host alone.

Everything that hosts tell each other is in it: choices, progress, stop requests, failures, the
verdict. It lives in one Ray actor on the leader; each host's link sends its row and gets the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from contracts.failures import ExitCode, Failure

__all__ = ["Board", "Node", "Phase", "RankProgress", "Row", "Table", "missing_hosts"]


class Phase:
    """Where a host is."""

    JOINING, TRAINING, DONE, LEFT = "joining", "training", "done", "left"


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank as its host sees it."""

    rank: int
    step: int
    """Last finished step; -1 before the first of this incarnation."""
    idle: float
    """Seconds since its main thread was last seen to move."""
    waiting: bool
    """Its main thread is in a collective: it waits for its peers."""
    where: str
    """Innermost function of ours that it is in."""
    last: bool = False
    """The last step is done; what remains is the export."""


@dataclass(slots=True)
class Row:
    """One host."""

    host_rank: int
    host: str
    address: str
    ranks: int
    gpus: int
    phase: str = Phase.JOINING
    posts: dict[str, Any] = field(default_factory=dict)
    """Named values that other hosts wait for."""
    progress: list[RankProgress] = field(default_factory=list)
    stop: bool = False
    """SIGTERM has come here."""
    failure: tuple[int, str] | None = None
    """Exit code and cause of what went wrong here."""
    verdict: tuple[int, str] | None = None
    """The leader's: what the job came to; code 0 is success."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        progress = [RankProgress(**entry) for entry in values["progress"]]
        return cls(**{**values, "progress": progress})

    @property
    def failed(self) -> Failure | None:
        return None if self.failure is None else Failure(ExitCode(self.failure[0]), self.failure[1])

    @property
    def name(self) -> str:
        return f"host {self.host_rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as Ray's own membership has it."""

    address: str
    alive: bool
    host_ranks: tuple[int, ...]
    """From the node's resource labels."""
    gpus: int


@dataclass(frozen=True, slots=True)
class Table:
    """All rows that have arrived, and the seconds since each was last heard of."""

    at: float
    """When this host's link got it (CLOCK_MONOTONIC, which all processes of a host share)."""
    rows: Mapping[int, Row]
    ages: Mapping[int, float]
    nodes: Sequence[Node] = ()
    """Asked for by the leader's link only."""

    @property
    def leader(self) -> Row | None:
        return self.rows.get(0)

    @property
    def stop(self) -> bool:
        return any(row.stop for row in self.rows.values())

    def posted(self, name: str) -> dict[int, Any]:
        """Values posted under ``name`` by host rank."""
        return {r: row.posts[name] for r, row in self.rows.items() if name in row.posts}

    def to_json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "rows": {str(rank): row.to_json() for rank, row in self.rows.items()},
            "ages": {str(rank): age for rank, age in self.ages.items()},
            "nodes": [asdict(node) for node in self.nodes],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Table:
        return cls(
            at=values["at"],
            rows={int(rank): Row.from_json(row) for rank, row in values["rows"].items()},
            ages={int(rank): float(age) for rank, age in values["ages"].items()},
            nodes=[Node(**{**n, "host_ranks": tuple(n["host_ranks"])}) for n in values["nodes"]],
        )


class Board:
    """The actor's class. Ages are measured by its own clock, so hosts' clocks need not agree."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, float] = {}

    def sync(self, host_rank: int, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Take one host's row; all rows and their ages."""
        now = self._clock()
        self._rows[str(host_rank)] = row
        self._heard[str(host_rank)] = now
        return self._rows, {rank: now - heard for rank, heard in self._heard.items()}


def missing_hosts(table: Table | None, hosts: Sequence[str], *, ranks: int, gpus: int) -> list[str]:
    """What is still missing for the job's hosts to be one cluster of equal hosts; empty when
    nothing is.

    A host counts once its row has arrived and Ray has an *alive* node that bears its label: a
    number of nodes alone says neither (dead ones are listed too) nor which.
    """
    if table is None:
        return ["all: Ray is not up on the leader itself"]
    found = []
    for rank, host in enumerate(hosts):
        row = table.rows.get(rank)
        nodes = [node for node in table.nodes if node.alive and rank in node.host_ranks]
        if row is None or not nodes:
            found.append(f"{host}: {'no alive Ray node' if row else 'never came'}")
        elif row.host != host:
            found.append(f"{host}: came as {row.host}")
        elif (row.ranks, nodes[0].gpus) != (ranks, gpus):
            found.append(
                f"{host}: {row.ranks} ranks and {nodes[0].gpus} GPUs, not {ranks} and {gpus}"
            )
    return found
