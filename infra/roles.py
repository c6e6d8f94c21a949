"""What every SageMaker execution role may do besides its own S3 prefixes: pull, log, count, join the VPC."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ecr_assets as ecr_assets
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.options import StackOptions

__all__ = ["sagemaker_role"]


def sagemaker_role(
    scope: Construct,
    id: str,
    *,
    description: str,
    image: ecr_assets.DockerImageAsset,
    log_group: str,
    metric_namespace: str,
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
    image.repository.grant_pull(role)
    role.add_to_policy(
        iam.PolicyStatement(
            sid="Logs",
            actions=[
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ],
            resources=[
                stack.format_arn(
                    service="logs",
                    resource="log-group",
                    resource_name=f"{log_group}*",
                    arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
                )
            ],
        )
    )
    role.add_to_policy(
        iam.PolicyStatement(
            sid="SageMakerMetrics",
            actions=["cloudwatch:PutMetricData"],
            resources=["*"],
            conditions={"StringLike": {"cloudwatch:namespace": metric_namespace}},
        )
    )
    if options.vpc is not None:
        role.add_to_policy(
            iam.PolicyStatement(
                sid="VpcInterfaces",
                actions=[
                    "ec2:CreateNetworkInterface",
                    "ec2:CreateNetworkInterfacePermission",
                    "ec2:DeleteNetworkInterface",
                    "ec2:DeleteNetworkInterfacePermission",
                    "ec2:DescribeDhcpOptions",
                    "ec2:DescribeNetworkInterfaces",
                    "ec2:DescribeSecurityGroups",
                    "ec2:DescribeSubnets",
                    "ec2:DescribeVpcs",
                ],
                resources=["*"],
            )
        )
    return role
