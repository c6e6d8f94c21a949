"""SageMaker models, endpoint configurations, endpoints and inference components."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from contracts.events import normalize_endpoint_status
from lambdas.adapters.aws import as_transient, client, error_code, error_message
from lambdas.errors import (
    EndpointBusyError,
    NoCapacityError,
    NotFoundError,
    QuotaError,
    RequestRefusedError,
)
from lambdas.logic.classify import is_capacity_error

__all__ = ["EndpointObservation", "Hosting"]

_WAKE_SECONDS = 600
"""An instance and a copy take minutes to come; requests that fail meanwhile add no second copy."""


@dataclass(frozen=True, slots=True)
class EndpointObservation:
    """What DescribeEndpoint says, in plain types; the status in the API's spelling."""

    name: str
    arn: str
    status: str
    config: str
    modified_at: dt.datetime
    failure_reason: str | None = None


class Hosting:
    """Create-or-adopt for everything an endpoint consists of."""

    def __init__(self) -> None:
        self._sagemaker = client("sagemaker")
        self._runtime = client("sagemaker-runtime")
        self._scaling = client("application-autoscaling")

    def create_model(self, request: Mapping[str, Any]) -> bool:
        """Create, or find it there (False): the name says what is in it."""
        return self._create(self._sagemaker.create_model, request)

    def create_config(self, request: Mapping[str, Any]) -> bool:
        """Create, or find it there (False)."""
        return self._create(self._sagemaker.create_endpoint_config, request)

    def create_component(self, request: Mapping[str, Any]) -> bool:
        """Create, or find it there (False)."""
        return self._create(self._sagemaker.create_inference_component, request)

    def create_endpoint(self, request: Mapping[str, Any]) -> bool:
        """Create, or find an endpoint of that name (False).

        Raises:
            EndpointBusyError: the configuration is not visible yet; it is read eventually
            consistently. NoCapacityError, QuotaError: try another instance type.
        """
        return self._create(self._sagemaker.create_endpoint, request)

    def update_endpoint(self, request: Mapping[str, Any]) -> None:
        """UpdateEndpoint; raises as `create_endpoint` does."""
        self._create(self._sagemaker.update_endpoint, request)

    def describe(self, name: str) -> EndpointObservation | None:
        """What SageMaker says about an endpoint; None when there is none."""
        try:
            answer = self._sagemaker.describe_endpoint(EndpointName=name)
        except ClientError as error:
            if _missing(error):
                return None
            raise
        return EndpointObservation(
            name=answer["EndpointName"],
            arn=answer["EndpointArn"],
            status=normalize_endpoint_status(answer["EndpointStatus"]),
            config=answer["EndpointConfigName"],
            modified_at=answer["LastModifiedTime"],
            failure_reason=answer.get("FailureReason"),
        )

    def component_status(self, name: str) -> tuple[str, str | None] | None:
        """(status, failure reason) of an inference component; None when there is none."""
        try:
            answer = self._sagemaker.describe_inference_component(InferenceComponentName=name)
        except ClientError as error:
            if _missing(error):
                return None
            raise
        return answer["InferenceComponentStatus"], answer.get("FailureReason")

    def tags(self, arn: str) -> dict[str, str]:
        """Tags of an endpoint."""
        pages = self._sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}

    def config_exists(self, name: str) -> bool:
        """Whether the configuration is visible to describe calls."""
        try:
            self._sagemaker.describe_endpoint_config(EndpointConfigName=name)
        except ClientError as error:
            if _missing(error):
                return False
            raise
        return True

    def delete_endpoint(self, name: str) -> bool:
        """Ask for deletion. False: not possible now (an endpoint being created cannot be
        deleted)."""
        return self._delete(lambda: self._sagemaker.delete_endpoint(EndpointName=name))

    def delete_config(self, name: str) -> bool:
        """Delete a configuration; True also when there is none."""
        return self._delete(lambda: self._sagemaker.delete_endpoint_config(EndpointConfigName=name))

    def delete_model(self, name: str) -> bool:
        """Delete a SageMaker model (the weights in S3 stay); True also when there is none."""
        return self._delete(lambda: self._sagemaker.delete_model(ModelName=name))

    def delete_component(self, name: str) -> bool:
        """Delete an inference component; True also when there is none."""
        return self._delete(
            lambda: self._sagemaker.delete_inference_component(InferenceComponentName=name)
        )

    def invoke(self, name: str, body: Mapping[str, Any], component: str | None) -> dict[str, Any]:
        """POST JSON to `/invocations` and read JSON back.

        Raises:
            NotFoundError: there is no such endpoint.
            EndpointBusyError: it does not take requests yet, is throttled, or has scaled to zero.
            RequestRefusedError: the model's server answered with an error; its words are in the
            message.
        """
        extra = {"InferenceComponentName": component} if component else {}
        try:
            answer = self._runtime.invoke_endpoint(
                EndpointName=name,
                ContentType="application/json",
                Body=json.dumps(body).encode(),
                **extra,
            )
        except ClientError as error:
            code, message = error_code(error), error_message(error)
            if _missing(error):
                raise NotFoundError(message) from error
            busy = code in ("ServiceUnavailable", "ModelNotReadyException", "ThrottlingException")
            asleep = code == "ValidationError" and "has no capacity" in message
            if busy or asleep or (as_transient(error) is not None and code != "ModelError"):
                raise EndpointBusyError(message) from error
            raise RequestRefusedError(message) from error
        parsed: dict[str, Any] = json.loads(answer["Body"].read())
        return parsed

    def scale(self, resource: str, dimension: str, *, least: int, most: int, target: int) -> None:
        """Target tracking on invocations per instance (or component copy) and minute."""
        common = _scalable(resource, dimension)
        metric = (
            "SageMakerInferenceComponentInvocationsPerCopy"
            if resource.startswith("inference-component/")
            else "SageMakerVariantInvocationsPerInstance"
        )
        self._scaling.register_scalable_target(**common, MinCapacity=least, MaxCapacity=most)
        self._scaling.put_scaling_policy(
            **common,
            PolicyName="grpohub-invocations",
            PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration={
                "TargetValue": float(target),
                "PredefinedMetricSpecification": {"PredefinedMetricType": metric},
            },
        )

    def scale_from_zero(self, resource: str, dimension: str) -> str:
        """A policy that adds a copy when its alarm rings, as target tracking cannot: no copies
        have no invocations. Returns its ARN, the alarm's action."""
        answer = self._scaling.put_scaling_policy(
            **_scalable(resource, dimension),
            PolicyName="grpohub-wake",
            PolicyType="StepScaling",
            StepScalingPolicyConfiguration={
                "AdjustmentType": "ChangeInCapacity",
                "MetricAggregationType": "Maximum",
                "Cooldown": _WAKE_SECONDS,
                "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
            },
        )
        arn: str = answer["PolicyARN"]
        return arn

    def unscale(self, resource: str, dimension: str) -> None:
        """Forget a scalable target and its policies; one left behind would scale a later endpoint
        of that name."""
        try:
            self._scaling.deregister_scalable_target(**_scalable(resource, dimension))
        except ClientError as error:
            if error_code(error) != "ObjectNotFoundException":
                raise

    def _create(self, call: Callable[..., Any], request: Mapping[str, Any]) -> bool:
        try:
            call(**request)
        except ClientError as error:
            code, message = error_code(error), error_message(error)
            if "already exist" in message.lower():  # The code is ValidationException.
                return False
            if code in ("ResourceLimitExceeded", "ResourceLimitExceededException"):
                raise QuotaError(message) from error
            if is_capacity_error(message):
                raise NoCapacityError(message) from error
            transient = as_transient(error)
            if transient is not None:
                raise transient from error
            if _missing(error) or "in-progress" in message or "cannot update" in message.lower():
                raise EndpointBusyError(message) from error
            raise RequestRefusedError(f"{code}: {message}") from error
        return True

    def _delete(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except ClientError as error:
            if _missing(error):
                return True
            if error_code(error) in ("ValidationException", "ResourceInUse"):
                return False
            raise
        return True


def _scalable(resource: str, dimension: str) -> dict[str, str]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": dimension,
    }


def _missing(error: ClientError) -> bool:
    if error_code(error) in ("ResourceNotFound", "ResourceNotFoundException"):
        return True
    words = error_message(error).lower()
    return error_code(error) in ("ValidationException", "ValidationError") and (
        "could not find" in words or "not found" in words or "does not exist" in words
    )
