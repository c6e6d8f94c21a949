"""Events of AWS that the control plane listens to: tolerant models, and constructors that emit
them.

What is read here is written by AWS, which adds fields and statuses without notice, sends times as
epoch milliseconds in strings, in integers, as null, or as ISO text, and gives `Tags` as a map where
its API gives a list. So unknown fields are kept, statuses stay text, and nothing optional is
needed. The embedded mode emits what the constructors return; a test reads each constructor's event
back.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel, to_pascal

from contracts.base import Tolerant
from contracts.problems import InvalidInputError, Problem

__all__ = [
    "AwsEvent",
    "EndpointDetail",
    "EndpointEvent",
    "ExecutionDetail",
    "ExecutionEvent",
    "InstanceDetail",
    "ObjectCreatedDetail",
    "ObjectCreatedEvent",
    "RebalanceEvent",
    "SecondaryTransition",
    "SpotInterruptionEvent",
    "TrainingJobDetail",
    "TrainingJobEvent",
    "endpoint_event",
    "execution_event",
    "normalize_endpoint_status",
    "object_created_event",
    "parse_event",
    "rebalance_event",
    "sequencer_order",
    "spot_interruption_event",
    "training_job_event",
]

TRAINING_JOB = "SageMaker Training Job State Change"
ENDPOINT = "SageMaker Endpoint State Change"
SPOT_INTERRUPTION = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
OBJECT_CREATED = "Object Created"
EXECUTION = "Step Functions Execution Status Change"

_ENDPOINT_STATUSES = (
    "OutOfService", "Creating", "Updating", "SystemUpdating", "RollingBack", "InService",
    "Deleting", "Deleted", "Failed", "UpdateRollbackFailed",
)  # fmt: skip


def _read_time(value: object) -> object:
    """Epoch milliseconds (int, float, digits) to UTC; empty text to None; else unchanged."""
    if value == "":
        return None
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int | float):
        return dt.datetime.fromtimestamp(value / 1000, tz=dt.UTC)
    return value


def _read_tags(value: object) -> object:
    """The events' map, the API's Key/Value list, or null, as a map."""
    if isinstance(value, list | tuple):
        return {item["Key"]: item.get("Value", "") for item in value}
    return {} if value is None else value


def _empty_for_null(value: object) -> object:
    return () if value is None else value


Time = Annotated[dt.datetime | None, BeforeValidator(_read_time)]
Tags = Annotated[Mapping[str, str], BeforeValidator(_read_tags)]


def normalize_endpoint_status(status: str) -> str:
    """`IN_SERVICE` (events) and `InService` (API) to the API's spelling; unknown ones unchanged."""
    flat = status.replace("_", "").lower()
    return next((name for name in _ENDPOINT_STATUSES if name.lower() == flat), status)


def sequencer_order(sequencer: str) -> str:
    """A sort key for S3 sequencers of one object key: hex text, compared at equal length."""
    return sequencer.lower().rjust(64, "0")


class AwsEvent(Tolerant):
    """The envelope that every EventBridge event has."""

    version: str = "0"
    id: str = ""
    """Not unique to a state change: AWS may send one change as several events."""
    detail_type: Annotated[str, Field(alias="detail-type")]
    source: str
    account: str = ""
    time: Time = None
    region: str = ""
    resources: Annotated[tuple[str, ...], BeforeValidator(_empty_for_null)] = ()


class _SageMakerDetail(Tolerant):
    model_config = ConfigDict(alias_generator=to_pascal)


class SecondaryTransition(_SageMakerDetail):
    """One step of a training job's history."""

    status: str
    start_time: Time = None
    end_time: Time = None
    """Absent in events, present in the API's answer."""
    status_message: str | None = None
    """For people: AWS says that code must not depend on it."""


class TrainingJobDetail(_SageMakerDetail):
    """State of a training job: a hint; the hub asks DescribeTrainingJob for the truth."""

    training_job_name: str
    training_job_arn: str = ""
    training_job_status: str
    secondary_status: str | None = None
    secondary_status_transitions: Annotated[
        tuple[SecondaryTransition, ...], BeforeValidator(_empty_for_null)
    ] = ()
    failure_reason: str | None = None
    creation_time: Time = None
    training_start_time: Time = None
    training_end_time: Time = None
    last_modified_time: Time = None
    tags: Tags = Field(default_factory=dict)


