"""Training: the container image and the role of its jobs, which write only under `runs/`."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from infra.images import base_image, container_image
from infra.options import StackOptions
from infra.permissions import allow, allow_key
from infra.roles import sagemaker_role
from infra.storage import Storage

__all__ = ["Training", "training_base_image"]

READABLE_PREFIXES = ("runs/", "inputs/", "uploads/")
MLFLOW_ACTIONS = (
    "CreateExperiment", "CreateRun", "GetExperiment", "GetExperimentByName", "GetRun", "LogBatch",
    "SearchRuns", "UpdateRun",
)  # fmt: skip
"""What `tracking.mlflow` asks of a tracking server."""


def training_base_image(region: str) -> str:
    """AWS's PyTorch training image of a region: CUDA, NCCL, and EFA for several hosts."""
    return base_image(
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
            options=options,
        )
        self._grant_bucket(storage)
        allow(
            self.role,
            ["secretsmanager:GetSecretValue"],
            [
                cdk.Stack.of(self).format_arn(
                    service="secretsmanager",
                    resource="secret",
                    resource_name=f"{options.secret_prefix}*",
                    arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
                )
            ],
            reason="Users name hub tokens and judge keys in run files, under this prefix.",
        )
        allow(
            self.role,
            ["sagemaker:InvokeEndpoint"],
            [self._sagemaker_arns("endpoint"), self._sagemaker_arns("inference-component")],
            reason="Rewards and judges name endpoints of the account in run files.",
        )
        allow(
            self.role,
            [f"sagemaker-mlflow:{action}" for action in MLFLOW_ACTIONS],
            [self._sagemaker_arns("mlflow-tracking-server")],
            reason="Run files name a tracking server of the account.",
        )

    def _sagemaker_arns(self, kind: str) -> str:
        """All of a kind in the stack's account and region."""
        return cdk.Stack.of(self).format_arn(service="sagemaker", resource=kind, resource_name="*")

    def _grant_bucket(self, storage: Storage) -> None:
        bucket = storage.bucket
        allow(self.role, ["s3:ListBucket", "s3:GetBucketLocation"], [bucket.bucket_arn])
        allow(
            self.role,
            ["s3:GetObject", "s3:GetObjectVersion"],
            [bucket.arn_for_objects(f"{prefix}*") for prefix in READABLE_PREFIXES],
            reason="Inputs and checkpoints are named at run time.",
        )
        # Deleting is pruning: the trainer owns the checkpoints of its stage.
        allow(
            self.role,
            [
                "s3:AbortMultipartUpload",
                "s3:DeleteObject",
                "s3:ListMultipartUploadParts",
                "s3:PutObject",
            ],
            [bucket.arn_for_objects("runs/*")],
            reason="Checkpoints, metrics and models of runs are named at run time.",
        )
        allow_key(self.role, storage.key)
