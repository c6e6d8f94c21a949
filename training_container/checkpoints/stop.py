"""The stop request: SIGTERM, and how long is left after it."""

from __future__ import annotations

import signal
import time
from types import FrameType

__all__ = ["GRACE_SECONDS", "StopSignal"]

GRACE_SECONDS = 120.0
"""SageMaker stops a container with `docker stop -t 120`; a Spot reclaim may give less, or
nothing.
"""


class StopSignal:
    """Remembers the first SIGTERM. Until then nothing happens; afterwards the clock runs.

    ``reserve_seconds`` of the grace are kept for the uploader and for leaving in order.
    """

    def __init__(
        self, *, grace_seconds: float = GRACE_SECONDS, reserve_seconds: float = 15.0
    ) -> None:
        self._grace, self._reserve = grace_seconds, reserve_seconds
        self._at: float | None = None

    def install(self) -> None:
        """Handle SIGTERM in this process (main thread only)."""
        signal.signal(signal.SIGTERM, self._handle)

    def trigger(self) -> None:
        if self._at is None:
            self._at = time.monotonic()

    @property
    def requested(self) -> bool:
        return self._at is not None

    def seconds_left(self) -> float:
        """Seconds left to act in, at least 0; negative when no stop is asked for."""
        if self._at is None:
            return -1.0
        return max(0.0, self.grace_left() - self._reserve)

    def grace_left(self) -> float:
        """Seconds until SIGKILL is to be expected; the whole grace when no stop is asked for."""
        return self._grace - (time.monotonic() - self._at if self._at is not None else 0.0)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.trigger()
