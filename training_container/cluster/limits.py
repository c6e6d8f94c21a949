"""How long the hosts of a job wait for each other, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClusterLimits"]


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Nobody waits for ever: every wait in this package ends with one of these."""

    join: float = 900.0
    """From a host's start until all hosts are there: instances of a job come up minutes apart."""
    lost: float = 8.0
    """Without a sign of life, a host counts as lost. A partition heals within it or not at all."""
    idle: float = 1500.0
    """No rank's main thread has moved: less than the 30 minutes after which collectives time out,
    which cannot say who is to blame. Reward sources have deadlines of their own."""
    step: float = 14400.0
    """Least time that a step may take before it counts as hung; longer where steps are longer."""
    drain: float = 5.0
    """For uploads under way when a host was lost: its peers' checkpoint will stay incomplete."""
    uploads: float = 3900.0
    """For all hosts to finish their uploads after training has ended well."""

    @property
    def settle(self) -> float:
        """From the first sign of a failure that is a consequence (a broken connection) until it is
        taken for the cause: a host that was lost is found out before that."""
        return self.lost + 1.0
