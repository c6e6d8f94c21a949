"""Training jobs of this stack that no live attempt stands behind: they cost money and nobody reads
them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import TYPE_CHECKING

from contracts.layout import parse_job_name
from contracts.states import AttemptState
from lambdas.logic.notes import note_attempt
from lambdas.observability import bind, count, logger

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["stop_orphans"]


def stop_orphans(hub: Hub, stack: str, known: Collection[str]) -> list[str]:
    """Stop running jobs that carry this stack's tag but whose attempt has no row, or has ended.

    An attempt's row is written before its job is made, and the jobs are listed before rows are
    read: a job that is only just being submitted always has its row.

    Args:
        hub: adapters.
        stack: value of the tag that marks this stack's jobs.
        known: names of jobs that the reconciler looks at anyway.

    Returns:
        Names of the jobs that were stopped.
    """
    stopped: list[str] = []
    for name in hub.jobs.in_progress():
        coordinates = parse_job_name(name)
        if coordinates is None or name in known:
            continue
        run_id, stage_index, number = coordinates
        folder = hub.table.load(run_id)
        attempt = folder.attempt(stage_index, number) if folder else None
        if attempt is not None and attempt.state is not AttemptState.ENDED:
            continue
        # ListTrainingJobs may lag behind; only DescribeTrainingJob is asked whether it lives.
        seen = hub.jobs.describe(name)
        if seen is None or seen.status != "InProgress":
            continue
        if hub.jobs.tags(seen.arn).get("grpohub:stack") != stack:
            continue
        hub.jobs.stop(name)
        bind(run_id, attempt.stage if attempt else None, number)
        logger.error("stopped a job that belongs to no attempt", extra={"job_name": name})
        count("OrphanedJobs")
        if attempt is not None:
            text = f"{name} ran although the attempt has ended, and was stopped"
            note_attempt(hub, attempt, "attempt.orphan_stopped", text, time=dt.datetime.now(dt.UTC))
        stopped.append(name)
    return stopped
