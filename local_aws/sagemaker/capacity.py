"""What the fleet does not give: instance types without capacity or quota, and a Spot market that
takes back.
"""

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Shortage(StrEnum):
    """How a lack of instances shows itself."""

    CAPACITY = "capacity"  # the job starts and fails with CapacityError
    WAIT = "wait"  # the job stays Pending until MaxWait
    QUOTA = "quota"  # CreateTrainingJob itself is refused


@dataclass
class Capacity:
    """Shortages by instance type; `left` counts down the failures still to come, None for no
    end.
    """

    shortages: dict[str, tuple[Shortage, int | None]] = field(default_factory=dict)

    def fail(self, instance_type: str, shortage: Shortage, count: int | None = None) -> None:
        """Let the next `count` (or all) requests for a type meet a shortage."""
        self.shortages[instance_type] = (shortage, count)

    def restore(self, instance_type: str) -> None:
        """End a type's shortage."""
        self.shortages.pop(instance_type, None)

    def waits(self, instance_type: str) -> bool:
        """Whether requests for this type are kept waiting now."""
        return self.shortages.get(instance_type, (None, None))[0] is Shortage.WAIT

    def take(self, instance_type: str, shortage: Shortage) -> bool:
        """Whether this request meets the shortage; each call uses up one of its count."""
        kind, left = self.shortages.get(instance_type, (None, None))
        if kind is not shortage:
            return False
        if left is not None:
            if left <= 1:
                self.restore(instance_type)
            else:
                self.shortages[instance_type] = (kind, left - 1)
        return True


@dataclass(frozen=True)
class Interruption:
    """One reclaim: with notice SIGTERM comes first, without it SIGKILL. Capacity is away for
    `hold_seconds`.
    """

    with_notice: bool = True
    hold_seconds: float = 2.0


@dataclass(frozen=True)
class SpotMarket:
    """A seeded market: each incarnation of a Spot job is reclaimed after an exponentially
    distributed time.

    Times are of the wall clock. A job's fate depends on the seed, its name and the incarnation
    only.
    """

    seed: int
    mean_minutes: float
    notice: float = 0.5
    hold_seconds: float = 2.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `seed=7,mean-minutes=2`, optionally with `notice=0.5` (a fraction) and `hold=2`
        (seconds).

        Raises:
            ValueError: an unknown or missing key.
        """
        given = dict(part.split("=", 1) for part in text.replace(" ", "").split(",") if part)
        known = {"seed", "mean-minutes", "notice", "hold"}
        if unknown := set(given) - known:
            raise ValueError(
                f"unknown Spot market setting {sorted(unknown)}; known: {sorted(known)}"
            )
        if missing := {"seed", "mean-minutes"} - set(given):
            raise ValueError(f"a Spot market needs {sorted(missing)}")
        return cls(
            seed=int(given["seed"]),
            mean_minutes=float(given["mean-minutes"]),
            notice=float(given.get("notice", 0.5)),
            hold_seconds=float(given.get("hold", 2.0)),
        )

    def fate(self, job: str, incarnation: int) -> tuple[float, Interruption]:
        """Seconds of training until the reclaim, and what it is like."""
        draw = random.Random(f"{self.seed}:{job}:{incarnation}")
        seconds = draw.expovariate(1 / (60 * self.mean_minutes))
        return seconds, Interruption(draw.random() < self.notice, self.hold_seconds)