class TrainingJobEvent(AwsEvent):
    """A training job changed its state, or SageMaker says so again."""

    detail: TrainingJobDetail


class EndpointDetail(_SageMakerDetail):
    """State of an endpoint, its status in the API's spelling."""

    endpoint_name: str
    endpoint_arn: str = ""
    endpoint_config_name: str | None = None
    endpoint_status: Annotated[str, AfterValidator(normalize_endpoint_status)]
    failure_reason: str | None = None
    creation_time: Time = None
    last_modified_time: Time = None
    tags: Tags = Field(default_factory=dict)


class EndpointEvent(AwsEvent):
    """An endpoint changed its state."""

    detail: EndpointDetail


class InstanceDetail(Tolerant):
    """An EC2 instance. Only the id counts: the event's ARN may lack account and region."""

    instance_id: Annotated[str, Field(alias="instance-id")]
    instance_action: Annotated[str | None, Field(alias="instance-action")] = None
    """`terminate`, `stop` or `hibernate` (interruption warnings only)."""


class SpotInterruptionEvent(AwsEvent):
    """Two minutes' notice, best effort."""

    detail: InstanceDetail


class RebalanceEvent(AwsEvent):
    """A raised risk of interruption; may come before, with, or without the warning."""

    detail: InstanceDetail


class _Bucket(Tolerant):
    name: str


class _Object(Tolerant):
    key: str
    size: int = 0
    etag: str = ""
    version_id: Annotated[str | None, Field(alias="version-id")] = None
    sequencer: str = ""


class ObjectCreatedDetail(Tolerant):
    """An object that S3 has stored."""

    bucket: _Bucket
    object: _Object
    reason: str | None = None
    """`PutObject`, `CompleteMultipartUpload`, `CopyObject`, …"""

    @property
    def identity(self) -> str:
        """The same text for the same object version, however often S3 tells of it."""
        version = self.object.version_id or self.object.etag
        return f"{self.bucket.name}/{self.object.key}@{version}"


class ObjectCreatedEvent(AwsEvent):
    """S3 stored an object. The key is as the writer gave it, not URL-encoded."""

    detail: ObjectCreatedDetail


class ExecutionDetail(Tolerant):
    """State of a Step Functions execution."""

    model_config = ConfigDict(alias_generator=to_camel)

    execution_arn: str
    state_machine_arn: str
    name: str
    status: str
    """`RUNNING`, `SUCCEEDED`, `FAILED`, `TIMED_OUT`, `ABORTED`, `PENDING_REDRIVE`, …"""
    start_date: Time = None
    stop_date: Time = None
    input: str | None = None
    """null when it is above 248 KiB."""
    output: str | None = None
    error: str | None = None
    cause: str | None = None


class ExecutionEvent(AwsEvent):
    """An execution started or ended; an abort in the console is seen only here."""

    detail: ExecutionDetail


AnyEvent = (
    TrainingJobEvent
    | EndpointEvent
    | SpotInterruptionEvent
    | RebalanceEvent
    | ObjectCreatedEvent
    | ExecutionEvent
)
_MODELS: Mapping[str, type[AnyEvent]] = {
    TRAINING_JOB: TrainingJobEvent,
    ENDPOINT: EndpointEvent,
    SPOT_INTERRUPTION: SpotInterruptionEvent,
    REBALANCE: RebalanceEvent,
    OBJECT_CREATED: ObjectCreatedEvent,
    EXECUTION: ExecutionEvent,
}


def parse_event(event: Mapping[str, Any]) -> AnyEvent:
    """The typed event for its detail-type.

    Raises:
        InvalidInputError: for a detail-type the hub does not listen to, or a detail without the
            fields that name its subject. Such an event belongs in a dead-letter queue.
    """
    kind = event.get("detail-type")
    model = _MODELS.get(str(kind))
    if model is None:
        problem = Problem(
            "detail-type", kind, "is no event of this hub", f"Known: {', '.join(_MODELS)}."
        )
        raise InvalidInputError([problem], subject="event")
    try:
        return model.model_validate(event)
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, d["loc"])), d["input"], d["msg"], "Look at the event's rule.")
            for d in error.errors(include_url=False)
        ]
        raise InvalidInputError(problems, subject=f"event {kind!r}") from error


