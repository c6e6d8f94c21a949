"""Permissions with their reasons: nothing is allowed on a wildcard that does not say why.

The reasons go to cdk-nag as acknowledgements, finding by finding, so an unexplained one fails the
synth, whoever wrote the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aws_cdk import Acknowledgment, Stack, Validations
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import IConstruct

__all__ = ["WILDCARD_ACTIONS", "acknowledge", "acknowledge_wildcards", "allow", "allow_key"]

_NO_RESOURCE = "The action takes no resource."
_LOG_DELIVERY = "CloudWatch's log delivery API takes no resource; Step Functions calls it to log."
_NETWORK = "SageMaker creates the network interfaces; EC2 names them only then."

WILDCARD_ACTIONS = {
    "ecr:GetAuthorizationToken": _NO_RESOURCE,
    "cloudwatch:PutMetricData": "The action takes no resource; a condition fixes the namespace.",
    "cloudwatch:GetMetricStatistics": _NO_RESOURCE,
    "sagemaker:ListTrainingJobs": _NO_RESOURCE,
    "xray:GetSamplingRules": _NO_RESOURCE,
    "xray:GetSamplingTargets": _NO_RESOURCE,
    "xray:PutTelemetryRecords": _NO_RESOURCE,
    "xray:PutTraceSegments": _NO_RESOURCE,
    "logs:CreateLogDelivery": _LOG_DELIVERY,
    "logs:DeleteLogDelivery": _LOG_DELIVERY,
    "logs:DescribeLogGroups": _LOG_DELIVERY,
    "logs:DescribeResourcePolicies": _LOG_DELIVERY,
    "logs:GetLogDelivery": _LOG_DELIVERY,
    "logs:ListLogDeliveries": _LOG_DELIVERY,
    "logs:PutResourcePolicy": _LOG_DELIVERY,
    "logs:UpdateLogDelivery": _LOG_DELIVERY,
    "ec2:CreateNetworkInterface": _NETWORK,
    "ec2:CreateNetworkInterfacePermission": _NETWORK,
    "ec2:DeleteNetworkInterface": _NETWORK,
    "ec2:DeleteNetworkInterfacePermission": _NETWORK,
    "ec2:DescribeDhcpOptions": _NETWORK,
    "ec2:DescribeNetworkInterfaces": _NETWORK,
    "ec2:DescribeSecurityGroups": _NETWORK,
    "ec2:DescribeSubnets": _NETWORK,
    "ec2:DescribeVpcs": _NETWORK,
}
"""The only actions that an identity policy of this stack may allow on `*`, and why."""


def acknowledge(construct: IConstruct, rule: str, reason: str) -> None:
    """Accept a finding of `rule` on `construct` and what is inside it."""
    Validations.of(construct).acknowledge(Acknowledgment(id=rule, reason=reason))


def acknowledge_wildcards(construct: IConstruct, resources: Iterable[str], reason: str) -> None:
    """Accept that policies inside `construct` name these resources, each with a `*` in it."""
    for resource in resources:
        text = _as_nag_writes(Stack.of(construct).resolve(resource))
        acknowledge(construct, f"AwsSolutions-IAM5[Resource::{text}]", reason)


def allow(
    role: iam.Role,
    actions: Sequence[str],
    resources: Sequence[str],
    *,
    reason: str = "",
    conditions: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Let a role do `actions` on `resources`; `reason` explains every `*` among them.

    Raises:
        ValueError: for a wildcard without a reason, and for an action on every resource that is
            not in WILDCARD_ACTIONS.
    """
    wild = [resource for resource in resources if "*" in resource]
    if "*" in wild and (unexplained := sorted(set(actions) - WILDCARD_ACTIONS.keys())):
        raise ValueError(f"{unexplained} may not be allowed on every resource")
    if wild and not reason:
        raise ValueError(f"{sorted(actions)} on {wild} needs a reason")
    acknowledge_wildcards(role, wild, reason)
    role.add_to_policy(
        iam.PolicyStatement(
            actions=list(actions),
            resources=list(resources),
            conditions={key: dict(value) for key, value in (conditions or {}).items()},
        )
    )


def allow_key(role: iam.Role, key: kms.Key) -> None:
    """Let a role read and write what the stack's key encrypts: objects and table items."""
    allow(
        role,
        [
            "kms:Decrypt",
            "kms:DescribeKey",
            "kms:Encrypt",
            "kms:GenerateDataKey",
            "kms:GenerateDataKeyWithoutPlaintext",
            "kms:ReEncryptFrom",
            "kms:ReEncryptTo",
        ],
        [key.key_arn],
    )


def _as_nag_writes(value: Any) -> str:
    """A resolved ARN as cdk-nag prints it: references in angle brackets."""
    if isinstance(value, str):
        return value
    match value:
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(_as_nag_writes(part) for part in parts)
    raise TypeError(f"no ARN: {value!r}")
