"""Requests to SageMaker, checked against the service's own model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import botocore.session
import pytest
from botocore.validate import validate_parameters
from hypothesis import given
from hypothesis import strategies as st

from contracts.attempt import AttemptConfig, CheckpointRef
from contracts.compute import DeploySpec
from lambdas.logic.deployment import (
    Deployment,
    build_alarm_request,
    build_endpoint_config_request,
    build_endpoint_request,
    build_inference_component_request,
    build_model_request,
    build_update_request,
    build_wake_alarm_request,
    download_seconds,
    health_seconds,
    plan_deployment,
)
from lambdas.logic.training_job import FAST_FILE_BYTES, build_training_job_request
from lambdas.settings import HostingSettings, JobSettings, VpcSettings
from tests.state_machine.specs import run_spec, sft
from tests.unit.lambdas.rows import RUN_ID, attempt, model, run, spec, stage

SESSION = botocore.session.get_session()
VPC = VpcSettings(("subnet-1",), ("sg-1",))
JOBS = JobSettings("image:1", "arn:aws:iam::123456789012:role/train", "GrpoHub")
HOSTING = HostingSettings("serve:1", "arn:aws:iam::123456789012:role/serve", "GrpoHub")


def valid(operation: str, request: dict[str, Any], service: str = "sagemaker") -> dict[str, Any]:
    model_of_it = SESSION.get_service_model(service).operation_model(operation)
    validate_parameters(request, model_of_it.input_shape)
    return request


def job(**changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "spec": spec(), "run": run(), "stage": stage(), "attempt": attempt(), "settings": JOBS,
    } | changes  # fmt: skip
    return valid(
        "CreateTrainingJob",
        build_training_job_request(
            known["spec"], known["run"], known["stage"], known["attempt"],
            bucket="run-bucket", settings=known["settings"],
        ),
    )  # fmt: skip


@given(
    spot=st.booleans(), hosts=st.integers(1, 64), resume=st.booleans(), encrypt=st.booleans(),
    kms=st.sampled_from(["", "arn:aws:kms:us-east-1:123456789012:key/k"]),
    instance=st.sampled_from(["ml.g5.xlarge", "ml.m5.xlarge"]),
)  # fmt: skip
def test_every_attempt_makes_a_request_that_sagemaker_takes(  # noqa: PLR0917
    spot: bool, hosts: int, resume: bool, encrypt: bool, kms: str, instance: str
) -> None:
    """Kenza-AI/sagify#111: MaxWait without Spot is refused."""
    row = attempt(
        spot=spot, instance_count=hosts, instance_type=instance,
        max_wait_seconds=40_000 if spot else None,
        resume_floor=CheckpointRef(step=7, generation="g") if resume else None,
    )  # fmt: skip
    settings = dataclasses.replace(JOBS, kms_key=kms, encrypt_traffic=encrypt, vpc=VPC)
    request = job(attempt=row, settings=settings)
    stopping = request["StoppingCondition"]
    assert ("MaxWaitTimeInSeconds" in stopping) == request["EnableManagedSpotTraining"] == spot
    assert stopping.get("MaxWaitTimeInSeconds", 10**9) >= stopping["MaxRuntimeInSeconds"]
    assert "CheckpointConfig" not in request
    assert "Environment" not in request
    assert all(len(value) <= 2500 for value in request["HyperParameters"].values())
    config = AttemptConfig.from_hyperparameters(request["HyperParameters"])
    assert (config.resume_floor is not None) == resume
    # SageMaker refuses a volume key for types with local storage.
    volume_key = "VolumeKmsKeyId" in request["ResourceConfig"]
    assert volume_key == (bool(kms) and instance.startswith("ml.m5"))
    assert len(request["AlgorithmSpecification"]["MetricDefinitions"]) <= 40


