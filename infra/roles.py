"""What both SageMaker roles may do: pull, log, count, join the VPC, read the named buckets."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ecr_assets as ecr_assets
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.options import StackOptions
from infra.permissions import WILDCARD_ACTIONS, allow

__all__ = ["sagemaker_role"]


def sagemaker_role(
    scope: Construct,
    id: str,
    *,
    description: str,
    image: ecr_assets.DockerImageAsset,
    log_group: str,
    options: StackOptions,
) -> iam.Role:
    """A role that SageMaker assumes for jobs or endpoints of this account."""
    stack = cdk.Stack.of(scope)
    role = iam.Role(
        scope,
        id,
        description=description,
        assumed_by=iam.ServicePrincipal(
            "sagemaker.amazonaws.com",
            conditions={"StringEquals": {"aws:SourceAccount": stack.account}},
        ),
    )
    allow(
        role,
        ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
        [image.repository.repository_arn],
    )
    allow(
        role,
        ["ecr:GetAuthorizationToken"],
        ["*"],
        reason=WILDCARD_ACTIONS["ecr:GetAuthorizationToken"],
    )
    allow(
        role,
        [
            "logs:CreateLogGroup",
            "logs:CreateLogStream",
            "logs:DescribeLogStreams",
            "logs:PutLogEvents",
        ],
        [
            stack.format_arn(
                service="logs",
                resource="log-group",
                resource_name=f"{log_group}*",
                arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
            )
        ],
        reason="SageMaker names log streams, and groups of endpoints, at run time.",
    )
    allow(
        role,
        ["cloudwatch:PutMetricData"],
        ["*"],
        reason=WILDCARD_ACTIONS["cloudwatch:PutMetricData"],
        conditions={"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}},
    )
    if options.vpc is not None:
        actions = sorted(action for action in WILDCARD_ACTIONS if action.startswith("ec2:"))
        allow(role, actions, ["*"], reason=WILDCARD_ACTIONS["ec2:CreateNetworkInterface"])
    if options.readable_buckets:
        # Run files may name data, models and adapters there.
        arns = [f"arn:{stack.partition}:s3:::{name}" for name in options.readable_buckets]
        allow(
            role,
            ["s3:GetObject", "s3:GetObjectVersion", "s3:ListBucket"],
            [*arns, *(f"{arn}/*" for arn in arns)],
            reason="The owner of the hub lists these buckets as readable.",
        )
    return role
