"""Inference: the container image and the role of its endpoints, which only read exported models."""

from __future__ import annotations

from aws_cdk import ArnFormat, Stack
from constructs import Construct

from infra.images import base_image, container_image
from infra.options import StackOptions
from infra.permissions import allow
from infra.roles import sagemaker_role
from infra.storage import Storage

__all__ = ["Inference", "inference_base_image"]


def inference_base_image(region: str) -> str:
    """AWS's vLLM image of a region: vLLM with the CUDA and torch builds it was tested with."""
    return base_image(
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
            options=options,
        )
        bucket = storage.bucket
        allow(self.role, ["s3:ListBucket", "s3:GetBucketLocation"], [bucket.bucket_arn])
        allow(
            self.role,
            ["s3:GetObject"],
            [bucket.arn_for_objects("runs/*"), bucket.arn_for_objects("inputs/*")],
            reason="Models and adapters of later runs are named at run time.",
        )
        allow(self.role, ["kms:Decrypt"], [storage.key.key_arn])
        # SageMaker looks at the alarms of a blue/green update in this role's name.
        stack = Stack.of(self)
        alarms = stack.format_arn(
            service="cloudwatch",
            resource="alarm",
            resource_name=f"{options.stack_name}-endpoint-*",
            arn_format=ArnFormat.COLON_RESOURCE_NAME,
        )
        allow(
            self.role,
            ["cloudwatch:DescribeAlarms"],
            [alarms],
            reason="An endpoint's alarm is named by the endpoint.",
        )