def test_a_file_lands_as_a_file_and_a_large_folder_is_streamed() -> None:
    folder = "s3://run-bucket/inputs/rows/"
    document = run_spec(stages=[sft("sft", data={"train": folder})])
    from contracts.run_spec import parse_run_spec

    large = run(inputs_bytes={folder: FAST_FILE_BYTES + 1})
    request = job(spec=parse_run_spec(document), run=large)
    modes = {c["ChannelName"]: c["InputMode"] for c in request["InputDataConfig"]}
    assert modes == {"train": "FastFile", "model": "File"}
    small = job(spec=parse_run_spec(document), run=run(inputs_bytes={folder: 10}))
    assert small["InputDataConfig"][0]["InputMode"] == "File"
    one = job(run=run(inputs_bytes={"s3://run-bucket/inputs/train.jsonl": FAST_FILE_BYTES + 1}))
    assert one["InputDataConfig"][0]["InputMode"] == "File"


def test_a_hub_id_needs_no_model_channel() -> None:
    request = job(run=run(model_uri=None))
    assert [c["ChannelName"] for c in request["InputDataConfig"]] == ["train", "validation"]


def deployment(rung: int = 0, **deploy: Any) -> Deployment:
    section = DeploySpec(instance_type="ml.g5.xlarge", **deploy)
    return plan_deployment(
        spec(), section, model(), run_id=RUN_ID, rung=rung, settings=HOSTING
    )  # fmt: skip


@pytest.mark.parametrize("least", [None, 0, 1])
def test_every_deployment_makes_requests_that_sagemaker_takes(least: int | None) -> None:
    from contracts.compute import AutoscalingSpec

    scaling = None if least is None else AutoscalingSpec(min_instances=least)
    made = deployment(autoscaling=scaling)
    valid("CreateModel", build_model_request(made))
    config = valid("CreateEndpointConfig", build_endpoint_config_request(made))
    valid("CreateEndpoint", build_endpoint_request(made))
    update = valid("UpdateEndpoint", build_update_request(made))
    if least == 0:
        valid("CreateInferenceComponent", build_inference_component_request(made))
        assert made.component is not None
        wake = build_wake_alarm_request(made.component, "arn:aws:autoscaling:policy")
        valid("PutMetricAlarm", wake, "cloudwatch")
        assert "DeploymentConfig" not in update
        assert made.alarm is None
        assert "ExecutionRoleArn" in config
    else:
        guard = update["DeploymentConfig"]["AutoRollbackConfiguration"]
        assert guard == {"Alarms": [{"AlarmName": made.alarm}]}
        alarm = valid("PutMetricAlarm", build_alarm_request(made), "cloudwatch")
        assert alarm["AlarmName"] == made.alarm
        assert config["ProductionVariants"][0]["ModelName"] == made.model_name


def test_names_carry_what_the_immutable_resources_are_made_of() -> None:
    base = deployment()
    assert base.model.version[:8] in base.model_name
    assert base.model.version[:8] in base.config_name
    engine = {"engine": DeploySpec.model_fields["engine"].default.model_copy(
        update={"max_model_len": 4096})}  # fmt: skip
    other = deployment(**engine)
    assert other.model_name != base.model_name
    second = deployment(1, fallback_instance_types=("ml.g6.xlarge",))
    assert second.model_name == base.model_name
    assert second.config_name != base.config_name
    assert deployment() == base
    with pytest.raises(IndexError):
        deployment(1)


def test_the_engine_settings_travel_in_one_variable_and_no_secret_with_them() -> None:
    request = build_model_request(deployment())
    environment = request["PrimaryContainer"]["Environment"]
    assert set(environment) == {"GRPOHUB_DEPLOY", "GRPOHUB_MODEL_VERSION"}
    assert json.loads(environment["GRPOHUB_DEPLOY"]) == {}


@given(size=st.integers(0, 10**13))
def test_timeouts_follow_the_models_bytes_within_awss_bounds(size: int) -> None:
    """aws/amazon-sagemaker-examples#210, awslabs/llm-hosting-container#18: four minutes are too
    few."""
    for seconds in (download_seconds, health_seconds):
        assert 60 <= seconds(size) <= 3600
        assert seconds(size) <= seconds(size + 10**9)
    assert health_seconds(15 * 10**9) > 240
