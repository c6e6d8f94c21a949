"""Corrections to moto 5.2.5 that the embedded mode needs, each one a named function with its own
proof.

moto runs state machines for real, but differs from AWS in places that a control plane leans on.
Each function below changes one behaviour, says which, and has a test of its own that fails without
it (tests/e2e/test_moto_patches.py). The patches replace attributes of moto's classes, so they are
made once per process and stay.
"""

import copy
import datetime
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ExecutionListener = Callable[[Any], None]
ObjectListener = Callable[[str, str], None]
ObjectCreatedListener = Callable[[str, Any, Any], None]


NO_STREAM = "*"  # no stream can be called so
_START_SECONDS = 10.0

# The `reason` of S3's 'Object Created' event, by the name that moto gives the operation.
_REASONS = {
    "s3:ObjectCreated:Put": "PutObject",
    "s3:ObjectCreated:Post": "POST Object",
    "s3:ObjectCreated:Copy": "CopyObject",
    "s3:ObjectCreated:CompleteMultipartUpload": "CompleteMultipartUpload",
}


class Hooks:
    """What the patched moto calls out to; one LocalCloud at a time fills it and empties it
    again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all listeners and run waits at their real length."""
        self.execution_changed: list[ExecutionListener] = []
        self.object_changed: list[ObjectListener] = []
        self.object_created: list[ObjectCreatedListener] = []
        self.wait_speed = 1.0
        self.no_more_waits = threading.Event()


hooks = Hooks()


def stop_executions() -> None:
    """Take every execution off its path: what waits goes no further, what is in a task ends after.

    moto runs an execution in threads that nothing ends. One that was left would go on with its
    retries after its cloud, and call the services of whatever this process starts next.
    """
    from moto.stepfunctions.parser.models import stepfunctions_parser_backends as accounts

    hooks.no_more_waits.set()
    now = datetime.datetime.now(tz=datetime.UTC)
    backends = [backend for regions in accounts.values() for backend in regions.values()]
    for machine in [machine for backend in backends for machine in backend.state_machines]:
        for execution in list(machine.executions):
            if execution.status == "RUNNING":
                execution.stop(now, None, None)


def end_executions(seconds: float) -> bool:
    """Stop every execution, and what starts meanwhile; whether their threads end in ``seconds``."""
    from moto.stepfunctions.parser.utils import TMP_THREADS

    deadline = time.monotonic() + seconds
    while TMP_THREADS and time.monotonic() < deadline:
        stop_executions()
        for thread in [thread for thread in TMP_THREADS if thread.ident is not None]:
            thread.join(0.1)
            if not thread.is_alive():
                TMP_THREADS.remove(thread)
    return not TMP_THREADS


def create_machines_in_executing_backend() -> None:
    """CloudFormation put state machines into the backend that cannot run them."""
    import moto.stepfunctions.models as plain
    import moto.stepfunctions.parser.models as executing

    plain.stepfunctions_backends = executing.stepfunctions_parser_backends  # type: ignore[assignment]


def name_unnamed_executions() -> None:
    """An execution started without a name was called None, and the second of them was refused."""
    from moto.stepfunctions.parser.models import StepFunctionsParserBackend as Backend

    start = Backend.start_execution

    def start_execution(self: Any, arn: str, name: str | None = None, *args: Any) -> Any:
        return start(self, arn, name or str(uuid.uuid4()), *args)

    Backend.start_execution = start_execution  # type: ignore[method-assign,assignment]


def keep_failure_cause() -> None:
    """SendTaskFailure lost its `cause`."""
    from moto.core.responses import EmptyResult
    from moto.stepfunctions.responses import StepFunctionResponse

    def send_task_failure(self: Any) -> Any:
        self.stepfunction_backend.send_task_failure(
            self._get_param("taskToken"),
            error=self._get_param("error"),
            cause=self._get_param("cause"),
        )
        return EmptyResult()

    StepFunctionResponse.send_task_failure = send_task_failure  # type: ignore[method-assign]


