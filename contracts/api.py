"""Requests and responses of the HTTP API, shared by the API's handler and the client.

All routes lie under `/v1`. Errors are `application/problem+json` (`ProblemDocument`). Lists are
paged: pass the `next_token` of one page to get the next; it is absent on the last. Times are ISO
8601 in UTC.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from contracts.states import AttemptState, EndpointState, Outcome, RunState, StageState

__all__ = [
    "AttemptList",
    "AttemptView",
    "ChatRequest",
    "CheckpointList",
    "CheckpointView",
    "CreateRunRequest",
    "DeleteEndpointView",
    "DeployRequest",
    "EndpointList",
    "EndpointView",
    "InfoView",
    "LogLine",
    "LogsPage",
    "MetricsPage",
    "ModelView",
    "ProblemDocument",
    "ProblemView",
    "RecipeList",
    "RecipeRequest",
    "RecipeView",
    "RewardCatalogue",
    "RewardView",
    "RunPage",
    "RunSummary",
    "RunView",
    "SmokeTestView",
    "StageView",
    "TimelineEntry",
    "TimelinePage",
    "ValidationView",
]


class ApiView(BaseModel):
    """What the hub answers. A newer hub's answer may hold keys that this client does not know.

    JSON in Python form is lax about enums and tuples, so these models are not `Strict`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ApiRequest(BaseModel):
    """What the hub is asked: an unknown key is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ProblemView(ApiView):
    """One thing to mend in a request."""

    path: str
    value: Any = None
    reason: str
    fix: str


class ProblemDocument(ApiView):
    """RFC 9457 problem details."""

    type: str
    """`urn:grpohub:problem:<name>`; stable, for programs."""
    title: str
    status: int
    detail: str
    request_id: str
    problems: list[ProblemView] = []


class CreateRunRequest(ApiRequest):
    """`POST /runs` (201 `RunView`) and `POST /runs/validate` (200 `ValidationView`).

    `POST /runs` honours the header `Idempotency-Key`: the same key and body give the same run.
    """

    spec: dict[str, Any] | None = None
    """The run file as data."""
    yaml: str | None = None
    """The run file as text; instead of `spec`."""
    files: dict[str, str] = {}
    """Text of every file that the run file names (reward code, templates), by its relative path."""

    @model_validator(mode="after")
    def _one_form(self) -> CreateRunRequest:
        if (self.spec is None) == (self.yaml is None):
            raise ValueError("give exactly one of `spec` and `yaml`")
        return self


class ValidationView(ApiView):
    """Outcome of a validation; `spec` is the run file with all defaults when it is valid."""

    valid: bool
    problems: list[ProblemView] = []
    spec: dict[str, Any] | None = None


class StageView(ApiView):
    """A stage and how far it is."""

    index: int
    name: str
    method: str
    state: StageState
    attempts: int
    step: int | None = None
    """Step of the newest checkpoint seen."""
    max_steps: int | None = None


class ModelView(ApiView):
    """A published model."""

    uri: str
    """S3 prefix with Hugging Face weights and `model.json`."""
    version: str
    """sha256 over all files."""
    stage: str
    step: int
    size: int
    """Bytes."""


class SmokeTestView(ApiView):
    """The question asked of a new endpoint, and its answer."""

    prompt: str
    source: Literal["run file", "validation data", "built in"]
    answer: str
    seconds: float


class RunSummary(ApiView):
    """A run in a list."""

    run_id: str
    name: str
    state: RunState
    reason: str | None = None
    """Why it waits or failed, in one sentence."""
    created_at: dt.datetime
    updated_at: dt.datetime
    endpoint_name: str | None = None


class RunView(RunSummary):
    """A run in full."""

    stages: list[StageView]
    model: ModelView | None = None
    smoke_test: SmokeTestView | None = None
    execution_arn: str | None = None
    """The Step Functions execution that drives the run."""
    source: str
    """`api`, or the S3 object that started the run."""
    spec: dict[str, Any]


class RunPage(ApiView):
    """`GET /runs?limit&next_token&state`, newest first."""

    runs: list[RunSummary]
    next_token: str | None = None


class AttemptView(ApiView):
    """A SageMaker training job of a stage."""

    stage_index: int
    stage: str
    attempt: int
    job_name: str
    state: AttemptState
    outcome: Outcome | None = None
    reason: str | None = None
    instance_type: str
    instance_count: int
    spot: bool
    secondary_status: str | None = None
    """SageMaker's own word for what the job is doing."""
    interruptions: int
    """Managed Spot restarts within this job."""
    resumed_from_step: int | None = None
    newest_checkpoint_step: int | None = None
    planned_at: dt.datetime
    submitted_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    """First time it trained."""
    ended_at: dt.datetime | None = None
    training_seconds: int | None = None
    billable_seconds: int | None = None
    spot_savings: float | None = None
    """1 - billable/training, of one instance."""


