"""Requests that put a model behind an endpoint, and the names that make repeating them harmless."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from contracts.compute import DeploySpec
from contracts.layout import (
    RunLayout,
    endpoint_alarm_name,
    endpoint_config_name,
    join_uri,
    model_name,
    parse_s3_uri,
    wake_alarm_name,
)
from contracts.run_spec import RunSpec
from lambdas.logic.records import PublishedModel
from lambdas.settings import HostingSettings

__all__ = [
    "VARIANT",
    "Deployment",
    "build_alarm_request",
    "build_endpoint_config_request",
    "build_endpoint_request",
    "build_inference_component_request",
    "build_model_request",
    "build_update_request",
    "build_wake_alarm_request",
    "download_seconds",
    "health_seconds",
    "plan_deployment",
]

VARIANT = "primary"
ERROR_SHARE = 0.05
"""Share of 5xx answers above which an update is rolled back."""
BAKING_SECONDS = 300
"""How long a new fleet is watched with all traffic; its metrics come once a minute, and late."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on one rung of a deploy ladder, with the names of its three resources."""

    endpoint: str
    model_name: str
    config_name: str
    instance_type: str
    model: PublishedModel
    deploy: DeploySpec
    run_id: str
    tags: dict[str, str]
    settings: HostingSettings

    @property
    def scales_to_zero(self) -> bool:
        """Only inference components scale to zero."""
        scaling = self.deploy.autoscaling
        return scaling is not None and scaling.min_instances == 0

    @property
    def component(self) -> str | None:
        return f"{self.config_name}" if self.scales_to_zero else None

    @property
    def alarm(self) -> str | None:
        """Alarm that rolls an update back. Guardrails do not exist for inference components."""
        return (
            None if self.scales_to_zero else endpoint_alarm_name(self.settings.stack, self.endpoint)
        )


def plan_deployment(
    spec: RunSpec,
    deploy: DeploySpec,
    model: PublishedModel,
    *,
    run_id: str,
    rung: int,
    settings: HostingSettings,
) -> Deployment:
    """Names and settings for rung ``rung`` of [instance_type, *fallback_instance_types].

    Models and configurations are immutable in AWS. Their names carry everything that they are made
    of, so that a repeated creation finds its own work and a changed one gets a new name.

    Raises:
        IndexError: when the ladder has no such rung.
    """
    ladder = (deploy.instance_type, *deploy.fallback_instance_types)
    instance_type = ladder[rung]
    endpoint = deploy.endpoint_name or spec.name
    engine = _digest(settings.image, deploy.engine.model_dump_json())
    revision = _digest(
        engine, instance_type, str(deploy.instance_count), str(deploy.autoscaling), run_id
    )
    tags = {
        **spec.tags,
        "grpohub:stack": settings.stack,
        "grpohub:run": run_id,
        "grpohub:model-version": model.version[:16],
    }
    return Deployment(
        endpoint=endpoint,
        model_name=model_name(run_id, model.version, engine),
        config_name=endpoint_config_name(endpoint, model.version, revision),
        instance_type=instance_type,
        model=model,
        deploy=deploy,
        run_id=run_id,
        tags=tags,
        settings=settings,
    )


