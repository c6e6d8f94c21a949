"""The ticket by which hosts of one incarnation find their leader: port, session and token, in S3.

The leader writes it once its Ray head listens. A restart in place leaves the ticket of the
incarnation before; a host that takes it is refused, since nobody accepts its token, and reads
again.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from json import dumps, loads

from contracts.layout import StageLayout
from training_container.checkpoints.store import Store

__all__ = ["Ticket", "publish_ticket", "read_ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """How to join one incarnation's cluster."""

    session: str
    """Unique per incarnation; the Ray namespace."""
    token: str
    """For Ray's token authentication; worth something only while this cluster lives, and only to
    who can reach it."""
    port: int

    def __repr__(self) -> str:
        return f"Ticket({self.session}, port {self.port})"  # the token stays out of logs

    @classmethod
    def mint(cls, port: int) -> Ticket:
        return cls(secrets.token_hex(8), secrets.token_hex(32), port)


def publish_ticket(store: Store, layout: StageLayout, attempt: int, ticket: Ticket) -> None:
    """Announce the cluster to the other hosts."""
    store.put(layout.cluster(attempt), dumps(asdict(ticket)).encode())


def read_ticket(store: Store, layout: StageLayout, attempt: int) -> Ticket | None:
    """The newest ticket of the attempt; None when there is none yet.

    Raises:
        StoreError: when S3 failed.
    """
    try:
        return Ticket(**loads(store.read(layout.cluster(attempt))))
    except KeyError:
        return None
