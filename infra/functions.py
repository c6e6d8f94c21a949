"""The Lambda functions of the table `lambdas/functions.py`: each with a role, logs and a queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.bundle import (
    code_folder,
    layer_folder,
    reward_code_folder,
    reward_layer_folder,
)
from infra.logs import log_group
from infra.options import StackOptions
from infra.permissions import acknowledge, acknowledge_wildcards, allow, allow_key
from infra.storage import Storage
from lambdas import functions as table

__all__ = ["Functions", "HubFunction", "Surroundings"]


@dataclass(frozen=True)
class HubFunction:
    """A deployed function, its row in the table, and where events it could not handle go."""

    row: table.Function
    function: lambda_.Function
    dead_letters: sqs.Queue | None


@dataclass(frozen=True)
class Surroundings:
    """What the table's placeholders and environment variables stand for in this stack."""

    storage: Storage
    options: StackOptions
    state_machine_arn: str
    training_image_uri: str
    training_role_arn: str
    inference_image_uri: str
    inference_role_arn: str

    def function_name(self, name: str) -> str:
        """Name in the account: the stack's, then the table's."""
        return f"{self.options.stack_name}-{name}"

    def environment(self) -> dict[str, str]:
        """Every variable a function may ask for; no secret, as only containers resolve those."""
        vpc = self.options.vpc
        return {
            "POWERTOOLS_SERVICE_NAME": table.ENVIRONMENT["POWERTOOLS_SERVICE_NAME"],
            "POWERTOOLS_METRICS_NAMESPACE": table.ENVIRONMENT["POWERTOOLS_METRICS_NAMESPACE"],
            "POWERTOOLS_LOG_LEVEL": self.options.log_level,
            "TABLE_NAME": self.storage.table.table_name,
            "BUCKET_NAME": self.storage.bucket.bucket_name,
            "STATE_MACHINE_ARN": self.state_machine_arn,
            "TRAINING_IMAGE_URI": self.training_image_uri,
            "TRAINING_ROLE_ARN": self.training_role_arn,
            "INFERENCE_IMAGE_URI": self.inference_image_uri,
            "INFERENCE_ROLE_ARN": self.inference_role_arn,
            "REWARD_DRY_RUN_FUNCTION": self.function_name("reward_dry_run"),
            "KMS_KEY_ARN": self.storage.key.key_arn,
            "VPC_SUBNET_IDS": ",".join(vpc.subnet_ids) if vpc else "",
            "VPC_SECURITY_GROUP_IDS": ",".join(vpc.security_group_ids) if vpc else "",
            "ENCRYPT_INTER_CONTAINER_TRAFFIC": str(
                self.options.encrypt_traffic_between_hosts
            ).lower(),
            "STACK_NAME": self.options.stack_name,
        }

    def placeholders(self) -> dict[str, str]:
        """Every `{placeholder}` of resources and event patterns but the list of data buckets."""
        stack = cdk.Stack.of(self.storage)
        executions = stack.format_arn(
            service="states",
            resource="execution",
            resource_name=f"{self.options.state_machine_name}:*",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        dry_run = stack.format_arn(
            service="lambda",
            resource="function",
            resource_name=self.function_name("reward_dry_run"),
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        return {
            "partition": stack.partition,
            "region": stack.region,
            "account": stack.account,
            "stack_name": self.options.stack_name,
            "table_arn": self.storage.table.table_arn,
            "bucket_arn": self.storage.bucket.bucket_arn,
            "bucket_name": self.storage.bucket.bucket_name,
            "state_machine_arn": self.state_machine_arn,
            "execution_arns": executions,
            "training_role_arn": self.training_role_arn,
            "inference_role_arn": self.inference_role_arn,
            "reward_dry_run_arn": dry_run,
        }

    def resources(self, templates: tuple[str, ...]) -> Iterator[str]:
        """A permission's resources; one that names the data buckets becomes one per bucket."""
        values = self.placeholders()
        for template in templates:
            if "{data_bucket_arns}" not in template:
                yield template.format(**values)
                continue
            for bucket in self.options.readable_buckets:
                arn = f"arn:{values['partition']}:s3:::{bucket}"
                yield template.format(**values, data_bucket_arns=arn)

    def fill(self, pattern: Any) -> Any:
        """An event pattern with its placeholders filled."""
        if isinstance(pattern, str):
            return pattern.format(**self.placeholders())
        if isinstance(pattern, Mapping):
            return {key: self.fill(value) for key, value in pattern.items()}
        return [self.fill(item) for item in pattern]


class Functions(Construct):
    """All functions of the table, by name."""

    def __init__(self, scope: Construct, id: str, *, surroundings: Surroundings) -> None:
        super().__init__(scope, id)
        self._in = surroundings
        layer = self._build_layer(
            "Libraries", layer_folder(), "boto3, pydantic, Powertools, Jinja2"
        )
        reward_layer = self._build_layer(
            "RewardLibraries", reward_layer_folder(), "pydantic, math-verify, jsonschema"
        )
        self._bundles = {
            "lambdas": (lambda_.Code.from_asset(str(code_folder())), layer),
            "rewards": (lambda_.Code.from_asset(str(reward_code_folder())), reward_layer),
        }
        self.by_name = {row.name: self._build(row) for row in table.FUNCTIONS}

    def _build_layer(self, id: str, folder: Path, holds: str) -> lambda_.LayerVersion:
        return lambda_.LayerVersion(
            self,
            id,
            description=f"{holds} as pinned in constraints.txt",
            code=lambda_.Code.from_asset(str(folder)),
            compatible_architectures=[lambda_.Architecture.ARM_64],
            compatible_runtimes=[lambda_.Runtime.PYTHON_3_13],
        )

    def _build(self, row: table.Function) -> HubFunction:
        by_events = bool(row.rules or row.schedule_minutes)
        queue = self._build_queue(row) if by_events else None
        name = self._in.function_name(row.name)
        group = log_group(
            self,
            f"{row.construct_id}Logs",
            name=f"/aws/lambda/{name}",
            storage=self._in.storage,
            options=self._in.options,
        )
        environment = self._in.environment()
        code, layer = self._bundles[row.code]
        function = lambda_.Function(
            self,
            row.construct_id,
            function_name=name,
            description=row.description,
            runtime=lambda_.Runtime.PYTHON_3_13,
            architecture=lambda_.Architecture.ARM_64,
            code=code,
            layers=[layer],
            handler=row.handler,
            timeout=cdk.Duration.seconds(row.timeout),
            memory_size=row.memory,
            environment={
                key: environment[key] for key in (*table.COMMON_ENVIRONMENT, *row.environment)
            },
            role=self._build_role(row, f"{group.log_group_arn}:*"),
            log_group=group,
            tracing=lambda_.Tracing.ACTIVE,
            dead_letter_queue=queue,
        )
        acknowledge(
            function,
            "AwsSolutions-L1",
            "Python 3.13 is the newest runtime the pinned layer is built for.",
        )
        return HubFunction(row, function, queue)

    def _build_queue(self, row: table.Function) -> sqs.Queue:
        queue = sqs.Queue(
            self,
            f"{row.construct_id}DeadLetters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=cdk.Duration.days(14),
        )
        acknowledge(queue, "AwsSolutions-SQS3", "It is itself a dead-letter queue.")
        return queue

    def _build_role(self, row: table.Function, logs_arn: str) -> iam.Role:
        role = iam.Role(
            self,
            f"{row.construct_id}Role",
            description=f"GRPO Hub function {row.name}: {row.description}"[:1000],
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
        )
        allow(
            role,
            ["logs:CreateLogStream", "logs:PutLogEvents"],
            [logs_arn],
            reason="Log streams are named at run time.",
        )
        acknowledge_wildcards(
            role, ["*"], "X-Ray, which the function reports to, has no resources."
        )
        for permission in row.permissions:
            # None is left of a permission about data buckets when the stack names no bucket.
            if resources := list(self._in.resources(permission.resources)):
                allow(
                    role,
                    permission.actions,
                    resources,
                    reason=permission.reason,
                    conditions=permission.conditions,
                )
        if row.permissions:
            allow_key(role, self._in.storage.key)
        if "KMS_KEY_ARN" in row.environment:
            # SageMaker attaches the job's volume, encrypted with the key, in the caller's name.
            allow(
                role,
                ["kms:CreateGrant"],
                [self._in.storage.key.key_arn],
                conditions={"Bool": {"kms:GrantIsForAWSResource": "true"}},
            )
        return role
