"""Training: the container image and the role of its jobs, which write only under `runs/`."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.acknowledge import acknowledge
from infra.images import container_image
from infra.options import StackOptions
from infra.roles import sagemaker_role
from infra.storage import Storage

__all__ = ["Training", "training_base_image"]

READABLE_PREFIXES = ("runs/", "inputs/", "uploads/")


def training_base_image(region: str) -> str:
    """AWS's PyTorch training image of a region: CUDA, NCCL and the EFA plug-in that multi-node jobs need."""
    from sagemaker.core import image_uris

    return image_uris.retrieve(
        "pytorch",
        region=region,
        version="2.10.0",
        py_version="py313",
        instance_type="ml.g6e.2xlarge",
        image_scope="training",
    )


class Training(Construct):
    """What CreateTrainingJob needs: an image and a role."""

    def __init__(
        self, scope: Construct, id: str, *, storage: Storage, options: StackOptions
    ) -> None:
        super().__init__(scope, id)
        self.image = container_image(
            self,
            "Image",
            package="training_container",
            base_image=training_base_image(options.region),
        )
        self.role = sagemaker_role(
            self,
            "Role",
            description="GRPO Hub training jobs: read inputs, write runs/",
            image=self.image,
            log_group="/aws/sagemaker/TrainingJobs",
            metric_namespace="/aws/sagemaker/*",
            options=options,
        )
        self._grant_bucket(storage)
        self._grant_other_buckets(options)
        self._grant_secrets(options)
        acknowledge(
            self.role,
            "AwsSolutions-IAM5",
            "Keys under fixed prefixes of named buckets, log streams and secrets get their names at run time; "
            "statements on * are those of infra.acknowledge.WILDCARD_ACTIONS.",
        )

    def _grant_bucket(self, storage: Storage) -> None:
        bucket = storage.bucket
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ListRuns",
                actions=["s3:ListBucket", "s3:GetBucketLocation"],
                resources=[bucket.bucket_arn],
            )
        )
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ReadInputs",
                actions=["s3:GetObject", "s3:GetObjectVersion"],
                resources=[bucket.arn_for_objects(f"{prefix}*") for prefix in READABLE_PREFIXES],
            )
        )
        # Deleting is pruning: the trainer owns the checkpoints of its own stage.
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="WriteRuns",
                actions=[
                    "s3:PutObject",
                    "s3:DeleteObject",
                    "s3:AbortMultipartUpload",
                    "s3:ListMultipartUploadParts",
                ],
                resources=[bucket.arn_for_objects("runs/*")],
            )
        )
        storage.key.grant_encrypt_decrypt(self.role)

    def _grant_other_buckets(self, options: StackOptions) -> None:
        if not options.readable_buckets:
            return
        partition = cdk.Stack.of(self).partition
        arns = [f"arn:{partition}:s3:::{name}" for name in options.readable_buckets]
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ReadOtherBuckets",
                actions=["s3:GetObject", "s3:GetObjectVersion", "s3:ListBucket"],
                resources=[*arns, *(f"{arn}/*" for arn in arns)],
            )
        )

    def _grant_secrets(self, options: StackOptions) -> None:
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ReadNamedSecrets",
                actions=["secretsmanager:GetSecretValue"],
                resources=[
                    cdk.Stack.of(self).format_arn(
                        service="secretsmanager",
                        resource="secret",
                        resource_name=f"{options.secret_prefix}*",
                        arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
                    )
                ],
            )
        )