class AttemptList(ApiView):
    """`GET /runs/{run_id}/attempts`, oldest first."""

    attempts: list[AttemptView]


class CheckpointView(ApiView):
    """A checkpoint of a stage as its flags tell."""

    stage_index: int
    stage: str
    step: int
    generation: str
    complete: bool
    reasons: list[str] = []
    """Why it is not complete."""
    attempt: int | None = None
    num_hosts: int | None = None
    size: int = 0
    """Bytes of the files its flags list."""
    metrics: dict[str, float] = {}


class CheckpointList(ApiView):
    """`GET /runs/{run_id}/checkpoints?stage`, newest first; `stage` is an index, default the latest
    begun."""

    checkpoints: list[CheckpointView]


class MetricsPage(ApiView):
    """`GET /runs/{run_id}/metrics?stage&from_step&limit`: rows by rising step, repeated steps
    dropped.

    A row: `{"step", "attempt", "generation", "time", "stage", "metrics": {name: number|null|"not
    computed"}}`.
    """

    stage_index: int
    rows: list[dict[str, Any]]
    next_step: int | None = None
    """Pass as `from_step` for the next page."""


class LogLine(ApiView):
    """One line of a container's log."""

    time: dt.datetime
    host: str
    message: str


class LogsPage(ApiView):
    """`GET /runs/{run_id}/logs?stage&attempt&next_token`; default the latest attempt.

    `next_token` is always there: with it, a later call returns what was logged since.
    """

    job_name: str | None
    lines: list[LogLine]
    next_token: str | None = None
    complete: bool
    """The attempt has ended and this was the last page."""


class TimelineEntry(ApiView):
    """Something that happened to a run."""

    time: dt.datetime
    kind: str
    """Such as `run.created`, `attempt.submitted`, `attempt.interrupted`, `checkpoint.complete`."""
    text: str
    stage_index: int | None = None
    attempt: int | None = None
    step: int | None = None


class TimelinePage(ApiView):
    """`GET /runs/{run_id}/timeline?limit&next_token`, oldest first."""

    entries: list[TimelineEntry]
    next_token: str | None = None


class DeployRequest(ApiRequest):
    """`POST /runs/{run_id}/deploy` (202 `RunView`): deploy the run's published model."""

    deploy: dict[str, Any] | None = None
    """A `deploy` section instead of the run file's."""


class EndpointView(ApiView):
    """An endpoint of this hub."""

    name: str
    state: EndpointState
    run_id: str
    model_version: str
    instance_type: str
    instance_count: int
    created_at: dt.datetime
    updated_at: dt.datetime
    idle_ttl_hours: float | None = None
    reason: str | None = None
    inference_component: str | None = None
    """Name to pass as InferenceComponentName when the endpoint can scale to zero."""


class EndpointList(ApiView):
    """`GET /endpoints`."""

    endpoints: list[EndpointView]


class DeleteEndpointView(ApiView):
    """`DELETE /endpoints/{name}` (202): what was deleted and what still remains."""

    name: str
    deleted: list[str]
    remaining: list[str]
    """Deleted later by the reconciler, as an endpoint cannot be deleted while it is being created.
    """


class ChatRequest(BaseModel):
    """`POST /endpoints/{name}/chat`: an OpenAI chat body, passed on; the answer is the endpoint's
    own.

    API Gateway HTTP APIs neither stream nor wait longer than 30 s: for both, call the endpoint with
    `sagemaker-runtime` (the client does).
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]


class RewardView(ApiView):
    """A built-in reward."""

    name: str
    summary: str
    parameters: dict[str, Any] = {}
    """JSON Schema of its parameters."""


class RewardCatalogue(ApiView):
    """`GET /rewards`."""

    rewards: list[RewardView]


class RecipeRequest(ApiRequest):
    """`PUT /recipes/{name}`: a data file put under `uploads/<name>/` then starts this run with
    it."""

    yaml: str
    files: dict[str, str] = {}


class RecipeView(ApiView):
    """`GET /recipes/{name}`."""

    name: str
    yaml: str
    files: list[str] = []
    updated_at: dt.datetime


class RecipeList(ApiView):
    """`GET /recipes`."""

    recipes: list[str]


class InfoView(ApiView):
    """`GET /info`: what a client must know of the stack."""

    version: str
    region: str
    bucket: str
    state_machine_arn: str
    training_image: str
    inference_image: str