def ignore_executions_without_environment() -> None:
    """A token sent while another execution was just starting (or restored from disk) was an
    internal error.
    """
    from moto.stepfunctions.parser.models import StepFunctionsParserBackend as Backend

    listed = Backend._get_executions

    def get_executions(self: Any, status: Any = None) -> list[Any]:
        running = (e for e in listed(self, status) if e.exec_worker is not None)
        return [e for e in running if e.exec_worker.env is not None]

    Backend._get_executions = get_executions  # type: ignore[method-assign]


def stop_waiting_executions() -> None:
    """StopExecution left an execution that waits for a task token RUNNING, and lost `error` and
    `cause`.
    """
    from moto.core.responses import ActionResult
    from moto.stepfunctions.parser.api import ExecutionStatus
    from moto.stepfunctions.parser.backend import execution as executions
    from moto.stepfunctions.responses import StepFunctionResponse

    stop = executions.Execution.stop
    reflect = executions.BaseExecutionWorkerCommunication._reflect_execution_status

    def stop_and_wake(self: Any, stop_date: Any, error: Any = None, cause: Any = None) -> None:
        deadline = time.monotonic() + _START_SECONDS
        why = getattr(self, "stop_reason", ("", ""))
        self.stop_reason = (error or why[0], cause or why[1])
        worker = self.exec_worker
        # The thread of an execution that has only just been started makes its environment.
        while worker and worker.env is None and time.monotonic() < deadline:
            time.sleep(0.01)
        stop(self, stop_date=stop_date, error=error, cause=cause)
        env = worker and worker.env
        for endpoint in list(env.callback_pool_manager._pool.values()) if env else []:
            endpoint.interrupt_all()

    def reflect_stop(self: Any) -> None:
        reflect(self)
        if hasattr(self.execution, "stop_reason"):
            # An interrupted callback surfaces as a failed task; the execution was stopped all the
            # same.
            self.execution.exec_status = ExecutionStatus.ABORTED
            error, cause = self.execution.stop_reason
            self.execution.error, self.execution.cause = error or None, cause or None

    def stop_execution(self: Any) -> Any:
        execution = self.stepfunction_backend.describe_execution(self._get_param("executionArn"))
        stop_date = datetime.datetime.now(tz=datetime.UTC)
        if execution.status == "RUNNING":
            execution.stop(stop_date, self._get_param("error"), self._get_param("cause"))
        return ActionResult({"stopDate": execution.stop_date or stop_date})

    executions.Execution.stop = stop_and_wake  # type: ignore[method-assign]
    executions.BaseExecutionWorkerCommunication._reflect_execution_status = reflect_stop  # type: ignore[method-assign]
    StepFunctionResponse.stop_execution = stop_execution  # type: ignore[method-assign]


def hear_early_answers() -> None:
    """An answer to a token sent before the task's function had returned was lost when the task has
    a heartbeat.
    """
    from moto.stepfunctions.parser.asl.eval.callback.callback import CallbackEndpoint

    setup = CallbackEndpoint.setup_heartbeat_endpoint

    def setup_heartbeat_endpoint(self: Any, heartbeat_seconds: int) -> Any:
        heartbeat = setup(self, heartbeat_seconds)
        if self.get_outcome() is not None:
            heartbeat.notify()
        return heartbeat

    CallbackEndpoint.setup_heartbeat_endpoint = setup_heartbeat_endpoint  # type: ignore[method-assign]


def write_dates_as_text() -> None:
    """Dates in an SDK result, or `$$.Execution.StartTime`, broke the execution; AWS writes them as
    ISO text.
    """
    from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
        state_task_service_aws_sdk as sdk,
    )
    from moto.stepfunctions.parser.backend.execution import Execution

    evaluate = sdk.StateTaskServiceAwsSdk._eval_service_task
    details = Execution.get_start_execution_details

    def eval_service_task(self: Any, env: Any, *args: Any, **kwargs: Any) -> None:
        evaluate(self, env, *args, **kwargs)
        env.stack[-1] = json.loads(json.dumps(env.stack[-1], default=_iso))

    def get_start_execution_details(self: Any) -> Any:
        started = details(self)
        started.start_time = _iso(started.start_time)
        return started

    sdk.StateTaskServiceAwsSdk._eval_service_task = eval_service_task  # type: ignore[method-assign]
    Execution.get_start_execution_details = get_start_execution_details  # type: ignore[method-assign]


