"""Deleting checkpoints that nobody will resume from, planned anew from the listing each time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contracts.checkpoints import (
    CheckpointId,
    CheckpointReport,
    PrunePlan,
    complete_checkpoints,
    prune_plan,
)
from contracts.layout import StageLayout
from training_container.checkpoints.store import Store

__all__ = ["BestRule", "best_checkpoint", "prune"]


@dataclass(frozen=True, slots=True)
class BestRule:
    """`checkpoint.keep_best` of the run file."""

    metric: str
    mode: str

    def better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than


def best_checkpoint(reports: Iterable[CheckpointReport], rule: BestRule) -> CheckpointId | None:
    """The complete checkpoint whose flags state the best value; of equals the oldest."""
    best: tuple[float, CheckpointId] | None = None
    for report in sorted(reports, key=lambda item: item.id):
        value = report.flags[0].metrics.get(rule.metric) if report.complete else None
        if value is not None and (best is None or rule.better(value, best[0])):
            best = (value, report.id)
    return best[1] if best else None


def prune(
    store: Store,
    layout: StageLayout,
    *,
    keep: int,
    best: BestRule | None = None,
    pinned_steps: frozenset[int] = frozenset(),
) -> PrunePlan:
    """Delete what the plan names: all flags first, then data.

    Raises:
        StoreError: when S3 failed; what is left is planned again next time.
    """
    listing = store.listing(layout.checkpoints_prefix)
    reports = list(complete_checkpoints(layout, listing, store.read))
    plan = prune_plan(
        layout,
        listing,
        reports,
        keep=keep,
        best=best_checkpoint(reports, best) if best else None,
        pinned_steps=pinned_steps,
    )
    store.delete(plan.flags)
    store.delete(plan.data)
    return plan
