"""Lambda: the deployed handlers in worker processes, driven by AWS's own runtime client
(awslambdaric).

A worker asks us for its next invocation over the Lambda runtime API, exactly as it asks AWS; its
address carries the function's and the worker's name. One worker serves one invocation at a time, as
on AWS.
"""

import itertools
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from werkzeug.wrappers import Request, Response

from local_aws.logs import LogShipper
from local_aws.site import Site

MAX_WORKERS = 4
PATIENCE_SECONDS = 1.0
INIT_SECONDS = 60.0  # AWS allows 10 s; importing on a busy laptop takes longer
ASYNC_RETRY_SECONDS = (60.0, 120.0)
_WATCH_SECONDS = 0.2


@dataclass(frozen=True)
class FunctionConfig:
    """A function as the template describes it; `code` and `layers` are folders."""

    name: str
    handler: str
    code: Path
    layers: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 3.0
    memory_mb: int = 128
    async_retries: int = 2
    dead_letter_arn: str | None = None
    on_failure_arn: str | None = None


@dataclass(frozen=True)
class Result:
    """What an invocation answered; `error` is AWS's X-Amz-Function-Error, set when the function
    failed.
    """

    payload: bytes
    error: str | None = None


class FunctionNotFoundError(Exception):
    """No deployed function has this name."""


class _Invocation:
    def __init__(self, payload: bytes) -> None:
        self.id = str(uuid.uuid4())
        self.payload = payload
        self.started_at: float | None = None
        self.done = threading.Event()
        self.result: Result | None = None

    def finish(self, result: Result) -> None:
        if not self.done.is_set():
            self.result = result
            self.done.set()


class _Worker:
    """One sandbox: a process that lives on from invocation to invocation until it fails or times
    out.
    """

    _numbers = itertools.count(1)

    def __init__(self, site: Site, logs: LogShipper, config: FunctionConfig) -> None:
        self.name = f"w{next(self._numbers)}"
        self._site, self._logs, self._config = site, logs, config
        self._mailbox: queue.SimpleQueue[_Invocation] = queue.SimpleQueue()
        self._current: _Invocation | None = None
        self._tail: deque[str] = deque(maxlen=50)
        self._process: subprocess.Popen[bytes] | None = None
        self._life = threading.Lock()

    def invoke(self, invocation: _Invocation) -> Result:
        """Run one invocation to its end: an answer, a timeout, or the death of the process."""
        with self._life:
            # Whoever stops the cloud kills the workers after this is set: none starts after that.
            if self._site.stopping.is_set():
                return _stopping()
            if self._process is None or self._process.poll() is not None:
                self._start()
        self._current = invocation
        self._mailbox.put(invocation)
        asked_at = time.monotonic()
        while not invocation.done.wait(_WATCH_SECONDS):
            if self._site.stopping.is_set():
                return _stopping()
            started = invocation.started_at
            limit = self._config.timeout_seconds if started else INIT_SECONDS
            if time.monotonic() - (started or asked_at) > limit:
                self.kill()
                return _timed_out(invocation, limit)
            process = self._process  # None as soon as another thread has killed it
            if process is not None and process.poll() is not None:
                return self._died(invocation, process.returncode)
        assert invocation.result is not None
        return invocation.result

    def next(self) -> _Invocation:
        """The runtime client asks for work; blocks until there is some."""
        invocation = self._mailbox.get()
        invocation.started_at = time.monotonic()
        return invocation

    def settle(self, request_id: str, result: Result) -> None:
        """The runtime client answers an invocation; a late answer to a timed-out one is dropped."""
        if self._current is not None and self._current.id == request_id:
            self._current.finish(result)

    def kill(self) -> None:
        """End the process at once."""
        with self._life:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            # The request thread that waits for the dead process's next invocation must not take a
            # later one.
            self._mailbox = queue.SimpleQueue()

    def _start(self) -> None:
        self._mailbox = queue.SimpleQueue()
        self._tail.clear()
        config = self._config
        stream = time.strftime("%Y/%m/%d/") + f"[$LATEST]{uuid.uuid4().hex}"
        path = [str(config.code), *(str(layer) for layer in config.layers)]
        environment = {
            **{k: os.environ[k] for k in ("PATH", "HOME", "LANG") if k in os.environ},
            **self._site.credentials(),
            # There is no X-Ray daemon here, nor under `sam local`, which says so in the same way.
            "POWERTOOLS_TRACE_DISABLED": "true",
            "AWS_XRAY_SDK_ENABLED": "false",
            **config.environment,
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self._site.port}/_rt/{config.name}/{self.name}",
            "AWS_LAMBDA_FUNCTION_NAME": config.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(config.memory_mb),
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{config.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": stream,
            "AWS_EXECUTION_ENV": "AWS_Lambda_python3.13",
            "LAMBDA_TASK_ROOT": str(config.code),
            "_HANDLER": config.handler,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "awslambdaric", config.handler],
            cwd=config.code,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        group = f"/aws/lambda/{config.name}"
        self._logs.follow(self._process.stdout, group, stream, on_line=self._tail.append)

    def _died(self, invocation: _Invocation, status: int) -> Result:
        time.sleep(_WATCH_SECONDS)  # the last lines are still on their way through the pipe
        # The runtime client logs "[ERROR] <type>: <message>" before it exits on a failed import.
        for line in reversed(self._tail):
            if found := re.match(r"\[ERROR\] ([\w.]+): ([^\r]*)", line):
                return _failure(found[1], found[2])
        text = f"RequestId: {invocation.id} Error: Runtime exited with error: exit status {status}"
        return _failure("Runtime.ExitError", text)