def spell_sagemaker_errors() -> None:
    """Errors of aws-sdk:sagemaker tasks were spelt `sagemaker.…`; AWS spells them `SageMaker.…`."""
    from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
        state_task_service_aws_sdk as sdk,
    )

    sdk._SERVICE_ERROR_NAMES["sagemaker"] = "SageMaker"


def announce_executions() -> None:
    """Starts and ends of executions were silent; AWS sends 'Step Functions Execution Status
    Change'.
    """
    from moto.stepfunctions.parser.backend import execution as executions

    start = executions.Execution.start
    reflect = executions.BaseExecutionWorkerCommunication._reflect_execution_status

    # An execution is a thread that moto cannot end. It keeps the listeners of the cloud that
    # started it, which that cloud empties when it stops: a later cloud does not hear of it.
    def start_and_tell(self: Any) -> None:
        self.listeners, self.told = hooks.execution_changed, threading.Event()
        start(self)
        _tell(self.listeners, self)
        self.told.set()

    def reflect_and_tell(self: Any) -> None:
        self.execution.told.wait()  # The shortest execution may end before its start is told.
        reflect(self)
        _tell(self.execution.listeners, self.execution)

    executions.Execution.start = start_and_tell  # type: ignore[method-assign]
    executions.BaseExecutionWorkerCommunication._reflect_execution_status = reflect_and_tell  # type: ignore[method-assign]


def scale_waits() -> None:
    """Wait states and Retry intervals divide by `hooks.wait_speed`, so that hours pass in
    minutes.
    """
    from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl
    from moto.stepfunctions.parser.asl.component.state.wait.wait_function.wait_function import (
        WaitFunction,
    )

    def wait_interval(_: Any, env: Any, wait_seconds: float) -> None:
        deadline = time.monotonic() + wait_seconds / hooks.wait_speed
        while env.is_running() and (left := deadline - time.monotonic()) > 0:
            # The event is set for a moment only: a thread that was about to wait misses it.
            env.program_state_event.wait(min(left, 1.0))

    def sleep(seconds: float) -> None:
        hooks.no_more_waits.wait(seconds / hooks.wait_speed)

    WaitFunction._wait_interval = wait_interval  # type: ignore[method-assign,assignment]
    retrier_decl.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment]


def reuse_clients() -> None:
    """Every task built a new boto3 client, which was half of the time an execution took.

    A session has its own: whoever replaces the default one replaces where requests go.
    """
    import boto3
    from moto.stepfunctions.parser.asl.utils import boto_client

    clients: dict[tuple[Any, ...], Any] = {}
    building = threading.Lock()

    def client(**kwargs: Any) -> Any:
        if "endpoint_url" not in kwargs:
            return boto3.client(**kwargs)  # mock_aws is active: its clients die with it
        with building:
            if boto3.DEFAULT_SESSION is None:
                boto3.setup_default_session()
            where = ("service_name", "region_name", "endpoint_url")
            key = (boto3.DEFAULT_SESSION, *(kwargs[name] for name in where))
            if key not in clients:
                clients[key] = boto3.client(**kwargs)
            return clients[key]

    boto_client.boto3 = SimpleNamespace(client=client)  # type: ignore[assignment]


def parse_definitions_once() -> None:
    """Every execution parsed its machine's definition anew: half a second for one like ours."""
    from moto.stepfunctions.parser.asl.parse.asl_parser import AmazonStateLanguageParser as Parser

    parse = functools.lru_cache(maxsize=16)(Parser.parse)

    def parse_once(definition: str) -> tuple[Any, Any]:
        program, tree = parse(definition)
        return copy.deepcopy(program), tree  # Executions change what they run; nobody the tree.

    Parser.parse = staticmethod(parse_once)  # type: ignore[method-assign]


