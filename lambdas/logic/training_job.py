"""The CreateTrainingJob request of an attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from contracts.attempt import AttemptConfig
from contracts.layout import join_uri, parse_s3_uri
from contracts.metrics import metric_definitions
from contracts.run_spec import RunSpec
from contracts.stages import GrpoStage
from lambdas.logic.records import AttemptRecord, RunRecord, StageRecord
from lambdas.settings import JobSettings

__all__ = [
    "FAST_FILE_BYTES",
    "build_training_job_request",
    "job_tags",
    "source_stage_index",
    "stage_model_uri",
]

FAST_FILE_BYTES = 50 * 2**30
"""Data larger than this is streamed (FastFile) instead of copied before training starts."""
_EBS_FAMILIES = ("ml.m5.", "ml.c5.")
"""Types without local storage; SageMaker refuses VolumeKmsKeyId on those that have some."""


def build_training_job_request(
    spec: RunSpec,
    run: RunRecord,
    stage: StageRecord,
    attempt: AttemptRecord,
    *,
    bucket: str,
    settings: JobSettings,
) -> dict[str, Any]:
    """The whole request.

    No CheckpointConfig: the container uploads its own checkpoints, as SageMaker's mirror copies
    files one by one in no documented order. No secrets: hyperparameters and environment show up in
    events.
    """
    config = AttemptConfig(
        run_id=run.run_id,
        stage_index=stage.index,
        stage=stage.name,
        attempt=attempt.number,
        bucket=bucket,
        spec_sha256=run.spec_sha256,
        resume_floor=attempt.resume_floor,
        weights_from=stage.weights_from,
    )
    stopping = {"MaxRuntimeInSeconds": attempt.max_runtime_seconds}
    if attempt.max_wait_seconds is not None:
        stopping["MaxWaitTimeInSeconds"] = attempt.max_wait_seconds
    output = {"S3OutputPath": join_uri(bucket, f"{stage.layout.prefix}sagemaker-output/")}
    resources: dict[str, Any] = {
        "InstanceType": attempt.instance_type,
        "InstanceCount": attempt.instance_count,
        "VolumeSizeInGB": spec.compute.ladder[attempt.rung].volume_gb,
    }
    if settings.kms_key:
        output["KmsKeyId"] = settings.kms_key
        if attempt.instance_type.startswith(_EBS_FAMILIES):
            resources["VolumeKmsKeyId"] = settings.kms_key
    request: dict[str, Any] = {
        "TrainingJobName": attempt.job_name,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": _metrics(spec, stage.index),
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "RoleArn": settings.role,
        "HyperParameters": config.to_hyperparameters(),
        "OutputDataConfig": output,
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": attempt.spot,
        "EnableInterContainerTrafficEncryption": (
            settings.encrypt_traffic and attempt.instance_count > 1
        ),
        "Tags": _tag_list(spec.tags, job_tags(attempt, settings.stack)),
        **settings.vpc.request,
    }
    channels = list(_channels(spec, run, stage, bucket))
    if channels:
        request["InputDataConfig"] = channels
    return request


def job_tags(attempt: AttemptRecord, stack: str) -> dict[str, str]:
    """Tags by which a job is known as this attempt's."""
    return {
        "grpohub:stack": stack,
        "grpohub:run": attempt.run_id,
        "grpohub:stage": attempt.stage,
        "grpohub:attempt": str(attempt.number),
    }


def stage_model_uri(spec: RunSpec, run: RunRecord, stage: StageRecord, bucket: str) -> str | None:
    """S3 prefix of the weights a stage starts from; None when they are a hub id.

    The first stage starts from the run's model, a later one from an earlier stage's exported
    model; a named checkpoint (`start_from.step`) is laid over that by the container.
    """
    source = source_stage_index(spec, stage.index)
    if source is None:
        return run.model_uri
    layout = run.layout.stage(source, spec.stages[source].name)
    return join_uri(bucket, layout.model_prefix)


def source_stage_index(spec: RunSpec, index: int) -> int | None:
    """Index of the stage that stage ``index`` starts from; None: the run's model."""
    start = spec.stages[index].start_from
    if start is not None:
        return [stage.name for stage in spec.stages].index(start.stage)
    return index - 1 if index > 0 else None


def _metrics(spec: RunSpec, index: int) -> list[dict[str, str]]:
    stage = spec.stages[index]
    sources = [source.name for source in stage.rewards] if isinstance(stage, GrpoStage) else []
    return metric_definitions(stage.method, sources)


def _channels(
    spec: RunSpec, run: RunRecord, stage: StageRecord, bucket: str
) -> Iterator[dict[str, Any]]:
    data = spec.stages[stage.index].data
    yield _channel("train", data.train, run.inputs_bytes)
    if data.validation is not None:
        yield _channel("validation", data.validation, run.inputs_bytes)
    model = stage_model_uri(spec, run, stage, bucket)
    if model is not None:
        # Weights are read out of order and more than once, which FastFile is bad at.
        yield _channel("model", model, {})


def _channel(name: str, uri: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    # FastFile takes whole folders only: a prefix that ends with a slash.
    fast = parse_s3_uri(uri)[1].endswith("/") and sizes.get(uri, 0) > FAST_FILE_BYTES
    return {
        "ChannelName": name,
        "InputMode": "FastFile" if fast else "File",
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": uri,
                "S3DataDistributionType": "FullyReplicated",
            }
        },
    }


def _tag_list(*maps: Mapping[str, str]) -> list[dict[str, str]]:
    merged = {key: value for mapping in maps for key, value in mapping.items()}
    return [{"Key": key, "Value": value} for key, value in merged.items()]