def _envelope(
    kind: str,
    source: str,
    detail: Mapping[str, Any],
    *,
    account: str,
    region: str,
    time: dt.datetime | None,
    resources: tuple[str, ...],
) -> dict[str, Any]:
    moment = time or dt.datetime.now(dt.UTC)
    return {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": kind,
        "source": source,
        "account": account,
        "time": f"{moment.astimezone(dt.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "region": region,
        "resources": list(resources),
        "detail": dict(detail),
    }


def _event_values(value: Any) -> Any:
    """An API answer as an event shows it: epoch milliseconds for times, all the way down."""
    if isinstance(value, dt.datetime):
        return int(value.timestamp() * 1000)
    if isinstance(value, Mapping):
        return {key: _event_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_event_values(item) for item in value]
    return value


def training_job_event(
    description: Mapping[str, Any],
    *,
    tags: Mapping[str, str] | None = None,
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """The event for a job described as DescribeTrainingJob does, less `ResponseMetadata`."""
    detail = _event_values({k: v for k, v in description.items() if k != "ResponseMetadata"})
    detail["Tags"] = dict(tags or {})
    arn = description.get("TrainingJobArn", "")
    return _envelope(
        TRAINING_JOB, "aws.sagemaker", detail,
        account=account, region=region, time=time, resources=(arn,),
    )  # fmt: skip


def endpoint_event(
    description: Mapping[str, Any],
    *,
    tags: Mapping[str, str] | None = None,
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """The event for an endpoint described as DescribeEndpoint does; status as events spell it."""
    detail = _event_values({k: v for k, v in description.items() if k != "ResponseMetadata"})
    status = str(description["EndpointStatus"])
    detail["EndpointStatus"] = "".join(
        f"_{char}" if char.isupper() and index else char for index, char in enumerate(status)
    ).upper()
    detail["Tags"] = dict(tags or {})
    arn = description.get("EndpointArn", "")
    return _envelope(
        ENDPOINT, "aws.sagemaker", detail,
        account=account, region=region, time=time, resources=(arn,),
    )  # fmt: skip


def spot_interruption_event(
    instance_id: str,
    *,
    action: str = "terminate",
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """EC2's two-minute warning for an instance."""
    return _envelope(
        SPOT_INTERRUPTION, "aws.ec2", {"instance-id": instance_id, "instance-action": action},
        account=account, region=region, time=time,
        resources=(f"arn:aws:ec2:{region}a:instance/{instance_id}",),
    )  # fmt: skip


def rebalance_event(
    instance_id: str,
    *,
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """EC2's rebalance recommendation for an instance."""
    return _envelope(
        REBALANCE, "aws.ec2", {"instance-id": instance_id},
        account=account, region=region, time=time,
        resources=(f"arn:aws:ec2:{region}a:instance/{instance_id}",),
    )  # fmt: skip


def object_created_event(
    bucket: str,
    key: str,
    *,
    size: int,
    etag: str,
    version_id: str | None = None,
    sequencer: str = "",
    reason: str = "PutObject",
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """S3's notice of a new object or version."""
    stored: dict[str, Any] = {"key": key, "size": size, "etag": etag, "sequencer": sequencer}
    if version_id is not None:
        stored["version-id"] = version_id
    detail = {"version": "0", "bucket": {"name": bucket}, "object": stored, "reason": reason}
    return _envelope(
        OBJECT_CREATED, "aws.s3", detail,
        account=account, region=region, time=time, resources=(f"arn:aws:s3:::{bucket}",),
    )  # fmt: skip


def execution_event(
    description: Mapping[str, Any],
    *,
    account: str = "123456789012",
    region: str = "us-east-1",
    time: dt.datetime | None = None,
) -> dict[str, Any]:
    """The event for an execution described as DescribeExecution does."""
    detail = _event_values({k: v for k, v in description.items() if k != "ResponseMetadata"})
    return _envelope(
        EXECUTION, "aws.states", detail,
        account=account, region=region, time=time, resources=(description["executionArn"],),
    )  # fmt: skip