def read_attribute_values_directly() -> None:
    """Each of DynamoDB's ten types was looked for under four names in every attribute of every
    item: half of the time of a query.
    """
    from moto.core.serialize import ResponseSerializer

    pick = ResponseSerializer.get_value

    def get_value(self: Any, value: Any, key: str, shape: Any) -> Any:
        if type(value) is dict and getattr(shape.parent, "name", "") == "AttributeValue":
            return value.get(key)
        return pick(self, value, key, shape)

    ResponseSerializer.get_value = get_value  # type: ignore[method-assign]


def report_object_creation() -> None:
    """S3's EventBridge events all had one id, came twice for a multipart upload, and said so for
    every tagging.
    """
    from moto.s3 import notifications

    send = notifications.send_event

    def send_event(account_id: str, event_name: Any, bucket: Any, key: Any) -> None:
        if not hooks.object_created:
            send(account_id, event_name, bucket, key)
            return
        kind = str(event_name.value)
        inside_multipart = kind == "s3:ObjectCreated:Put" and key.multipart is not None
        if kind.startswith("s3:ObjectCreated:") and not inside_multipart:
            for listener in hooks.object_created:
                listener(_REASONS[kind], bucket, key)

    notifications.send_event = send_event


def observe_objects() -> None:
    """Objects live in memory only; the mirror on disk needs to hear of every write and delete."""
    from moto.s3.models import S3Backend

    put, delete = S3Backend.put_object, S3Backend.delete_object

    def put_object(self: Any, bucket_name: str, key_name: str, *args: Any, **kwargs: Any) -> Any:
        written = put(self, bucket_name, key_name, *args, **kwargs)
        for listener in hooks.object_changed:
            listener(bucket_name, key_name)
        return written

    def delete_object(self: Any, bucket_name: str, key_name: str, *args: Any, **kwargs: Any) -> Any:
        deleted = delete(self, bucket_name, key_name, *args, **kwargs)
        for listener in hooks.object_changed:
            listener(bucket_name, key_name)
        return deleted

    S3Backend.put_object = put_object  # type: ignore[method-assign]
    S3Backend.delete_object = delete_object  # type: ignore[method-assign]


def filter_logs_by_stream_prefix() -> None:
    """FilterLogEvents ignored `logStreamNamePrefix`, and did not interleave streams as AWS does."""
    from moto.logs.responses import LogsResponse

    def filter_log_events(self: Any) -> str:
        group, wanted = self._get_param("logGroupName"), self._get_param("logStreamNames", [])
        if prefix := self._get_param("logStreamNamePrefix"):
            known = (
                self.logs_backend.groups[group].streams if group in self.logs_backend.groups else ()
            )
            # No name at all would mean every stream.
            wanted = [name for name in known if name.startswith(prefix)] or [NO_STREAM]
        events, token, streams = self.logs_backend.filter_log_events(
            group,
            wanted,
            self._get_param("startTime"),
            self._get_param("endTime"),
            self._get_param("limit"),
            self._get_param("nextToken"),
            self._get_param("filterPattern"),
            interleaved=True,
        )
        answer = {"events": events, "nextToken": token, "searchedLogStreams": streams}
        return json.dumps(answer)

    LogsResponse.filter_log_events = filter_log_events  # type: ignore[method-assign]


# `announce_executions` wraps what `stop_waiting_executions` corrected, so the order matters.
ALL: tuple[Callable[[], None], ...] = (
    create_machines_in_executing_backend,
    name_unnamed_executions,
    keep_failure_cause,
    ignore_executions_without_environment,
    stop_waiting_executions,
    hear_early_answers,
    write_dates_as_text,
    spell_sagemaker_errors,
    announce_executions,
    scale_waits,
    reuse_clients,
    parse_definitions_once,
    read_attribute_values_directly,
    report_object_creation,
    observe_objects,
    filter_logs_by_stream_prefix,
)

_applied: set[str] = set()


def apply(*, without: str | None = None) -> None:
    """Make every patch (once per process); `without` leaves one out, to show what it is for."""
    for patch in ALL:
        if patch.__name__ not in _applied and patch.__name__ != without:
            patch()
            _applied.add(patch.__name__)


def _tell(listeners: list[ExecutionListener], execution: Any) -> None:
    for listener in listeners:
        listener(execution)


def _iso(value: Any) -> str:
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
