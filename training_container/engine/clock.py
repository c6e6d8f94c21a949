"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up wall-clock time by phase name."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as ``name``."""
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>` and `seconds/step`."""
        return {
            **{f"seconds/{name}": seconds for name, seconds in self._seconds.items()},
            "seconds/step": self.total,
        }
