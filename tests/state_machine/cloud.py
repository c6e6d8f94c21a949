"""The control plane on real parts: moto's S3, DynamoDB and Step Functions interpreter, our
handlers in this process, and a SageMaker that the test moves.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from aws_lambda_powertools.metrics import EphemeralMetrics
from botocore.awsrequest import AWSResponse
from moto.core.config import default_user_config
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Request, Response

from contracts import events
from contracts.checkpoints import Flag, FlagFile, write_flag
from contracts.layout import RunLayout, StageLayout
from contracts.model_manifest import ManifestFile, ModelManifest
from contracts.states import RunState, is_terminal
from lambdas import hub as hub_module
from lambdas.adapters import aws
from lambdas.functions import FUNCTIONS, STATE_MACHINE_TASKS, function
from lambdas.logic.folder import RunFolder
from lambdas.schema import INDEXES, PARTITION_KEY, SORT_KEY
from local_aws import moto_patches
from tests.state_machine import wire
from tests.state_machine.sagemaker import ACCOUNT, REGION, AwsError, FakeSageMaker

ASL = Path(__file__).parents[2] / "state_machines" / "grpo_run.asl.json"
BUCKET, TABLE = "run-bucket", "run-table"
URL = "http://127.0.0.1:9"  # Nobody listens there: requests never leave the process.
_SIDE_EFFECTS = {
    "PutItem", "UpdateItem", "DeleteItem", "TransactWriteItems", "PutObject", "DeleteObject",
    "CreateTrainingJob", "StopTrainingJob", "CreateModel", "CreateEndpointConfig",
    "CreateEndpoint", "UpdateEndpoint", "DeleteEndpoint", "DeleteEndpointConfig", "DeleteModel",
    "SendTaskSuccess", "StartExecution", "StopExecution", "CreateInferenceComponent",
    "PutMetricAlarm", "DeleteAlarms",
}  # fmt: skip

_IAM_PREFIXES = {
    "application-autoscaling": "application-autoscaling",
    "logs": "logs",
    "monitoring": "cloudwatch",
    "sagemaker": "sagemaker",
    "states": "states",
}
"""Of services whose operations and IAM actions have the same names, by signing name."""


class CrashError(BaseException):
    """The function's process died here."""


class Context:
    function_name, memory_limit_in_mb = "function", 512
    invoked_function_arn, aws_request_id = "arn:aws:lambda:::function", "request"


class _Running(threading.local):
    """The function whose code a thread runs; None in a test's own."""

    name: str | None = None


class _MetricsPerThread(threading.local, EphemeralMetrics):
    """One function's metrics were flushed while another's were being added: here many run at once
    in one process."""


