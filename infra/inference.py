"""Inference: the container image and the role of its endpoints, which only read exported models."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.acknowledge import acknowledge
from infra.images import container_image
from infra.options import StackOptions
from infra.roles import sagemaker_role
from infra.storage import Storage

__all__ = ["Inference", "inference_base_image"]


def inference_base_image(region: str) -> str:
    """AWS's vLLM image of a region: vLLM with the CUDA and torch builds it was tested with."""
    from sagemaker.core import image_uris

    return image_uris.retrieve(
        "vllm",
        region=region,
        version="0.30.0",
        instance_type="ml.g6e.2xlarge",
        image_scope="inference",
    )


class Inference(Construct):
    """What CreateModel needs: an image and a role."""

    def __init__(
        self, scope: Construct, id: str, *, storage: Storage, options: StackOptions
    ) -> None:
        super().__init__(scope, id)
        self.image = container_image(
            self,
            "Image",
            package="inference_container",
            base_image=inference_base_image(options.region),
        )
        self.role = sagemaker_role(
            self,
            "Role",
            description="GRPO Hub endpoints: read exported models and adapters",
            image=self.image,
            log_group="/aws/sagemaker/",
            metric_namespace="/aws/sagemaker/*",
            options=options,
        )
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
                sid="ReadModels",
                actions=["s3:GetObject"],
                resources=[bucket.arn_for_objects("runs/*"), bucket.arn_for_objects("inputs/*")],
            )
        )
        storage.key.grant_decrypt(self.role)
        self._grant_other_buckets(options)
        acknowledge(
            self.role,
            "AwsSolutions-IAM5",
            "Models of later runs and log streams get their names at run time; statements on * are those of "
            "infra.acknowledge.WILDCARD_ACTIONS.",
        )

    def _grant_other_buckets(self, options: StackOptions) -> None:
        """Adapters may lie where run files may point."""
        if not options.readable_buckets:
            return
        partition = cdk.Stack.of(self).partition
        arns = [f"arn:{partition}:s3:::{name}" for name in options.readable_buckets]
        self.role.add_to_policy(
            iam.PolicyStatement(
                sid="ReadOtherBuckets",
                actions=["s3:GetObject", "s3:ListBucket"],
                resources=[*arns, *(f"{arn}/*" for arn in arns)],
            )
        )
