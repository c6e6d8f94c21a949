"""When to save and when to stop: one pure decision, taken from what all ranks know at a step's end.

Ranks exchange `Facts` after every step and each computes the same `Verdict`, so that no rank ever
waits in a collective that another one skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

__all__ = ["Facts", "Interval", "Verdict", "decide"]

MAX_BACKLOG = 2
"""Finished steps that may wait for their upload before interval saves pause: bounds the disk."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank knows at the end of a step. Numbers only: they travel as one float64 vector."""

    writing: bool = False
    """An earlier save of this rank is not yet on the local disk."""
    backlog: int = 0
    """Saved steps of this host that wait for their upload."""
    stop_seconds: float = -1.0
    """Seconds left since SIGTERM; negative without one."""
    save_seconds: float = 0.0
    """What a save and its upload take by measurement."""
    fenced_by: int = 0
    """A newer attempt, seen in control.json."""
    due: bool = False
    """Leader: the interval is over."""
    requested: bool = False
    """Leader: control.json asks for a checkpoint."""
    stop_after: bool = False
    """Leader: control.json asks to stop after a checkpoint."""

    def vector(self) -> list[float]:
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> Facts:
        kinds = {"bool": bool, "int": int, "float": float}
        parts = zip(fields(cls), vector, strict=True)
        return cls(**{field.name: kinds[str(field.type)](value) for field, value in parts})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do after this step."""

    save: bool = False
    wait: bool = False
    """Wait until the earlier save is written and the backlog has room."""
    stop: bool = False
    fenced_by: int = 0


def decide(facts: Sequence[Facts], *, must_save: bool, best: bool) -> Verdict:
    """The verdict on a step, from the facts of all ranks (index = rank, 0 leads).

    ``must_save``: the last step, or one that a later stage starts from. ``best``: a new best.

    | situation | save | stop |
    |---|---|---|
    | fenced | no | the caller raises |
    | last or pinned step | yes, waiting for room | |
    | SIGTERM | if it fits the time left | yes |
    | stop after checkpoint | yes, waiting for room | yes |
    | requested, due, or a new best | yes, if nothing is being written and there is room | no |
    """
    leader = facts[0]
    fence = max(fact.fenced_by for fact in facts)
    if fence:
        return Verdict(fenced_by=fence)
    busy = any(fact.writing for fact in facts) or any(f.backlog >= MAX_BACKLOG for f in facts)
    left = [fact.stop_seconds for fact in facts if fact.stop_seconds >= 0]
    if left:
        fits = max(fact.save_seconds for fact in facts) < min(left)
        writing = any(fact.writing for fact in facts)
        return Verdict(save=fits and (must_save or not writing), wait=must_save, stop=True)
    if must_save:
        return Verdict(save=True, wait=True, stop=leader.stop_after)
    if leader.stop_after:
        return Verdict(save=True, wait=True, stop=True)
    return Verdict(save=(leader.due or leader.requested or best) and not busy)


class Interval:
    """Time between saves, kept below ``seconds`` by looking one step ahead.

    A step longer than the interval is saved every time. ``clock`` counts seconds.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self._last_save = now
        self._step_seconds = 0.0

    def due(self, now: float, step_seconds: float) -> bool:
        """Whether waiting for one more step would exceed the interval."""
        # The newest step counts as much as all before, for step time drifts with answer length;
        # the longer of the two is expected next.
        known = self._step_seconds
        self._step_seconds = step_seconds if known == 0 else (known + step_seconds) / 2
        expected = max(step_seconds, self._step_seconds)
        return now - self._last_save + expected > self.seconds

    def saved(self, now: float) -> None:
        self._last_save = now
