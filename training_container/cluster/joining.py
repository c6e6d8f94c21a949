"""How the hosts of a job meet: the leader starts the cluster and waits for all, the others try
tickets until one lets them in. Hosts start in any order, minutes apart; both sides have a deadline.
"""

from __future__ import annotations

import logging
import time

from contracts.failures import ExitCode
from contracts.layout import StageLayout
from training_container.checkpoints.store import Store
from training_container.cluster.addresses import reachable, resolve
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.members import Member
from training_container.cluster.table import missing_hosts
from training_container.cluster.ticket import Ticket, publish_ticket, read_ticket
from training_container.cluster.view import View
from training_container.failure import StageError
from training_container.supervisor import Supervisor

__all__ = ["Joining"]

log = logging.getLogger("grpohub.cluster")

_POLL_SECONDS = 0.1
_TICKET_SECONDS = 1.0
_ASSEMBLED = "assembled"


class Joining:
    """One host's way into the cluster of one attempt."""

    def __init__(
        self,
        view: View,
        member: Member,
        store: Store,
        layout: StageLayout,
        attempt: int,
        *,
        supervisor: Supervisor,
        limits: ClusterLimits,
    ) -> None:
        self._view, self._member = view, member
        self._store, self._layout, self._attempt = store, layout, attempt
        self._supervisor, self._limits = supervisor, limits
        self._deadline = 0.0

    def join(self) -> None:
        """Wait until all hosts are there.

        Raises:
            StageError: CLUSTER, naming those that never came.
        """
        self._deadline = time.monotonic() + self._limits.join
        if self._view.leads:
            self._lead()
        else:
            self._follow()
        log.info("all %d hosts are there", len(self._view.hosts))

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _lead(self) -> None:
        self._announce_cluster()
        while True:
            self._view.read()
            missing = self._missing()
            if not missing:
                break
            if (problem := self._member.trouble()) and not self._late:
                log.warning("%s; starting the cluster again", problem)
                self._member.stop()
                self._announce_cluster()
            if self._late:
                waited = f"after {self._limits.join:.0f} s"
                raise StageError(
                    ExitCode.CLUSTER, f"{waited}, hosts are missing: {'; '.join(missing)}"
                )
            time.sleep(_POLL_SECONDS)
        self._view.post(_ASSEMBLED, True)

    def _announce_cluster(self) -> None:
        ticket = self._member.start_head(self._view.row, self._deadline)
        publish_ticket(self._store, self._layout, self._attempt, ticket)
        log.info("waiting for %d hosts, session %s", len(self._view.hosts), ticket.session)

    def _missing(self) -> list[str]:
        view = self._view
        return missing_hosts(view.table, view.hosts, ranks=view.row.ranks, gpus=view.row.gpus)

    def _follow(self) -> None:
        """Try tickets until one lets this host in: the first may be of a past incarnation."""
        leader, seen = self._view.hosts[0], "has not announced itself"
        while True:
            ticket = self._ticket()
            if ticket is not None:
                address = resolve(leader, self._deadline, turn=self._supervisor.poll)
                seen = f"announced {address}:{ticket.port}, where nothing answers"
                if reachable(address, ticket.port):
                    seen = f"at {address}:{ticket.port} did not let this host in"
                    if self._try(ticket, f"{address}:{ticket.port}"):
                        return
            if self._late:
                raise StageError(
                    ExitCode.CLUSTER, f"the leader {leader} {seen} in {self._limits.join:.0f} s"
                )
            self._supervisor.poll()
            time.sleep(_TICKET_SECONDS)

    def _try(self, ticket: Ticket, head: str) -> bool:
        """Join with ``ticket``; False when it was refused or replaced meanwhile."""
        view = self._view
        self._member.start_worker(view.row, head, ticket)
        asked = time.monotonic()
        while not self._late:
            table = view.read()
            if table is not None and table.posted(_ASSEMBLED):
                return True
            if failure := view.failure_from_leader():
                raise view.adopt(failure)
            if problem := self._member.trouble():
                log.warning("%s; asking for the ticket again", problem)
                break
            if table is None and time.monotonic() - asked > _TICKET_SECONDS:
                asked = time.monotonic()
                if self._ticket() != ticket:
                    log.warning("the leader has a new ticket; joining anew")
                    break
            time.sleep(_POLL_SECONDS)
        self._member.stop()
        view.table = None
        return False

    def _ticket(self) -> Ticket | None:
        return read_ticket(self._store, self._layout, self._attempt)
