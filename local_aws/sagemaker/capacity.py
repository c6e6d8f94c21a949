"""What the fleet does not give: instance types without capacity or quota, and a Spot market that
takes back.
"""

import difflib
import math
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from contracts.instances import INSTANCES


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
        """Let the next `count` (or all) requests for a type meet a shortage.

        Raises:
            ValueError: an unknown type, a count below 1, or a count of waits: a wait is not used
                up, it lasts until capacity is back.
        """
        if instance_type not in INSTANCES:
            near = difflib.get_close_matches(instance_type, INSTANCES, n=1, cutoff=0)
            raise ValueError(f"{instance_type} is no known instance type; did you mean {near[0]}?")
        if count is not None and shortage is Shortage.WAIT:
            raise ValueError("a shortage of kind wait takes no count; it lasts until it is ended")
        if count is not None and count < 1:
            raise ValueError(f"count {count}: give 1 or more, or none for no end")
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
            ValueError: a part that is not key=value, an unknown or missing key, or a value that
                is no number or out of range.
        """
        given: dict[str, str] = {}
        for part in text.replace(" ", "").split(","):
            key, equals, value = part.partition("=")
            if part and not equals:
                raise ValueError(
                    f"{part!r} is not a Spot market setting; write key=value, "
                    "for example seed=7,mean-minutes=2"
                )
            if part:
                given[key] = value
        known = {"seed", "mean-minutes", "notice", "hold"}
        if unknown := set(given) - known:
            raise ValueError(
                f"unknown Spot market setting {sorted(unknown)}; known: {sorted(known)}"
            )
        if missing := {"seed", "mean-minutes"} - set(given):
            raise ValueError(f"a Spot market needs {sorted(missing)}")
        if not given["seed"].removeprefix("-").isdecimal():
            raise ValueError(f"seed={given['seed']}: give a whole number")
        mean = _number(given, "mean-minutes")
        if mean <= 0:
            raise ValueError(f"mean-minutes={given['mean-minutes']}: give more than 0")
        notice, hold = _number(given, "notice", 0.5), _number(given, "hold", 2.0)
        if not 0 <= notice <= 1:
            raise ValueError(f"notice={given['notice']}: give a fraction from 0 to 1")
        if hold < 0:
            raise ValueError(f"hold={given['hold']}: give 0 seconds or more")
        return cls(seed=int(given["seed"]), mean_minutes=mean, notice=notice, hold_seconds=hold)

    def fate(self, job: str, incarnation: int) -> tuple[float, Interruption]:
        """Seconds of training until the reclaim, and what it is like."""
        draw = random.Random(f"{self.seed}:{job}:{incarnation}")
        seconds = draw.expovariate(1 / (60 * self.mean_minutes))
        return seconds, Interruption(draw.random() < self.notice, self.hold_seconds)


def _number(given: dict[str, str], key: str, default: float | None = None) -> float:
    if key not in given and default is not None:
        return default
    try:
        value = float(given[key])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{key}={given[key]}: give a number")
    return value
