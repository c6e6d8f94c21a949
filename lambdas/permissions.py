"""What the control plane's functions may do, permission by permission, with the reason for each
wildcard. Placeholders are those of `lambdas/functions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CREATE_JOB",
    "DELETE_ALARM",
    "DELETE_HOSTING",
    "DESCRIBE_HOSTING",
    "DESCRIBE_JOB",
    "ENDPOINT_LOGS",
    "EXECUTIONS",
    "INVOKE",
    "LIST",
    "LIST_DATA",
    "LIST_JOBS",
    "PUT_ALARM",
    "READ_DATA",
    "READ_RECIPES",
    "READ_RUNS",
    "SCALE",
    "START",
    "STOP_JOB",
    "TABLE",
    "TOKENS",
    "UNSCALE",
    "WRITE_RUNS",
    "Permission",
    "create_hosting",
    "pass_role",
]


@dataclass(frozen=True, slots=True)
class Permission:
    """IAM actions on resources. `reason` explains a wildcard, for cdk-nag."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    reason: str = ""
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


TABLE = Permission(
    (
        "dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:UpdateItem", "dynamodb:DeleteItem",
        "dynamodb:Query", "dynamodb:ConditionCheckItem",
    ),
    ("{table_arn}", "{table_arn}/index/*"),
    "The indexes of the hub's own table.",
)  # fmt: skip
READ_RUNS = Permission(
    ("s3:GetObject",), ("{bucket_arn}/runs/*",), "Objects of runs are named at run time."
)
WRITE_RUNS = Permission(
    ("s3:PutObject",), ("{bucket_arn}/runs/*",), "Objects of runs are named at run time."
)
LIST = Permission(("s3:ListBucket",), ("{bucket_arn}",))
READ_RECIPES = Permission(
    ("s3:GetObject",), ("{bucket_arn}/recipes/*",), "Recipes are named by users."
)
LIST_DATA = Permission(("s3:ListBucket",), ("{data_bucket_arns}",))
READ_DATA = Permission(
    ("s3:GetObject",),
    ("{bucket_arn}/inputs/*", "{bucket_arn}/uploads/*", "{data_bucket_arns}/*"),
    "Users name their data sets at run time.",
)
_JOB_ARN = "arn:{partition}:sagemaker:{region}:{account}:training-job/*"
_JOB_REASON = "Job names begin with the run id, which is made at run time."
DESCRIBE_JOB = Permission(
    ("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"), (_JOB_ARN,), _JOB_REASON
)
LIST_JOBS = Permission(
    ("sagemaker:ListTrainingJobs",), ("*",), "SageMaker's List calls take no resource."
)
STOP_JOB = Permission(("sagemaker:StopTrainingJob",), (_JOB_ARN,), _JOB_REASON)
CREATE_JOB = Permission(
    ("sagemaker:CreateTrainingJob", "sagemaker:AddTags"), (_JOB_ARN,), _JOB_REASON
)
TOKENS = Permission(
    ("states:SendTaskSuccess", "states:SendTaskHeartbeat"),
    ("{state_machine_arn}",),
)
START = Permission(("states:StartExecution",), ("{state_machine_arn}",))
EXECUTIONS = Permission(
    ("states:DescribeExecution", "states:StopExecution"),
    ("{execution_arns}",),
    "Executions are named by run ids.",
)
_HOSTING = tuple(
    f"arn:{{partition}}:sagemaker:{{region}}:{{account}}:{kind}/*"
    for kind in ("endpoint", "endpoint-config", "model", "inference-component")
)
_HOSTING_REASON = "Names begin with names that users choose in run files."
DESCRIBE_HOSTING = Permission(
    (
        "sagemaker:DescribeEndpoint", "sagemaker:DescribeEndpointConfig",
        "sagemaker:DescribeModel", "sagemaker:DescribeInferenceComponent", "sagemaker:ListTags",
    ),
    _HOSTING,
    _HOSTING_REASON,
)  # fmt: skip
DELETE_HOSTING = Permission(
    (
        "sagemaker:DeleteEndpoint", "sagemaker:DeleteEndpointConfig", "sagemaker:DeleteModel",
        "sagemaker:DeleteInferenceComponent", "sagemaker:UpdateEndpoint",
    ),
    _HOSTING,
    _HOSTING_REASON,
)  # fmt: skip
_ALARM_ARN = "arn:{partition}:cloudwatch:{region}:{account}:alarm:{stack_name}-endpoint-*"
_ALARM_REASON = "An endpoint's alarm is named by the endpoint."
PUT_ALARM = Permission(
    ("cloudwatch:PutMetricAlarm", "cloudwatch:DescribeAlarms"), (_ALARM_ARN,), _ALARM_REASON
)
DELETE_ALARM = Permission(("cloudwatch:DeleteAlarms",), (_ALARM_ARN,), _ALARM_REASON)
_TARGETS = ("arn:{partition}:application-autoscaling:{region}:{account}:scalable-target/*",)
_TARGET_REASON = "The id of a scalable target is made by the service."
_TRACKING_ALARMS = "arn:{partition}:cloudwatch:{region}:{account}:alarm:TargetTracking-*"
_WAKE_ALARMS = "arn:{partition}:cloudwatch:{region}:{account}:alarm:grpohub-wake-*"
_SCALING_SERVICE = "sagemaker.application-autoscaling.amazonaws.com"
SCALE = (
    Permission(
        (
            "application-autoscaling:RegisterScalableTarget",
            "application-autoscaling:PutScalingPolicy",
        ),
        _TARGETS,
        _TARGET_REASON,
    ),
    # Application Auto Scaling asks for these of whoever has it scale.
    Permission(
        (
            "sagemaker:UpdateEndpointWeightsAndCapacities",
            "sagemaker:UpdateInferenceComponentRuntimeConfig",
        ),
        _HOSTING,
        _HOSTING_REASON,
    ),
    Permission(
        ("cloudwatch:PutMetricAlarm", "cloudwatch:DescribeAlarms", "cloudwatch:DeleteAlarms"),
        (_TRACKING_ALARMS,),
        "Target tracking names its alarms by endpoints.",
    ),
    Permission(
        ("cloudwatch:PutMetricAlarm",),
        (_WAKE_ALARMS,),
        "The alarm that wakes an inference component is named by it.",
    ),
    # The account's first scalable target of SageMaker brings the role into being.
    Permission(
        ("iam:CreateServiceLinkedRole",),
        (
            f"arn:{{partition}}:iam::{{account}}:role/aws-service-role/{_SCALING_SERVICE}/"
            "AWSServiceRoleForApplicationAutoScaling_SageMakerEndpoint",
        ),
        conditions={"StringEquals": {"iam:AWSServiceName": _SCALING_SERVICE}},
    ),
)
UNSCALE = (
    Permission(("application-autoscaling:DeregisterScalableTarget",), _TARGETS, _TARGET_REASON),
    Permission(
        ("cloudwatch:DeleteAlarms",),
        (_TRACKING_ALARMS, _WAKE_ALARMS),
        "Alarms of scaling are named by endpoints and inference components.",
    ),
)
ENDPOINT_LOGS = Permission(
    ("logs:FilterLogEvents",),
    ("arn:{partition}:logs:{region}:{account}:log-group:/aws/sagemaker/Endpoints/*",),
    "Log groups are named by endpoints.",
)
INVOKE = Permission(("sagemaker:InvokeEndpoint",), _HOSTING, _HOSTING_REASON)


def create_hosting(*operations: str) -> Permission:
    """These SageMaker operations on models and endpoints, with the tags that a creation gives."""
    actions = tuple(f"sagemaker:{operation}" for operation in operations)
    return Permission((*actions, "sagemaker:AddTags"), _HOSTING, _HOSTING_REASON)


def pass_role(role: str) -> Permission:
    """Hand a role to SageMaker, and to no other service."""
    return Permission(
        ("iam:PassRole",),
        (role,),
        conditions={"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
    )
