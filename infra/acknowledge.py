"""Findings of cdk-nag that are meant, and actions that cannot name a resource: each with its reason."""

from __future__ import annotations

from aws_cdk import Acknowledgment, Validations
from constructs import IConstruct

__all__ = ["WILDCARD_ACTIONS", "acknowledge"]

_NO_RESOURCE = "The action takes no resource."
_LOG_DELIVERY = "CloudWatch's log delivery API takes no resource; Step Functions calls it to log."
_NETWORK = "SageMaker creates the network interfaces; EC2 names them only then."

WILDCARD_ACTIONS = {
    "ecr:GetAuthorizationToken": _NO_RESOURCE,
    "cloudwatch:PutMetricData": "The action takes no resource; a condition fixes the namespace.",
    "cloudwatch:GetMetricStatistics": _NO_RESOURCE,
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
