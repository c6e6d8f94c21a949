"""SageMaker training jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from lambdas.adapters.aws import as_transient, client, error_code, error_message
from lambdas.errors import JobExistsError, NoCapacityError, QuotaError, RequestRefusedError
from lambdas.logic.classify import is_capacity_error
from lambdas.logic.decide import Observation, Transition

__all__ = ["TrainingJobs"]


class TrainingJobs:
    """Create, look at and stop training jobs by name. A run's way needs no List call: names are
    deterministic."""

    def __init__(self) -> None:
        self._sagemaker = client("sagemaker")

    def create(self, request: Mapping[str, Any]) -> None:
        """CreateTrainingJob.

        Raises:
            JobExistsError: the name is taken, perhaps by this very attempt.
            QuotaError, NoCapacityError: try later or elsewhere.
            TransientError: try again.
            RequestRefusedError: it will not get better.
        """
        try:
            self._sagemaker.create_training_job(**request)
        except ClientError as error:
            code, message = error_code(error), error_message(error)
            if code in ("ResourceInUse", "ResourceInUseException"):
                raise JobExistsError(message) from error
            if code in ("ResourceLimitExceeded", "ResourceLimitExceededException"):
                raise QuotaError(message) from error
            if code == "CapacityError" or is_capacity_error(message):
                raise NoCapacityError(message) from error
            transient = as_transient(error)
            if transient is not None:
                raise transient from error
            raise RequestRefusedError(f"{code}: {message}") from error

    def describe(self, name: str) -> Observation | None:
        """What SageMaker says about a job; None when it knows none of that name."""
        try:
            answer = self._sagemaker.describe_training_job(TrainingJobName=name)
        except ClientError as error:
            if _missing(error):
                return None
            raise
        return Observation(
            status=answer["TrainingJobStatus"],
            secondary=answer["SecondaryStatus"],
            created_at=answer["CreationTime"],
            arn=answer["TrainingJobArn"],
            transitions=tuple(
                Transition(item["Status"], item["StartTime"])
                for item in answer.get("SecondaryStatusTransitions") or ()
            ),
            failure_reason=answer.get("FailureReason"),
            training_seconds=answer.get("TrainingTimeInSeconds"),
            billable_seconds=answer.get("BillableTimeInSeconds"),
            ended_at=answer.get("TrainingEndTime"),
            metrics={
                item["MetricName"]: float(item["Value"])
                for item in answer.get("FinalMetricDataList") or ()
                if "Value" in item
            },
        )

    def in_progress(self) -> list[str]:
        """Names of all jobs of the account that SageMaker lists as running, whoever made them."""
        pages = self._sagemaker.get_paginator("list_training_jobs").paginate(
            StatusEquals="InProgress"
        )
        return [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]

    def tags(self, arn: str) -> dict[str, str]:
        """The job's tags."""
        pages = self._sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}

    def stop(self, name: str) -> None:
        """StopTrainingJob; a job that has ended, or that nobody made, needs no stopping."""
        try:
            self._sagemaker.stop_training_job(TrainingJobName=name)
        except ClientError as error:
            # SageMaker answers a stop of an ended job with a ValidationException.
            if error_code(error) not in ("ValidationException", "ResourceNotFound"):
                raise


def _missing(error: ClientError) -> bool:
    if error_code(error) in ("ResourceNotFound", "ResourceNotFoundException"):
        return True
    words = error_message(error).lower()
    return error_code(error) == "ValidationException" and (
        "not found" in words or "could not find" in words
    )