class _Function:
    """A function and its pool of workers."""

    def __init__(self, site: Site, logs: LogShipper, config: FunctionConfig) -> None:
        self.config = config
        self.workers: dict[str, _Worker] = {}
        self._site, self._logs = site, logs
        self._idle: list[_Worker] = []
        self._freed = threading.Condition()

    def invoke(self, payload: bytes) -> Result:
        worker = self._take()
        try:
            return worker.invoke(_Invocation(payload))
        finally:
            with self._freed:
                self._idle.append(worker)
                self._freed.notify()

    def _take(self) -> _Worker:
        """A free worker; a new one when none gets free soon, as starting one costs more than most
        invocations.
        """
        with self._freed:
            patience = PATIENCE_SECONDS if self.workers else 0.0
            while not self._freed.wait_for(lambda: self._idle, timeout=patience):
                if len(self.workers) < MAX_WORKERS:
                    worker = _Worker(self._site, self._logs, self.config)
                    self.workers[worker.name] = worker
                    return worker
            return self._idle.pop()


class Lambdas:
    """All deployed functions, the Invoke API in front of them and the runtime API behind."""

    def __init__(self, site: Site, logs: LogShipper) -> None:
        self._site, self._logs = site, logs
        self._functions: dict[str, _Function] = {}

    def add(self, config: FunctionConfig) -> None:
        """Deploy a function."""
        self._functions[config.name] = _Function(self._site, self._logs, config)

    def names(self) -> list[str]:
        """The deployed functions."""
        return sorted(self._functions)

    def invoke(self, name: str, payload: bytes) -> Result:
        """Run a function and wait for its answer.

        Raises:
            FunctionNotFoundError: nothing of this name is deployed.
        """
        return self._find(name).invoke(payload)

    def invoke_async(self, name: str, payload: bytes) -> None:
        """Run a function later, with AWS's two retries and then its dead-letter queue.

        Raises:
            FunctionNotFoundError: nothing of this name is deployed.
        """
        function = self._find(name)
        self._site.pool.submit(self._attempt, function, payload, 0)

    def stop(self) -> None:
        """End every worker process."""
        for function in self._functions.values():
            for worker in list(function.workers.values()):
                worker.kill()

    def api(self, request: Request) -> Response:
        """The Invoke operation of the Lambda API."""
        path = urllib.parse.unquote(request.path)
        name = path.removeprefix("/2015-03-31/functions/").removesuffix("/invocations")
        payload = request.get_data() or b"{}"
        headers = {"x-amzn-RequestId": str(uuid.uuid4()), "X-Amz-Executed-Version": "$LATEST"}
        try:
            if request.headers.get("X-Amz-Invocation-Type") == "Event":
                self.invoke_async(name, payload)
                return Response("", 202, headers)
            result = self.invoke(name, payload)
        except FunctionNotFoundError:
            body = json.dumps({"Type": "User", "Message": f"Function not found: {name}"})
            return Response(body, 404, {**headers, "x-amzn-ErrorType": "ResourceNotFoundException"})
        if result.error:
            headers["X-Amz-Function-Error"] = result.error
        return Response(result.payload, 200, headers, content_type="application/json")

    def runtime_api(self, request: Request) -> Response:
        """The runtime API as a worker sees it, under /_rt/<function>/<worker>."""
        _, _, name, worker_name, rest = request.path.split("/", 4)
        function = self._functions[name]
        worker = function.workers[worker_name]
        if rest.endswith("/invocation/next"):
            invocation = worker.next()
            deadline_ms = int((time.time() + function.config.timeout_seconds) * 1000)
            headers = {
                "Lambda-Runtime-Aws-Request-Id": invocation.id,
                "Lambda-Runtime-Deadline-Ms": str(deadline_ms),
                "Lambda-Runtime-Invoked-Function-Arn": self._arn(name),
            }
            return Response(invocation.payload, 200, headers, content_type="application/json")
        request_id, kind = rest.split("/")[-2:]
        error = "Unhandled" if kind == "error" else None
        worker.settle(request_id, Result(request.get_data(), error))
        return Response("{}", 202, content_type="application/json")

    def _attempt(self, function: _Function, payload: bytes, attempt: int) -> None:
        if self._site.stopping.is_set():
            return
        result = function.invoke(payload)
        if result.error is None:
            return
        if attempt < function.config.async_retries:
            wait = ASYNC_RETRY_SECONDS[attempt] / self._site.speed
            timer = threading.Timer(wait, self._attempt, (function, payload, attempt + 1))
            timer.daemon = True
            timer.start()
            return
        self._bury(function.config, payload, result, attempts=attempt + 1)

    def _bury(self, config: FunctionConfig, payload: bytes, result: Result, attempts: int) -> None:
        error = json.loads(result.payload or b"{}")
        text = str(error.get("errorMessage"))[:1024]
        self._site.report(f"{config.name} failed {attempts} times and gave up: {text}")
        sqs = self._site.client("sqs")
        if config.dead_letter_arn:
            attributes = {"ErrorCode": "200", "ErrorMessage": text or "unknown"}
            sqs.send_message(
                QueueUrl=self._site.queue_url(config.dead_letter_arn),
                MessageBody=payload.decode(),
                MessageAttributes={
                    name: {"DataType": "String", "StringValue": value}
                    for name, value in attributes.items()
                },
            )
        if config.on_failure_arn:
            record = {
                "version": "1.0",
                "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()),
                "requestContext": {
                    "requestId": str(uuid.uuid4()),
                    "functionArn": self._arn(config.name) + ":$LATEST",
                    "condition": "RetriesExhausted",
                    "approximateInvokeCount": attempts,
                },
                "requestPayload": json.loads(payload),
                "responseContext": {"statusCode": 200, "functionError": result.error},
                "responsePayload": error,
            }
            sqs.send_message(
                QueueUrl=self._site.queue_url(config.on_failure_arn),
                MessageBody=json.dumps(record),
            )

    def _find(self, name: str) -> _Function:
        # A name, a partial or full ARN, each with or without a version or alias behind it.
        bare = name.rsplit(":function:", maxsplit=1)[-1].split(":", maxsplit=1)[0]
        if bare not in self._functions:
            raise FunctionNotFoundError(name)
        return self._functions[bare]

    def _arn(self, name: str) -> str:
        return self._site.arn("lambda", f"function:{name}")


def _stopping() -> Result:
    return _failure("Runtime.ExitError", "The embedded cloud is stopping.")


def _failure(kind: str, message: str) -> Result:
    body: dict[str, Any] = {"errorType": kind, "errorMessage": message}
    return Result(json.dumps(body).encode(), "Unhandled")


def _timed_out(invocation: _Invocation, limit: float) -> Result:
    text = f"RequestId: {invocation.id} Error: Task timed out after {limit:.2f} seconds"
    return _failure("Sandbox.Timedout", text)
