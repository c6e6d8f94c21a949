"""Records as the API shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from contracts.api import (
    AttemptView,
    CheckpointView,
    EndpointView,
    ModelView,
    ProblemView,
    RunSummary,
    RunView,
    SmokeTestView,
    StageView,
    TimelineEntry,
)
from contracts.checkpoints import CheckpointReport
from contracts.problems import Problem
from lambdas.errors import ObjectMissingError
from lambdas.logic.folder import RunFolder
from lambdas.logic.records import (
    AttemptRecord,
    EndpointRecord,
    RunRecord,
    StageRecord,
    TimelineRecord,
)

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["attempt_view", "checkpoint_view", "endpoint_view", "problem_view", "run_summary",
           "run_view", "timeline_entry"]  # fmt: skip


def run_summary(run: RunRecord) -> RunSummary:
    """A run in a list."""
    return RunSummary(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        reason=run.reason,
        created_at=run.created_at,
        updated_at=run.updated_at,
        endpoint_name=run.endpoint_name,
    )


def run_view(hub: Hub, folder: RunFolder) -> RunView:
    """A run in full."""
    run = folder.run
    published = run.published
    return RunView(
        **run_summary(run).model_dump(),
        stages=[_stage_view(stage) for stage in folder.stages],
        model=ModelView(
            uri=published.uri,
            version=published.version,
            stage=published.stage,
            step=published.step,
            size=published.size,
        )
        if published
        else None,
        smoke_test=_smoke_test(hub, run),
        execution_arn=run.execution_arn,
        source=run.source,
        spec=hub.bucket.read_json(run.layout.spec),
    )


def attempt_view(attempt: AttemptRecord) -> AttemptView:
    """An attempt."""
    training, billable = attempt.training_seconds, attempt.billable_seconds
    known = attempt.spot and training and billable is not None
    return AttemptView(
        stage_index=attempt.stage_index,
        stage=attempt.stage,
        attempt=attempt.number,
        job_name=attempt.job_name,
        state=attempt.state,
        outcome=attempt.outcome,
        reason=attempt.alarm or attempt.reason,
        instance_type=attempt.instance_type,
        instance_count=attempt.instance_count,
        spot=attempt.spot,
        secondary_status=attempt.secondary_status,
        interruptions=attempt.interruptions,
        resumed_from_step=attempt.resume_floor.step if attempt.resume_floor else None,
        newest_checkpoint_step=attempt.newest_step,
        planned_at=attempt.planned_at,
        submitted_at=attempt.submitted_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        training_seconds=training,
        billable_seconds=billable,
        spot_savings=1 - billable / training
        if known and billable is not None and training
        else None,
    )


def checkpoint_view(stage: StageRecord, report: CheckpointReport) -> CheckpointView:
    """A checkpoint as its flags tell."""
    first = report.flags[0] if report.flags else None
    return CheckpointView(
        stage_index=stage.index,
        stage=stage.name,
        step=report.id.step,
        generation=report.id.generation,
        complete=report.complete,
        reasons=list(report.reasons),
        attempt=first.attempt if first else None,
        num_hosts=first.num_hosts if first else None,
        size=report.size,
        metrics=dict(first.metrics) if first else {},
    )


def endpoint_view(row: EndpointRecord) -> EndpointView:
    """An endpoint."""
    return EndpointView(
        name=row.name,
        state=row.state,
        run_id=row.run_id,
        model_version=row.model_version,
        instance_type=row.instance_type,
        instance_count=row.instance_count,
        created_at=row.created_at,
        updated_at=row.updated_at,
        idle_ttl_hours=row.idle_ttl_hours,
        reason=row.reason,
        inference_component=row.serving_component,
    )


def timeline_entry(record: TimelineRecord) -> TimelineEntry:
    """A timeline entry."""
    return TimelineEntry(
        time=record.time,
        kind=record.kind,
        text=record.text,
        stage_index=record.stage_index,
        attempt=record.attempt,
        step=record.step,
    )


def problem_view(problem: Problem) -> ProblemView:
    """A problem, in the words that every part of the hub uses."""
    return ProblemView(**problem.as_dict())


def _stage_view(stage: StageRecord) -> StageView:
    return StageView(
        index=stage.index,
        name=stage.name,
        method=stage.method,
        state=stage.state,
        attempts=stage.attempts,
        step=stage.newest_step,
        max_steps=stage.max_steps,
    )


def _smoke_test(hub: Hub, run: RunRecord) -> SmokeTestView | None:
    if run.endpoint_name is None:
        return None
    try:
        return SmokeTestView.model_validate_json(hub.bucket.read(run.layout.smoke_test))
    except (ObjectMissingError, ValidationError):  # None yet, or written by an older version.
        return None