class Cloud:
    """One process's cloud; `fresh` empties it between tests."""

    def __init__(self) -> None:
        self.sagemaker = FakeSageMaker()
        self.pool = ThreadPoolExecutor(16)
        self._on_their_way: list[Future[None]] = []
        self.drop_events = False
        self.repeat_events = 1
        self.invocations: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.objects_read: list[str] = []
        self.recording: list[str] | None = None
        self.crash_at: int | None = None
        self.effects = 0
        self.machine_arn = ""
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._services: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._running = _Running()
        self._one_request = threading.Lock()

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._environment = os.environ.copy()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": REGION, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": URL,
            "AWS_EC2_METADATA_DISABLED": "true",
            "POWERTOOLS_SERVICE_NAME": "grpohub", "POWERTOOLS_METRICS_NAMESPACE": "GrpoHub",
            "POWERTOOLS_LOG_LEVEL": "CRITICAL",
            "TABLE_NAME": TABLE, "BUCKET_NAME": BUCKET,
            "TRAINING_IMAGE_URI": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
            "TRAINING_ROLE_ARN": f"arn:aws:iam::{ACCOUNT}:role/training",
            "INFERENCE_IMAGE_URI": "123456789012.dkr.ecr.us-east-1.amazonaws.com/serve:1",
            "INFERENCE_ROLE_ARN": f"arn:aws:iam::{ACCOUNT}:role/inference",
            "REWARD_DRY_RUN_FUNCTION": "reward_dry_run", "KMS_KEY_ARN": "", "VPC_SUBNET_IDS": "",
            "VPC_SECURITY_GROUP_IDS": "", "ENCRYPT_INTER_CONTAINER_TRAFFIC": "false",
            "STACK_NAME": "GrpoHub",
        }  # fmt: skip
        self._metrics = _use_metrics(_MetricsPerThread())
        wire.answer_in_process(self._app)
        default_user_config["stepfunctions"] = {"execute_state_machine": True}
        moto_patches.apply()
        _forget_clients()
        self.states = boto3.client("stepfunctions")
        self.s3 = boto3.client("s3")
        self.dynamodb = boto3.client("dynamodb")
        for service in (
            "application-autoscaling", "cloudwatch", "dynamodb", "logs", "s3", "sagemaker",
            "sagemaker-runtime", "stepfunctions",
        ):  # fmt: skip
            self._watch(aws.client(service))
        self._watch(aws.resource("dynamodb").meta.client)

    def stop(self) -> None:
        moto_patches.hooks.execution_changed.clear()  # Executions keep this very list.
        _end_executions()
        moto_patches.hooks.clear()
        wire.connect_as_before()
        _use_metrics(self._metrics)
        self.pool.shutdown(wait=False)
        os.environ.clear()
        os.environ.update(self._environment)
        default_user_config["stepfunctions"] = {"execute_state_machine": False}
        _forget_clients()

    def fresh(self) -> None:
        """Empty everything; executions of earlier tests are stopped."""
        moto_patches.hooks.execution_changed.clear()  # Executions keep this very list.
        _end_executions()
        wire.post(self._app, f"{URL}/moto-api/reset")
        self.sagemaker.__init__()  # type: ignore[misc]
        self.sagemaker.on_job = self._tell_job
        self.sagemaker.on_endpoint = self._tell_endpoint
        self.drop_events, self.repeat_events = False, 1
        self.invocations.clear()
        self.requests.clear()
        self.objects_read.clear()
        self.recording, self.crash_at, self.effects = None, None, 0
        self.s3.create_bucket(Bucket=BUCKET)
        self._create_table()
        self.use_machine(self.create_machine())
        hooks = moto_patches.hooks
        hooks.clear()
        hooks.wait_speed = 40.0
        hooks.execution_changed.append(self._tell_execution)
        hooks.object_created.append(self._tell_object)
        self.s3.put_object(Bucket=BUCKET, Key="inputs/train.jsonl", Body=b'{"problem": "2+2?"}\n')
        self.s3.put_object(
            Bucket=BUCKET, Key="inputs/val.jsonl", Body=b'{"problem": "3+3?", "answer": "6"}\n'
        )
        self.s3.put_object(Bucket=BUCKET, Key="inputs/model/config.json", Body=b"{}")

    def create_machine(self, change: Callable[[dict[str, Any]], None] | None = None) -> str:
        """A state machine of the definition in the repository, `change`d for a test of timeouts."""
        text = ASL.read_text()
        for task in STATE_MACHINE_TASKS:
            arn = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{task.name}"
            text = text.replace(f"${{{task.substitution}}}", arn)
        definition = json.loads(text)
        if change is not None:
            change(definition)
        answer = self.states.create_state_machine(
            name=f"grpo-run-{uuid.uuid4().hex[:8]}",
            definition=json.dumps(definition),
            roleArn=f"arn:aws:iam::{ACCOUNT}:role/states",
        )
        arn: str = answer["stateMachineArn"]
        return arn

    def use_machine(self, arn: str) -> None:
        """Start further runs with this state machine."""
        self.machine_arn = os.environ["STATE_MACHINE_ARN"] = arn

    # -- what a test asks --------------------------------------------------------------------------

    def invoke(self, name: str, event: dict[str, Any]) -> Any:
        """Run a handler here, as Lambda would."""
        self.invocations[name] += 1
        if function(name).code == "rewards":
            return _run_reward_function(event)
        module = importlib.import_module(f"lambdas.handlers.{name}")
        assert module.handler is not None
        assert function(name).name == name
        caller, self._running.name = self._running.name, name
        try:
            return module.handler(json.loads(json.dumps(event)), Context())
        finally:
            self._running.name = caller

    def api(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None,
        **query: str,
    ) -> tuple[int, dict[str, Any]]:  # fmt: skip
        """A request to the HTTP API: (status, document)."""
        event = {
            "version": "2.0", "routeKey": "ANY /v1/{proxy+}", "rawPath": path,
            "rawQueryString": "&".join(f"{k}={v}" for k, v in query.items()),
            "queryStringParameters": query or None,
            "headers": {"content-type": "application/json", **(headers or {})},
            "body": None if body is None else json.dumps(body), "isBase64Encoded": False,
            "requestContext": {
                "http": {"method": method, "path": path, "sourceIp": "127.0.0.1"},
                "requestId": "request-1", "stage": "$default",
            },
        }  # fmt: skip
        # A function's process has one event at a time; Powertools' router lives in the module.
        with self._one_request:
            answer = self.invoke("api", event)
        text = answer.get("body") or "{}"
        return answer["statusCode"], json.loads(text)

    def submit(self, spec: dict[str, Any], files: dict[str, str] | None = None) -> str:
        """Start a run through the API; its id."""
        status, document = self.api("POST", "/v1/runs", {"spec": spec, "files": files or {}})
        assert status == 201, document
        run_id: str = document["run_id"]
        return run_id

    def folder(self, run_id: str) -> RunFolder:
        folder = hub_module.hub().table.load(run_id)
        assert folder is not None
        return folder

    def wait(self, run_id: str, *states: RunState, timeout: float = 60) -> RunFolder:
        """The run, once it is in one of the states (default: any terminal one)."""
        deadline = time.monotonic() + timeout
        while True:
            folder = self.folder(run_id)
            if folder.run.state in states or (not states and is_terminal(folder.run.state)):
                return folder
            if time.monotonic() > deadline:
                raise AssertionError(f"{run_id} stays {folder.run.state}: {folder.attempts[-1:]}")
            time.sleep(0.1)

    def wait_execution(self, run_id: str, timeout: float = 60) -> str:
        """The end of the run's present execution."""
        deadline = time.monotonic() + timeout
        while True:
            arn = self.folder(run_id).run.execution_arn
            status: str = self.states.describe_execution(executionArn=arn)["status"]
            if status != "RUNNING":
                return status
            assert time.monotonic() < deadline, f"execution of {run_id} goes on"
            time.sleep(0.1)

    def history(self, run_id: str) -> list[str]:
        """Names of the states entered, in order."""
        arn = self.folder(run_id).run.execution_arn
        answer = self.states.get_execution_history(executionArn=arn, maxResults=1000)
        return [
            event["stateEnteredEventDetails"]["name"]
            for event in answer["events"]
            if "stateEnteredEventDetails" in event
        ]

    def transitions(self, run_id: str) -> int:
        return len(self.history(run_id))

    def reconcile(self) -> dict[str, int]:
        answer: dict[str, int] = self.invoke("reconcile", {})
        return answer

    # -- what a training job does ------------------------------------------------------------------

    def train(self, name: str) -> dict[str, Any]:
        self.sagemaker.job(name)
        return self.sagemaker.move(name, "InProgress", "Training")

    def complete(self, name: str, layout: StageLayout, step: int = 20) -> None:
        """Export a model and end the job."""
        self.export(layout, step)
        self.sagemaker.move(
            name, "Completed", "Completed", TrainingTimeInSeconds=100, BillableTimeInSeconds=30
        )

    def export(self, layout: StageLayout, step: int = 20) -> None:
        bodies = {"config.json": b"{}", "weights": f"weights of step {step}".encode()}
        for name, body in bodies.items():
            self.s3.put_object(Bucket=BUCKET, Key=f"{layout.model_prefix}{name}", Body=body)
        files = [
            ManifestFile(path=name, size=len(body), sha256=hashlib.sha256(body).hexdigest())
            for name, body in bodies.items()
        ]
        manifest = ModelManifest(
            run_id=layout.run.run_id, stage=layout.name, step=step, architecture="Tiny",
            parameters=1, dtype="float32", base_model="tiny",
            files=tuple(files),
        )  # fmt: skip
        self.s3.put_object(
            Bucket=BUCKET, Key=layout.model_manifest, Body=manifest.model_dump_json().encode()
        )

    def checkpoint(
        self, layout: StageLayout, step: int, attempt: int, *, generation: str | None = None,
        hosts: int = 1, flagged: int | None = None,
    ) -> str:  # fmt: skip
        """Write a checkpoint of ``hosts`` hosts, of which ``flagged`` have finished."""
        generation = generation or f"20260101T00000{attempt}.000000-{attempt}"
        for host in range(hosts):
            key = f"{layout.host_prefix(step, generation, host)}shard"
            self.s3.put_object(Bucket=BUCKET, Key=key, Body=b"12345")
            if host >= (hosts if flagged is None else flagged):
                continue
            flag = Flag(
                run_id=layout.run.run_id, stage=layout.name, step=step, attempt=attempt,
                generation=generation, host_rank=host, num_hosts=hosts, world_size=hosts,
                files=(FlagFile(key=key, size=5, sha256="0" * 64),),
            )  # fmt: skip
            self.s3.put_object(
                Bucket=BUCKET, Key=layout.flag(step, generation, host), Body=write_flag(flag)
            )
        return generation

    def serve(self, name: str) -> None:
        """The endpoint comes up, with the configuration it was last given."""
        endpoint = self.sagemaker.endpoints[name]
        self.sagemaker.move_endpoint(
            name, "InService", config=endpoint.get("_next", endpoint["EndpointConfigName"])
        )

    # -- events ------------------------------------------------------------------------------------

    def deliver(self, name: str, event: dict[str, Any]) -> None:
        """Deliver an event as EventBridge does: again after a failure, perhaps more than once."""
        for _ in range(self.repeat_events):
            for _ in range(4):
                try:
                    self.invoke(name, event)
                    break
                except (Exception, CrashError):  # noqa: BLE001 (Lambda does not ask either)
                    time.sleep(0.01)

    def _tell_job(self, job: dict[str, Any]) -> None:
        if not self.drop_events:
            self.deliver("on_training_event", events.training_job_event(_with_times(job)))

    def _tell_endpoint(self, endpoint: dict[str, Any]) -> None:
        if not self.drop_events:
            self.deliver("on_endpoint_event", events.endpoint_event(_with_times(endpoint)))

    def _tell_execution(self, execution: Any) -> None:
        status = str(getattr(execution.exec_status, "value", execution.exec_status))
        if self.drop_events or status == "RUNNING":
            return
        arn = execution.exec_arn
        event = events.execution_event(
            {
                "executionArn": arn,
                "stateMachineArn": self.machine_arn,
                "name": arn.rsplit(":", 1)[1],
                "status": status,
                "error": getattr(execution, "error", None),
                "cause": getattr(execution, "cause", None),
            }
        )
        self._deliver_soon("on_execution_status", event)

    def _tell_object(self, _: str, bucket: Any, key: Any) -> None:
        if self.drop_events or not re.match(r"uploads/|recipes/|runs/.*(\.flag|/hosts/)", key.name):
            return
        event = events.object_created_event(
            bucket.name,
            key.name,
            size=key.size,
            etag=key.etag.strip('"'),
            version_id=key.version_id,
        )
        self._deliver_soon("on_object_created", event)

    def _deliver_soon(self, name: str, event: dict[str, Any]) -> None:
        self._on_their_way.append(self.pool.submit(self.deliver, name, event))

    def settle(self) -> None:
        """Wait until every event that was sent has been dealt with."""
        while self._on_their_way:
            self._on_their_way.pop().result()

    # -- permissions and crash injection -----------------------------------------------------------

    def _watch(self, client: Any) -> None:
        client.meta.events.register("before-call.*.*", self._before_call)
        client.meta.events.register("after-call.*.*", self._after_call)

    def _before_call(self, model: Any, **_: Any) -> tuple[AWSResponse, dict[str, Any]] | None:
        """Answer in IAM's place a call that the running function's role does not allow."""
        name = self._running.name
        prefix = _IAM_PREFIXES.get(model.service_model.signing_name)
        if name is None or prefix is None:
            return None
        action = f"{prefix}:{model.name}"
        if any(action in permission.actions for permission in function(name).permissions):
            return None
        message = f"{name} is not authorized to perform: {action}"
        answer = {
            "Error": {"Code": "AccessDeniedException", "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": 403},
        }
        return AWSResponse(URL, 403, {}, None), answer

    def _after_call(self, model: Any, http_response: Any, **_: Any) -> None:
        self.requests[model.name] += 1
        if model.name not in _SIDE_EFFECTS or http_response.status_code >= 300:
            return
        with self._lock:
            self.effects += 1
            if self.recording is not None:
                self.recording.append(model.name)
            crash = self.crash_at == self.effects
        if crash:
            raise CrashError(f"after {model.name}, side effect {self.effects}")

    # -- HTTP --------------------------------------------------------------------------------------

    def _app(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(environ)
        scope = re.search(
            r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4", request.headers.get("Authorization", "")
        )
        service = scope[1] if scope else ""
        if service == "lambda":
            return self._lambda(request)(environ, start_response)
        if service in ("sagemaker", "application-autoscaling"):
            return self._sagemaker(request)(environ, start_response)
        if service == "s3" and request.method == "GET":
            self.objects_read.append(request.path.partition(f"/{BUCKET}/")[2])
        # moto looks through the files of all its services to tell whose a request is.
        if service not in self._services:
            self._services[service] = self._moto.get_application(environ)
        return self._services[service](environ, start_response)

    def _lambda(self, request: Request) -> Response:
        name = request.path.split("/functions/")[1].split("/")[0].split(":")[-1].split("%3A")[-1]
        headers = {"x-amzn-RequestId": str(uuid.uuid4())}
        try:
            answer = self.invoke(name, json.loads(request.get_data() or b"{}"))
        except CrashError as crash:
            headers["X-Amz-Function-Error"] = "Unhandled"
            answer = {"errorType": "Runtime.ExitError", "errorMessage": str(crash)}
        except Exception as error:  # noqa: BLE001 (Lambda does not ask either)
            headers["X-Amz-Function-Error"] = "Unhandled"
            answer = {"errorType": type(error).__name__, "errorMessage": str(error)}
        return Response(json.dumps(answer), headers=headers, content_type="application/json")

    def _sagemaker(self, request: Request) -> Response:
        kind = "application/x-amz-json-1.1"
        try:
            if request.path.startswith("/endpoints/"):
                answer = self.sagemaker.invoke(request.path.split("/")[2], request.get_data())
            else:
                operation = request.headers["X-Amz-Target"].split(".")[1]
                answer = self.sagemaker.call(operation, json.loads(request.get_data()))
        except AwsError as error:
            body = json.dumps({"__type": error.code, "message": error.message})
            headers = {"x-amzn-ErrorType": error.code}
            return Response(body, error.status, headers=headers, content_type=kind)
        return Response(json.dumps(answer), content_type=kind)

    def _create_table(self) -> None:
        names = {PARTITION_KEY, SORT_KEY}
        names |= {n for index in INDEXES.values() for n in (index.partition_key, index.sort_key)}
        self.dynamodb.create_table(
            TableName=TABLE,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[
                {"AttributeName": name, "AttributeType": "S"} for name in sorted(names)
            ],
            KeySchema=_key_schema(PARTITION_KEY, SORT_KEY),
            GlobalSecondaryIndexes=[
                {
                    "IndexName": index.name,
                    "KeySchema": _key_schema(index.partition_key, index.sort_key),
                    "Projection": {"ProjectionType": "ALL"},
                }
                for index in INDEXES.values()
            ],
        )


@contextmanager
def running_cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.start()
    try:
        yield cloud
    finally:
        cloud.stop()


def stage_layout(run_id: str, index: int = 0, name: str = "sft") -> StageLayout:
    return RunLayout(run_id).stage(index, name)


def _key_schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]


def _with_times(description: dict[str, Any]) -> dict[str, Any]:
    return {
        key: int(value * 1000) if key.endswith("Time") and isinstance(value, float) else value
        for key, value in description.items()
        if key != "SecondaryStatusTransitions"
    }


def _run_reward_function(event: dict[str, Any]) -> Any:
    """The function whose code is the trainer's: in a process of its own, from which it hides."""
    script = (
        "import json, sys\n"
        "from training_container.rewards.reward_dry_run import handler\n"
        "print(json.dumps(handler(json.load(sys.stdin), None)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(event),
        env={**os.environ, "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1769"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _use_metrics(metrics: Any) -> Any:
    """Let the handlers count in ``metrics``; what they counted in before."""
    from lambdas import observability  # Reads the environment that the cloud sets.
    from lambdas.handlers import _entry

    before = observability.metrics
    observability.metrics = _entry.metrics = metrics
    return before


def _end_executions() -> None:
    assert moto_patches.end_executions(60), "an execution goes on, and would into the next test"


def _forget_clients() -> None:
    aws.client.cache_clear()
    aws.resource.cache_clear()
    hub_module.hub.cache_clear()


assert FUNCTIONS