def build_model_request(deployment: Deployment) -> dict[str, Any]:
    """CreateModel: weights straight from their S3 prefix, uncompressed."""
    settings = deployment.settings
    return {
        "ModelName": deployment.model_name,
        "PrimaryContainer": {
            "Image": settings.image,
            "ModelDataSource": {
                "S3DataSource": {
                    "S3Uri": deployment.model.uri,
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            },
            "Environment": {
                "GRPOHUB_DEPLOY": deployment.deploy.engine.compact_json(),
                "GRPOHUB_MODEL_VERSION": deployment.model.version,
                **_code_uri(deployment),
            },
        },
        "ExecutionRoleArn": settings.role,
        "Tags": _tags(deployment),
        **settings.vpc.request,
    }


def _code_uri(deployment: Deployment) -> dict[str, str]:
    """Where the container finds the run's own chat template, when the run file names one."""
    if deployment.deploy.engine.chat_template_file is None:
        return {}
    bucket, _ = parse_s3_uri(deployment.model.uri)
    return {"GRPOHUB_CODE_URI": join_uri(bucket, RunLayout(deployment.run_id).code_prefix)}


def build_endpoint_config_request(deployment: Deployment) -> dict[str, Any]:
    """CreateEndpointConfig with timeouts derived from the model's bytes."""
    deploy = deployment.deploy
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": deployment.instance_type,
        "InitialInstanceCount": deploy.instance_count,
        "ContainerStartupHealthCheckTimeoutInSeconds": health_seconds(deployment.model.size),
        "ModelDataDownloadTimeoutInSeconds": download_seconds(deployment.model.size),
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    request: dict[str, Any] = {
        "EndpointConfigName": deployment.config_name,
        "ProductionVariants": [variant],
        "Tags": _tags(deployment),
    }
    if deployment.scales_to_zero:
        assert deploy.autoscaling is not None
        variant["ManagedInstanceScaling"] = {
            "Status": "ENABLED",
            "MinInstanceCount": 0,
            # One more than there are copies: a successor is placed while its predecessor serves.
            "MaxInstanceCount": deploy.autoscaling.max_instances + 1,
        }
        request["ExecutionRoleArn"] = deployment.settings.role
    else:
        variant["ModelName"] = deployment.model_name
    return request


def build_endpoint_request(deployment: Deployment) -> dict[str, Any]:
    """CreateEndpoint."""
    return {
        "EndpointName": deployment.endpoint,
        "EndpointConfigName": deployment.config_name,
        "Tags": _tags(deployment),
    }


def build_alarm_request(deployment: Deployment) -> dict[str, Any]:
    """PutMetricAlarm on the share of requests that the endpoint's own containers answer with 5xx.

    SageMaker publishes 1 for such an answer and 0 for any other, so that the average is the share.
    No requests are no fault.
    """
    return {
        "AlarmName": deployment.alarm,
        "AlarmDescription": (
            f"Endpoint {deployment.endpoint} answers more than {ERROR_SHARE:.0%} of its requests "
            "with 5xx. During an update SageMaker rolls back by itself; otherwise read the "
            "endpoint's log group."
        ),
        "Namespace": "AWS/SageMaker",
        "MetricName": "Invocation5XXErrors",
        "Dimensions": [
            {"Name": "EndpointName", "Value": deployment.endpoint},
            {"Name": "VariantName", "Value": VARIANT},
        ],
        "Statistic": "Average",
        "Period": 60,
        "EvaluationPeriods": 1,
        "Threshold": ERROR_SHARE,
        "ComparisonOperator": "GreaterThanThreshold",
        "TreatMissingData": "notBreaching",
    }


def build_wake_alarm_request(component: str, policy_arn: str) -> dict[str, Any]:
    """PutMetricAlarm on requests that found no copy of an inference component: one within a minute
    has the scaling policy add one."""
    return {
        "AlarmName": wake_alarm_name(component),
        "AlarmDescription": (
            f"Inference component {component} was asked while it had no copy. Its scaling policy "
            "adds one; requests fail until it serves, which takes minutes."
        ),
        "AlarmActions": [policy_arn],
        "Namespace": "AWS/SageMaker",
        "MetricName": "NoCapacityInvocationFailures",
        "Dimensions": [{"Name": "InferenceComponentName", "Value": component}],
        "Statistic": "Sum",
        "Period": 60,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching",
    }


def build_update_request(deployment: Deployment) -> dict[str, Any]:
    """UpdateEndpoint: the new fleet takes all traffic once it is healthy. While it is watched, the
    endpoint's alarm gives the traffic back to the old one, which goes a while later."""
    request: dict[str, Any] = {
        "EndpointName": deployment.endpoint,
        "EndpointConfigName": deployment.config_name,
    }
    if deployment.alarm is not None:
        request["DeploymentConfig"] = {
            "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": deployment.alarm}]},
            "BlueGreenUpdatePolicy": {
                "TrafficRoutingConfiguration": {
                    "Type": "ALL_AT_ONCE",
                    "WaitIntervalInSeconds": BAKING_SECONDS,
                },
                "TerminationWaitInSeconds": 120,
                "MaximumExecutionTimeoutInSeconds": 10800,
            },
        }
    return request


def build_inference_component_request(deployment: Deployment) -> dict[str, Any]:
    """CreateInferenceComponent, for endpoints that scale to zero."""
    from contracts.instances import instance

    shape = instance(deployment.instance_type)
    compute: dict[str, Any] = {"MinMemoryRequiredInMb": int(shape.memory_gib * 1024 * 0.8)}
    if shape.gpus:
        compute["NumberOfAcceleratorDevicesRequired"] = shape.gpus
    else:
        compute["NumberOfCpuCoresRequired"] = max(1, shape.vcpus - 1)
    return {
        "InferenceComponentName": deployment.component,
        "EndpointName": deployment.endpoint,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": deployment.model_name,
            "StartupParameters": {
                "ModelDataDownloadTimeoutInSeconds": download_seconds(deployment.model.size),
                "ContainerStartupHealthCheckTimeoutInSeconds": health_seconds(
                    deployment.model.size
                ),
            },
            "ComputeResourceRequirements": compute,
        },
        "RuntimeConfig": {"CopyCount": 1},
        "Tags": _tags(deployment),
    }


def download_seconds(size: int) -> int:
    """ModelDataDownloadTimeoutInSeconds: 5 minutes, and the bytes at a slow 50 MB/s; AWS allows 60
    to 3600."""
    return min(3600, 300 + size // 50_000_000)


def health_seconds(size: int) -> int:
    """ContainerStartupHealthCheckTimeoutInSeconds: 10 minutes for engine and graph capture, and
    the weights at 100 MB/s; AWS's own 4 minutes are too few for any large model, and 3600 is the
    most it allows."""
    return min(3600, 600 + size // 100_000_000)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _tags(deployment: Deployment) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in deployment.tags.items()]
