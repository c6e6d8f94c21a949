"""Where everything lives: the run bucket, the table and the key that encrypts both."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.options import StackOptions
from infra.permissions import acknowledge
from lambdas import schema

__all__ = ["Storage"]


class Storage(Construct):
    """Bucket, table and key. All outlive the stack unless the options say otherwise."""

    def __init__(self, scope: Construct, id: str, *, options: StackOptions) -> None:
        super().__init__(scope, id)
        self._removal = (
            cdk.RemovalPolicy.DESTROY if options.removal == "destroy" else cdk.RemovalPolicy.RETAIN
        )
        self.key = self._build_key()
        self.bucket = self._build_bucket(self._build_access_log_bucket())
        self.table = self._build_table()

    def _build_key(self) -> kms.Key:
        key = kms.Key(
            self,
            "Key",
            description="GRPO Hub: runs, checkpoints, models and the run table",
            enable_key_rotation=True,
            removal_policy=self._removal,
        )
        # CloudWatch Logs encrypts with the key itself, so it needs a grant in the key policy.
        stack = cdk.Stack.of(self)
        key.add_to_resource_policy(
            iam.PolicyStatement(
                sid="LogGroupsOfThisAccount",
                principals=[iam.ServicePrincipal(f"logs.{stack.region}.amazonaws.com")],
                actions=["kms:Encrypt*", "kms:Decrypt*", "kms:ReEncrypt*", "kms:GenerateDataKey*"],
                resources=["*"],
                conditions={
                    "ArnLike": {
                        "kms:EncryptionContext:aws:logs:arn": stack.format_arn(
                            service="logs",
                            resource="log-group",
                            resource_name="*",
                            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
                        )
                    }
                },
            )
        )
        # Alarms publish to the encrypted topic in their own name.
        key.add_to_resource_policy(
            iam.PolicyStatement(
                sid="AlarmsOfThisAccount",
                principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                actions=["kms:Decrypt", "kms:GenerateDataKey*"],
                resources=["*"],
                conditions={"StringEquals": {"aws:SourceAccount": stack.account}},
            )
        )
        return key

    def _build_access_log_bucket(self) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            "AccessLogs",
            # S3 delivers access logs only to buckets encrypted with its own keys.
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            enforce_ssl=True,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            lifecycle_rules=[s3.LifecycleRule(id="forget", expiration=cdk.Duration.days(90))],
            removal_policy=self._removal,
        )
        acknowledge(bucket, "AwsSolutions-S1", "It is the bucket that receives the access logs.")
        return bucket

    def _build_bucket(self, access_logs: s3.Bucket) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            "Runs",
            encryption=s3.BucketEncryption.KMS,
            encryption_key=self.key,
            bucket_key_enabled=True,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            versioned=True,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            server_access_logs_bucket=access_logs,
            server_access_logs_prefix="runs/",
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="unfinished-uploads",
                    abort_incomplete_multipart_upload_after=cdk.Duration.days(7),
                ),
                # A pruned checkpoint stays recoverable for a week, then stops costing money.
                s3.LifecycleRule(
                    id="replaced-versions",
                    noncurrent_version_expiration=cdk.Duration.days(7),
                    expired_object_delete_marker=True,
                ),
                s3.LifecycleRule(
                    id="cold-models",
                    prefix="runs/",
                    transitions=[
                        s3.Transition(
                            storage_class=s3.StorageClass.INTELLIGENT_TIERING,
                            transition_after=cdk.Duration.days(30),
                        )
                    ],
                ),
            ],
            removal_policy=self._removal,
        )
        # The L2 option goes through a custom resource with a wide role; S3 needs only the property.
        resource = bucket.node.default_child
        assert isinstance(resource, s3.CfnBucket)
        resource.notification_configuration = s3.CfnBucket.NotificationConfigurationProperty(
            event_bridge_configuration=s3.CfnBucket.EventBridgeConfigurationProperty(
                event_bridge_enabled=True
            )
        )
        return bucket

    def _build_table(self) -> dynamodb.Table:
        table = dynamodb.Table(
            self,
            "Table",
            partition_key=_text(schema.PARTITION_KEY),
            sort_key=_text(schema.SORT_KEY),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            encryption=dynamodb.TableEncryption.CUSTOMER_MANAGED,
            encryption_key=self.key,
            time_to_live_attribute=schema.TTL_ATTRIBUTE,
            point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(
                point_in_time_recovery_enabled=True
            ),
            deletion_protection=self._removal == cdk.RemovalPolicy.RETAIN,
            removal_policy=self._removal,
        )
        for index in schema.INDEXES.values():
            table.add_global_secondary_index(
                index_name=index.name,
                partition_key=_text(index.partition_key),
                sort_key=_text(index.sort_key),
            )
        return table


def _text(name: str) -> dynamodb.Attribute:
    return dynamodb.Attribute(name=name, type=dynamodb.AttributeType.STRING)
