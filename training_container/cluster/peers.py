"""What a host asks of the others, and the answer where there are no others.

A container calls the same methods whether its job has one host or many: join, settle what the
leader chooses, look around while ranks run, and agree on what the job came to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from contracts.failures import Failure
from training_container.checkpoints.open import Agreement, Alone
from training_container.checkpoints.stop import StopSignal
from training_container.cluster.beacon import ProgressReader
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.stall import StallWatch

__all__ = ["OneHost", "Peers"]

T = TypeVar("T")
_LOOK_SECONDS = 1.0


class Peers(Protocol):
    """The hosts of a job, from one of them. Every host calls `join`, `settle` and the agreement's
    methods in the same order."""

    address: str
    """Where this host's ranks are reached."""
    interface: str
    """The network interface of ``address``."""
    agreement: Agreement

    def join(self) -> None:
        """Wait until all hosts are there.

        Raises:
            StageError: CLUSTER, naming those that never came.
        """

    def guard(self, output: Path) -> AbstractContextManager[None]:
        """While the block runs, leave at once when the job has failed elsewhere."""

    def settle(self, name: str, value: T) -> T:
        """The leader's ``value``, on every host."""

    def train(self, stop: StopSignal, progress: ProgressReader) -> None:
        """Ranks are about to start."""

    def look(self) -> Failure | None:
        """Called while ranks run: why they must end now, or None. Passes stop requests on."""

    def hurry(self) -> bool:
        """Whether a host is lost: what is still being uploaded here will stay incomplete."""

    def report(self, failure: Failure | None) -> None:
        """Tell the others how training ended here."""

    def outcome(self, failure: Failure | None) -> Failure | None:
        """How it ended for all: the same on every host. None may still be followed by publishing
        on the leader; the others wait for `announce`."""

    def announce(self, failure: Failure | None) -> None:
        """The leader's last word, and the others' farewell."""

    def close(self) -> None:
        """End whatever was started for this."""


class OneHost:
    """A job of one host: nothing to agree on, no Ray, only the watchdog."""

    address = "127.0.0.1"
    interface = "lo"

    def __init__(self, limits: ClusterLimits) -> None:
        self.agreement: Agreement = Alone()
        self._watch = StallWatch(limits)
        self._progress: ProgressReader | None = None
        self._next_look = 0.0

    def join(self) -> None:
        """Already complete."""

    @contextmanager
    def guard(self, output: Path) -> Iterator[None]:  # noqa: ARG002 - `Peers`
        yield

    def settle(self, name: str, value: T) -> T:  # noqa: ARG002 - `Peers`
        return value

    def train(self, stop: StopSignal, progress: ProgressReader) -> None:  # noqa: ARG002 - `Peers`
        self._progress = progress

    def look(self) -> Failure | None:
        assert self._progress is not None
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        return self._watch.look({"this host": self._progress.read(now)}, now)

    def hurry(self) -> bool:
        return False

    def report(self, failure: Failure | None) -> None:
        """Nobody else wants to know."""

    def outcome(self, failure: Failure | None) -> Failure | None:
        return failure

    def announce(self, failure: Failure | None) -> None:
        """Nobody else wants to know."""

    def close(self) -> None:
        """Nothing was started."""
