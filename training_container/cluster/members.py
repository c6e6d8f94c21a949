"""The Ray processes of one host: started as children of its supervisor, ended by their pids."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from contracts.failures import ExitCode
from training_container.cluster.addresses import Ports, reachable
from training_container.cluster.link import LinkConfig
from training_container.cluster.node import head_command, node_environment, worker_command
from training_container.cluster.table import Row, Table
from training_container.cluster.ticket import Ticket
from training_container.failure import StageError, write_atomically
from training_container.supervisor import Child, Supervisor

__all__ = ["Member"]

_POLL_SECONDS = 0.1
_TAIL = 300


class Member:
    """One host's `ray start` and link, of one try to join. A try that fails leaves nothing."""

    def __init__(
        self, supervisor: Supervisor, environ: Mapping[str, str], work: Path, *, lost_seconds: float
    ) -> None:
        self._supervisor, self._environ = supervisor, environ
        self._lost_seconds = lost_seconds
        # A short path: Ray puts Unix sockets below it, whose names end at 107 characters.
        self._temp = Path("/tmp") / f"{work.name}-ray"
        self._folder = work / "cluster"
        self._folder.mkdir()
        self._row, self._table = self._folder / "row.json", self._folder / "table.json"
        self._node_log, self._link_log = self._folder / "ray.log", self._folder / "link.log"
        self._node: Child | None = None
        self._link: Child | None = None

    def start_head(self, row: Row, deadline: float) -> Ticket:
        """Start the cluster and this host's link; how others join it.

        Raises:
            StageError: CLUSTER when the head does not come up, with what Ray said.
        """
        ports = Ports.of(row.address)
        ticket = Ticket.mint(ports.head)
        self._start_node(head_command(0, row.address, ports, self._fresh(), row.gpus), ticket)
        while not reachable(row.address, ticket.port):
            self._supervisor.poll()
            if self.trouble() or time.monotonic() > deadline:
                said = _tail(self._node_log)
                raise StageError(ExitCode.CLUSTER, f"the Ray head did not start: {said}")
            time.sleep(_POLL_SECONDS)
        self._start_link(row, f"{row.address}:{ticket.port}", ticket)
        return ticket

    def start_worker(self, row: Row, head: str, ticket: Ticket) -> None:
        """Join the cluster at ``head`` (`address:port`)."""
        ports = Ports.of(row.address)
        command = worker_command(
            row.host_rank, row.address, ports, self._fresh(), row.gpus, head=head
        )
        self._start_node(command, ticket)
        self._start_link(row, head, ticket)

    def write(self, row: Row) -> None:
        """What the link sends from now on."""
        write_atomically(self._row, json.dumps(row.to_json()).encode())

    def table(self) -> Table | None:
        """What the link brought last."""
        try:
            return Table.from_json(json.loads(self._table.read_text()))
        except FileNotFoundError:
            return None

    def trouble(self) -> str | None:
        """What has ended that must not."""
        for child in (self._node, self._link):
            if child is not None and not child.running:
                log = self._node_log if child is self._node else self._link_log
                return f"{child.name} ended with {child.code}: {_tail(log)}"
        return None

    def stop(self) -> None:
        """End both and remove what Ray wrote.

        SIGKILL: an orderly end would wait for peers that may be gone, and nothing of Ray's is kept.
        Its daemons outlive a `ray start` that fails half-way, as orphans of this process.
        """
        self._supervisor.kill([child for child in (self._link, self._node) if child is not None])
        self._node = self._link = None
        for process in psutil.Process().children(recursive=True):
            try:
                if any(str(self._temp) in word for word in process.cmdline()):
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        self._supervisor.poll()
        self._table.unlink(missing_ok=True)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _fresh(self) -> Path:
        shutil.rmtree(self._temp, ignore_errors=True)
        self._temp.mkdir(mode=0o700)
        return self._temp

    def _start_node(self, command: list[str], ticket: Ticket) -> None:
        self._node = self._start("this host's Ray node", self._node_log, command, ticket)

    def _start(self, name: str, log: Path, command: list[str], ticket: Ticket) -> Child:
        """What Ray prints goes to a file: it would bury the job's own log."""
        wrapper = [sys.executable, "-m", "training_container.cluster.node", str(log), "--"]
        environ = node_environment(self._environ, ticket.token)
        return self._supervisor.start(name, [*wrapper, *command], environ)

    def _start_link(self, row: Row, head: str, ticket: Ticket) -> None:
        config = LinkConfig(
            address=head,
            session=ticket.session,
            host_rank=row.host_rank,
            lost_seconds=self._lost_seconds,
            row=str(self._row),
            table=str(self._table),
        )
        path = self._folder / "link.json"
        config.write(path)
        self.write(row)
        command = [sys.executable, "-m", "training_container.cluster.link", str(path)]
        self._link = self._start("this host's link", self._link_log, command, ticket)


def _tail(log: Path) -> str:
    """The last that a process said."""
    said = " ".join(log.read_text(errors="replace").split()) if log.exists() else ""
    return said[-_TAIL:] or "it said nothing"
