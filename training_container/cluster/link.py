"""The host's link to the table: a process of its own, the only one of ours that speaks Ray.

It sends the host's row and brings the table back, some times a second, by way of two files that
are replaced whole. When the table cannot be reached for too long it ends: the leader is lost. Ray
ends a driver whose head is gone from C++, without an exception; that comes to the same.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_container.cluster.table import Board, Node, Row, Table
from training_container.failure import write_atomically

__all__ = ["LinkConfig", "main"]

log = logging.getLogger("grpohub.link")

_EVERY_SECONDS = 0.25
_NODES_SECONDS = 1.0
_CALL_SECONDS = 2.0
_BOARD = "board"
_LABEL = "host:"


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Travels as one JSON file."""

    address: str
    """`address:port` of the Ray head."""
    session: str
    host_rank: int
    lost_seconds: float
    row: str
    """Written by the host."""
    table: str
    """Written by the link."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> LinkConfig:
        return cls(**json.loads(path.read_text()))


class Link:
    """One host's exchange with the board."""

    def __init__(self, config: LinkConfig, board: Any) -> None:
        self._config, self._board = config, board
        self._nodes: list[Node] = []
        self._nodes_at = 0.0

    def exchange(self, *, seconds: float | None = _CALL_SECONDS) -> None:
        """Send the row, write the table; wait ``seconds`` for the board's answer.

        Raises:
            ray.exceptions.RayError: when the board does not answer.
        """
        import ray

        row = json.loads(Path(self._config.row).read_text())
        call = self._board.sync.remote(self._config.host_rank, row)
        rows, ages = ray.get(call, timeout=seconds)
        now = time.monotonic()
        if self._config.host_rank == 0 and now - self._nodes_at > _NODES_SECONDS:
            self._nodes, self._nodes_at = _nodes(ray.nodes()), now
        table = Table(
            at=now,
            rows={int(rank): Row.from_json(values) for rank, values in rows.items()},
            ages={int(rank): age for rank, age in ages.items()},
            nodes=self._nodes,
        )
        write_atomically(Path(self._config.table), json.dumps(table.to_json()).encode())

    def run(self) -> None:
        """Exchange until the board has been away for too long."""
        from ray.exceptions import RayError

        # The first answer waits for the actor's process; the host bounds that by its own deadline.
        self.exchange(seconds=None)
        heard = time.monotonic()
        while True:
            try:
                self.exchange()
                heard = time.monotonic()
            except RayError as error:
                if time.monotonic() - heard > self._config.lost_seconds:
                    log.error("the table is out of reach: %s", error)
                    return
            time.sleep(_EVERY_SECONDS)


def _nodes(listed: list[dict[str, Any]]) -> list[Node]:
    found = []
    for node in listed:
        resources = node["Resources"]
        ranks = [int(n.removeprefix(_LABEL)) for n in resources if n.startswith(_LABEL)]
        gpus = int(resources.get("GPU", 0))
        found.append(Node(node["NodeManagerAddress"], node["Alive"], tuple(ranks), gpus))
    return found


def _connect(config: LinkConfig) -> Any:
    """The board: made by the leader on its own node, found by the others.

    An actor lives as long as the driver that made it, so the leader's end is the table's.
    """
    import ray

    ray.init(
        address=config.address,
        namespace=config.session,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    if config.host_rank == 0:
        here = {f"{_LABEL}0": 0.01}
        return ray.remote(Board).options(name=_BOARD, num_cpus=0, resources=here).remote()
    while True:
        try:
            return ray.get_actor(_BOARD)
        except ValueError:  # not made yet; the host's deadline ends this process
            time.sleep(_EVERY_SECONDS)


def main(argv: list[str]) -> None:
    """`python -m training_container.cluster.link <config file>`; never ends well."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = LinkConfig.load(Path(argv[0]))
    Link(config, _connect(config)).run()
    # At once: an orderly shutdown would wait for a head that is gone.
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
