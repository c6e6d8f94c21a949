"""What CreateTrainingJob refuses beyond its model: rules between fields."""

from typing import Any

from local_aws.sagemaker.engine import Record
from local_aws.sagemaker.errors import invalid

DEFAULT_MAX_RUNTIME_SECONDS = 86_400
SERVED_MODES = ("File", "FastFile")  # Pipe needs named pipes fed as the container reads


def check_training_job(request: Record) -> Record:
    """The job's record as far as the request gives it, defaults filled in.

    Raises:
        ApiError: a ValidationException in the service's words, or in ours for what is not served
            here.
    """
    algorithm = request.get("AlgorithmSpecification")
    if not algorithm or not algorithm.get("TrainingImage"):
        raise invalid("AlgorithmSpecification must contain TrainingImage.")
    if "ResourceConfig" not in request:
        raise invalid("ResourceConfig must be specified.")
    resources = request["ResourceConfig"]
    if not resources.get("InstanceType") or not resources.get("InstanceCount"):
        raise invalid("ResourceConfig must contain InstanceType and InstanceCount.")
    record = {**request, "StoppingCondition": _stopping_condition(request)}
    if request.get("EnableManagedSpotTraining") and resources.get("KeepAlivePeriodInSeconds"):
        raise invalid("KeepAlivePeriodInSeconds is not supported with managed spot training.")
    _check_channels(request, algorithm)
    return record


def _stopping_condition(request: Record) -> dict[str, Any]:
    condition = dict(request.get("StoppingCondition", {}))
    runtime = condition.setdefault("MaxRuntimeInSeconds", DEFAULT_MAX_RUNTIME_SECONDS)
    wait = condition.get("MaxWaitTimeInSeconds")
    if not request.get("EnableManagedSpotTraining"):
        if wait is not None:
            raise invalid(
                "Invalid MaxWaitTimeInSeconds. It is only supported when "
                "EnableManagedSpotTraining is set to true"
            )
    elif wait is None or wait < runtime:
        raise invalid(
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to "
            "MaxRuntimeInSeconds"
        )
    return condition


def _check_channels(request: Record, algorithm: dict[str, Any]) -> None:
    names: set[str] = set()
    for channel in request.get("InputDataConfig", ()):
        name = channel["ChannelName"]
        if name in names:
            raise invalid(f"Channel names must be unique; {name} is given twice.")
        names.add(name)
        mode = channel.get("InputMode", algorithm["TrainingInputMode"])
        if mode not in SERVED_MODES:
            raise invalid(f"The embedded SageMaker serves {SERVED_MODES}, not {mode} (in {name}).")
        source = channel["DataSource"].get("S3DataSource", {})
        if source.get("S3DataType") != "S3Prefix":
            raise invalid(f"The embedded SageMaker serves S3Prefix data sources only (in {name}).")
        # FastFile mounts a prefix as a folder; a prefix that is no whole folder has no mount point.
        if mode == "FastFile" and not source["S3Uri"].endswith("/"):
            raise invalid(f"With FastFile, S3Uri must end with a slash (in {name}).")
