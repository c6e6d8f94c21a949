"""A SageMaker that does nothing by itself: a test moves its jobs and endpoints from state to state.

It refuses what the real one refuses (names in use, stopping what has ended, deleting what is being
created) and keeps every request, so that a test can count them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

ACCOUNT, REGION = "123456789012", "us-east-1"
TERMINAL = {"Completed", "Failed", "Stopped"}


class AwsError(Exception):
    """An error answer."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class FakeSageMaker:
    """Jobs, models, configurations, endpoints, components; thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.components: dict[str, dict[str, Any]] = {}
        self.targets: dict[str, dict[str, Any]] = {}
        self.policies: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.refusals: dict[str, list[AwsError]] = {}
        self.on_job: Callable[[dict[str, Any]], None] = lambda _: None
        self.on_endpoint: Callable[[dict[str, Any]], None] = lambda _: None
        self.after_create: Callable[[str], None] = lambda _: None
        self.answer: Callable[[Mapping[str, Any]], dict[str, Any]] = _chat_answer
        self.asked: list[dict[str, Any]] = []
        self.stop_works = True

    # -- what a test does --------------------------------------------------------------------------

    def refuse(self, operation: str, code: str, message: str, times: int = 1) -> None:
        """The next ``times`` calls of an operation fail so."""
        self.refusals.setdefault(operation, []).extend([AwsError(code, message)] * times)

    def job(self, name: str, timeout: float = 60) -> dict[str, Any]:
        """The job of this name, waited for."""
        return self._wait_for(lambda: self.jobs.get(name), f"job {name}", timeout)

    def endpoint(self, name: str, status: str = "Creating", timeout: float = 60) -> dict[str, Any]:
        """The endpoint of this name in this status, waited for."""

        def found() -> dict[str, Any] | None:
            endpoint = self.endpoints.get(name)
            return endpoint if endpoint and endpoint["EndpointStatus"] == status else None

        return self._wait_for(found, f"endpoint {name} {status}", timeout)

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 60) -> Any:
        """Wait for something that a call to this service brings about."""
        return self._wait_for(condition, what, timeout)

    def move(
        self, name: str, status: str, secondary: str, reason: str | None = None, *,
        tell: bool = True, at: float | None = None, **facts: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Put a job into a state and tell of it."""
        with self.lock:
            job = self.jobs[name]
            now = at if at is not None else time.time()
            job |= {"TrainingJobStatus": status, "SecondaryStatus": secondary,
                    "LastModifiedTime": time.time(), **facts}  # fmt: skip
            job["SecondaryStatusTransitions"].append({"Status": secondary, "StartTime": now})
            if status in TERMINAL:
                job["TrainingEndTime"] = now
            if reason is not None:
                job["FailureReason"] = reason
            shown = _public(job)
            self.changed.notify_all()
        if tell:
            self.on_job(shown)
        return shown

    def move_endpoint(
        self, name: str, status: str, reason: str | None = None, *, config: str | None = None,
        tell: bool = True,
    ) -> None:  # fmt: skip
        """Put an endpoint into a state and tell of it."""
        with self.lock:
            endpoint = self.endpoints[name]
            endpoint |= {"EndpointStatus": status, "LastModifiedTime": time.time()}
            endpoint["FailureReason"] = reason
            if config is not None:
                endpoint["EndpointConfigName"] = config
            shown = {k: v for k, v in _public(endpoint).items() if v is not None}
            self.changed.notify_all()
        if tell:
            self.on_endpoint(shown)

    # -- the service -------------------------------------------------------------------------------

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the JSON protocol."""
        with self.lock:
            self.calls[operation] += 1
            if self.refusals.get(operation):
                raise self.refusals[operation].pop(0)
            answer: dict[str, Any] = getattr(self, f"do_{operation}")(request) or {}
            self.changed.notify_all()
        if operation.startswith("Create"):
            self.after_create(operation)
        return answer

    def invoke(self, name: str, body: bytes) -> dict[str, Any]:
        """`/invocations` of an endpoint."""
        with self.lock:
            self.calls["InvokeEndpoint"] += 1
            if self.refusals.get("InvokeEndpoint"):
                raise self.refusals["InvokeEndpoint"].pop(0)
            if self.endpoints.get(name, {}).get("EndpointStatus") != "InService":
                raise AwsError("ValidationError", f"Endpoint {name} of account not found.")
            document = json.loads(body)
            self.asked.append(document)
        return self.answer(document)

    def do_CreateTrainingJob(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["TrainingJobName"]
        if name in self.jobs:
            raise AwsError("ResourceInUse", f"Training job names must be unique ... {name}")
        now = time.time()
        arn = _arn("training-job", name)
        self.jobs[name] = {
            **request,
            "TrainingJobArn": arn,
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": now}],
            "CreationTime": now,
            "LastModifiedTime": now,
        }
        return {"TrainingJobArn": arn}

    def do_DescribeTrainingJob(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["TrainingJobName"]
        if name not in self.jobs:
            raise AwsError("ValidationException", "Requested resource not found.")
        return _public(self.jobs[name])

    def do_StopTrainingJob(self, request: dict[str, Any]) -> None:  # noqa: N802
        name = request["TrainingJobName"]
        if name not in self.jobs:
            raise AwsError("ValidationException", "Requested resource not found.")
        job = self.jobs[name]
        if job["TrainingJobStatus"] in TERMINAL:
            status = job["TrainingJobStatus"]
            raise AwsError("ValidationException", f"The request was rejected because the training "
                                                  f"job is in status {status}.")  # fmt: skip
        if self.stop_works and job["TrainingJobStatus"] != "Stopping":
            self.move(name, "Stopping", "Stopping", tell=False)

    def do_ListTrainingJobs(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        shown = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingJobStatus")
        wanted = request.get("StatusEquals")
        found = [job for job in self.jobs.values() if wanted in (None, job["TrainingJobStatus"])]
        return {"TrainingJobSummaries": [{key: job[key] for key in shown} for job in found]}

    def do_ListTags(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        kind, name = request["ResourceArn"].split(":")[-1].split("/", 1)
        found = {"training-job": self.jobs, "endpoint": self.endpoints}[kind][name]
        return {"Tags": found.get("Tags", [])}

    def do_CreateModel(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"ModelArn": self._new(self.models, request["ModelName"], request, "model")}

    def do_CreateEndpointConfig(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["EndpointConfigName"]
        return {"EndpointConfigArn": self._new(self.configs, name, request, "endpoint-config")}

    def do_CreateInferenceComponent(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["InferenceComponentName"]
        arn = self._new(self.components, name, request, "inference-component")
        self.components[name]["InferenceComponentStatus"] = "InService"
        return {"InferenceComponentArn": arn}

    def do_DescribeInferenceComponent(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return _public(_get(self.components, request["InferenceComponentName"]))

    def do_DescribeEndpointConfig(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return _public(_get(self.configs, request["EndpointConfigName"]))

    def do_CreateEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        _get(self.configs, request["EndpointConfigName"])
        arn = self._new(self.endpoints, request["EndpointName"], request, "endpoint")
        self.endpoints[request["EndpointName"]]["EndpointStatus"] = "Creating"
        return {"EndpointArn": arn}

    def do_UpdateEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        endpoint = _get(self.endpoints, request["EndpointName"])
        if endpoint["EndpointStatus"] != "InService":
            raise AwsError("ValidationException", "Cannot update in-progress endpoint")
        _get(self.configs, request["EndpointConfigName"])
        endpoint |= {"EndpointStatus": "Updating", "LastModifiedTime": time.time(),
                     "_next": request["EndpointConfigName"],
                     "_guard": request.get("DeploymentConfig")}  # fmt: skip
        return {"EndpointArn": endpoint["EndpointArn"]}

    def do_DescribeEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        found = _public(_get(self.endpoints, request["EndpointName"]))
        return {key: value for key, value in found.items() if value is not None}

    def do_DeleteEndpoint(self, request: dict[str, Any]) -> None:  # noqa: N802
        endpoint = _get(self.endpoints, request["EndpointName"])
        if endpoint["EndpointStatus"] in ("Creating", "Updating"):
            raise AwsError("ValidationException", "Cannot update in-progress endpoint")
        del self.endpoints[request["EndpointName"]]

    def do_DeleteEndpointConfig(self, request: dict[str, Any]) -> None:  # noqa: N802
        _get(self.configs, request["EndpointConfigName"])
        del self.configs[request["EndpointConfigName"]]

    def do_DeleteModel(self, request: dict[str, Any]) -> None:  # noqa: N802
        _get(self.models, request["ModelName"])
        del self.models[request["ModelName"]]

    def do_DeleteInferenceComponent(self, request: dict[str, Any]) -> None:  # noqa: N802
        _get(self.components, request["InferenceComponentName"])
        del self.components[request["InferenceComponentName"]]

    # Application Auto Scaling: moto does not know inference components.

    def do_RegisterScalableTarget(self, request: dict[str, Any]) -> None:  # noqa: N802
        self.targets[request["ResourceId"]] = request

    def do_PutScalingPolicy(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        assert request["ResourceId"] in self.targets
        resource, name = request["ResourceId"], request["PolicyName"]
        self.policies[resource, name] = request
        return {"PolicyARN": policy_arn(resource, name), "Alarms": []}

    def do_DeregisterScalableTarget(self, request: dict[str, Any]) -> None:  # noqa: N802
        if request["ResourceId"] not in self.targets:
            raise AwsError("ObjectNotFoundException", "No scalable target found")
        del self.targets[request["ResourceId"]]
        for key in [key for key in self.policies if key[0] == request["ResourceId"]]:
            del self.policies[key]

    def _new(
        self, shelf: dict[str, dict[str, Any]], name: str, request: dict[str, Any], kind: str
    ) -> str:
        if name in shelf:
            raise AwsError("ValidationException", f"Cannot create already existing {kind} {name}")
        now = time.time()
        arn_key = "".join(part.capitalize() for part in kind.split("-")) + "Arn"
        shelf[name] = {
            **request, arn_key: _arn(kind, name), "CreationTime": now, "LastModifiedTime": now,
        }  # fmt: skip
        return _arn(kind, name)

    def _wait_for(self, condition: Callable[[], Any], what: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        with self.changed:
            while not (found := condition()):
                if time.monotonic() > deadline:
                    raise AssertionError(f"{what} did not come within {timeout:g} s")
                self.changed.wait(0.2)
            return found


def policy_arn(resource: str, name: str) -> str:
    """ARN of a scaling policy."""
    return (
        f"arn:aws:autoscaling:{REGION}:{ACCOUNT}:scalingPolicy:1:resource/sagemaker/{resource}"
        f":policyName/{name}"
    )


def _arn(kind: str, name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{kind}/{name}"


def _get(shelf: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in shelf:
        raise AwsError("ValidationException", f'Could not find "{name}".')
    return shelf[name]


def _public(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({k: v for k, v in record.items() if not k.startswith("_")}))


def _chat_answer(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": "right, down"}}]}
