"""What the table holds, as frozen records. The adapter turns items into these and back; nothing
else sees items."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from enum import StrEnum

from contracts.attempt import CheckpointRef, WeightsFrom
from contracts.layout import RunLayout, StageLayout
from contracts.states import AttemptState, EndpointState, Outcome, RunState, StageState

__all__ = [
    "AttemptRecord",
    "EndpointRecord",
    "InstanceOwner",
    "PublishedModel",
    "RunRecord",
    "StageRecord",
    "StopReason",
    "TimelineRecord",
]


class StopReason(StrEnum):
    """Why *we* stopped a training job. Stopped/Stopped without one was somebody else."""

    MOVED = "moved"
    """No instances within the time allowed: it goes on elsewhere."""
    CANCELLED = "cancelled"
    """The user cancelled the run, or the run failed meanwhile."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The model that a run ended with."""

    uri: str
    version: str
    stage: str
    step: int
    size: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run."""

    run_id: str
    name: str
    state: RunState
    created_at: dt.datetime
    updated_at: dt.datetime
    spec_sha256: str
    source: str
    """`api`, or the S3 object that started it."""
    model_uri: str | None = None
    """S3 prefix of the base model; None when the source is a hub id."""
    reason: str | None = None
    """Why it waits, in one sentence."""
    error: str | None = None
    """Name of the failure the execution ends with."""
    cause: str | None = None
    execution_arn: str | None = None
    executions: int = 0
    """Executions begun after the first (resumed or deployed later)."""
    redrives: int = 0
    """Redrives of the present execution that were seen."""
    budget_since: dt.datetime | None = None
    """When waiting began to count: the first plan, or the first after a resume."""
    inputs_bytes: dict[str, int] = field(default_factory=dict)
    """Input address to its size, from the check before the first attempt."""
    published: PublishedModel | None = None
    endpoint_name: str | None = None
    deploy_override: str | None = None
    """JSON of a `deploy` section given later than the run file."""

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run_id)


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of a run."""

    run_id: str
    index: int
    name: str
    method: str
    state: StageState
    max_steps: int | None
    attempts: int = 0
    """Number of the latest attempt."""
    budget_from: int = 0
    """Attempts up to this number do not count against budgets any more (resumed or redriven)."""
    newest_step: int | None = None
    """Step of the newest checkpoint known to be complete."""
    newest_generation: str | None = None
    weights_from: WeightsFrom | None = None

    @property
    def layout(self) -> StageLayout:
        return RunLayout(self.run_id).stage(self.index, self.name)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One training job of a stage."""

    run_id: str
    stage_index: int
    stage: str
    number: int
    job_name: str
    state: AttemptState
    planned_at: dt.datetime
    rung: int
    """Index in the capacity ladder."""
    instance_type: str
    instance_count: int
    spot: bool
    max_runtime_seconds: int
    max_wait_seconds: int | None
    pause_seconds: int = 0
    """Pause before it is submitted."""
    resume_floor: CheckpointRef | None = None
    token: str | None = None
    settled: bool = False
    """The execution has been told the outcome, or no longer wants to know."""
    outcome: Outcome | None = None
    reason: str | None = None
    stop_reason: StopReason | None = None
    secondary_status: str | None = None
    interruptions: int = 0
    submitted_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    training_seconds: int | None = None
    billable_seconds: int | None = None
    newest_step: int | None = None
    """Step of the newest complete checkpoint that this attempt wrote."""
    last_step: int | None = None
    """Last step it reported."""
    alarm: str | None = None
    """What a person should look at."""
    failure_code: str | None = None
    """Exit code name of our own container, such as `out_of_memory`."""


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """One endpoint."""

    name: str
    run_id: str
    state: EndpointState
    created_at: dt.datetime
    updated_at: dt.datetime
    model_version: str
    model_name: str
    config_name: str
    instance_type: str
    instance_count: int
    rung: int = 0
    """Index in [instance_type, *fallback_instance_types] of the run's deploy section."""
    previous_config: str | None = None
    """Configuration that served before this update; a failed smoke test goes back to it."""
    previous_model: str | None = None
    token: str | None = None
    owned: bool = False
    """Made or updated by the deployment now under way, so a failure may delete or revert it."""
    reason: str | None = None
    idle_ttl_hours: float | None = None
    last_chat_at: dt.datetime | None = None
    inference_component: str | None = None
    previous_component: str | None = None
    """Inference component that served before this deployment, until it is deleted."""
    scaled: bool = False
    """A scalable target was registered for it."""
    alarm: str | None = None
    """CloudWatch alarm on its errors."""

    @property
    def components(self) -> tuple[str, ...]:
        """Inference components that there may be, the newest first."""
        both = (self.inference_component, self.previous_component)
        return tuple(name for name in both if name is not None)

    @property
    def serving_component(self) -> str | None:
        """Inference component to ask: while a deployment is under way, the one before it."""
        return (self.previous_component if self.owned else None) or self.inference_component


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """Something that happened to a run. `key` makes a repeated write of the same event one
    entry."""

    run_id: str
    time: dt.datetime
    kind: str
    text: str
    key: str
    stage_index: int | None = None
    attempt: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceOwner:
    """Which attempt an EC2 instance works for."""

    run_id: str
    stage_index: int
    stage: str
    attempt: int
