"""`LocalCloud`: all parts together, as a context manager for tests and as the body of `grpohub
local up`.
"""

import contextlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from werkzeug.serving import BaseWSGIServer, make_server

from local_aws import moto_patches
from local_aws.assembly import Assembly
from local_aws.control import Control
from local_aws.deploy import ASSET_BUCKET, Deployer, Deployment
from local_aws.events import EventBus
from local_aws.front import Front, QuietHandler
from local_aws.http_api import PREFIX, HttpApi
from local_aws.images import Images
from local_aws.lambdas import Lambdas
from local_aws.logs import LogShipper
from local_aws.sagemaker.capacity import SpotMarket
from local_aws.sagemaker.engine import Engine
from local_aws.sagemaker.service import SageMaker
from local_aws.site import Report, Site
from local_aws.state import FLUSH_SECONDS, ExecutionLog, ObjectMirror, TableMirror

_END_SECONDS = 3.0


class PortTakenError(Exception):
    """Something else listens on the port."""


class LocalCloud:
    """One embedded cloud. Only one can run in a process at a time, since moto's state is global.

    Args:
        assembly: the synthesised `cdk.out`; without one only the bare services run.
        state_dir: what is kept lies here, and a later cloud with the same folder finds it.
        port: 0 takes a free one.
        speed: divides schedules, grace periods, Wait states and retry pauses.
        commands: replaces what a container package runs, by package name, for tests.
        market: a Spot market that reclaims instances by itself.
        report: where to say what happens.

    Raises:
        PortTakenError: on entering, when the port is in use.
    """

    _running = threading.Lock()

    def __init__(
        self,
        assembly: Path | None,
        state_dir: Path,
        *,
        port: int = 0,
        speed: float = 1.0,
        commands: Mapping[str, Sequence[str]] | None = None,
        market: SpotMarket | None = None,
        report: Report = print,
    ) -> None:
        self._assembly, self._wanted_port = assembly, port
        self._state_dir, self._speed, self._report = state_dir.resolve(), speed, report
        self._images, self._market = Images(overrides=commands or {}), market
        self._flushing = threading.Lock()
        self.deployment = Deployment({}, {})
        self.lost: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The endpoint of every service: AWS_ENDPOINT_URL."""
        return self.site.url

    @property
    def api_url(self) -> str:
        """The HTTP API's address."""
        return self.api.url

    @property
    def resources(self) -> dict[str, str]:
        """Physical names by logical id."""
        return self.deployment.names

    @property
    def outputs(self) -> dict[str, str]:
        """The stack's outputs."""
        return self.deployment.outputs

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point any AWS SDK here."""
        return dict(self.site.credentials())

    def client(self, service: str) -> Any:
        """A boto3 client of this cloud."""
        return self.site.client(service)

    def start(self) -> None:
        """Serve, deploy, and take up what an earlier cloud left in the state folder."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError("an embedded cloud is already running in this process")
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._running.release)
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise

    def stop(self) -> None:
        """End every child, keep the state, and free the port."""
        # What ends from here on ends because of us: the next cloud must find it as it was.
        moto_patches.hooks.execution_changed.clear()
        self.site.stopping.set()
        moto_patches.stop_executions()
        self.sagemaker.stop()
        self.lambdas.stop()
        self.sagemaker.stop()  # what a thread was just about to start
        if not moto_patches.end_executions(_END_SECONDS):
            self._report("an execution is still in a task; it ends with this process")
        self._flush()
        self._cleanup.close()

    def _start(self) -> None:
        front, cleanup = Front(), self._cleanup
        server = _listen(self._wanted_port, front)
        cleanup.callback(server.server_close)
        moto_patches.apply()
        _configure_moto()
        _reset_moto()
        cleanup.callback(_reset_moto)
        cleanup.callback(moto_patches.hooks.clear)
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self.site = Site(server.port, self._state_dir, self._speed, self._report)
        cleanup.callback(self.site.pool.shutdown, wait=False, cancel_futures=True)
        # moto's interpreter finds the services it calls by this variable.
        cleanup.enter_context(_variable("MOTO_PORT", str(self.site.port)))
        past_proxies = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"]))
        cleanup.enter_context(_variable("NO_PROXY", past_proxies))
        self._connect(front)
        serve = partial(server.serve_forever, poll_interval=0.1)
        threading.Thread(target=serve, name="front", daemon=True).start()
        cleanup.callback(server.shutdown)
        if self._assembly is not None:
            deployer = Deployer(self.site, self.lambdas, self.bus, self.api, self._images)
            self.deployment = deployer.deploy(Assembly.load(self._assembly))
        self._restore()
        self.site.every(FLUSH_SECONDS, self._flush, "state")

    def _connect(self, front: Front) -> None:
        site = self.site
        self.logs = LogShipper(site)
        self.lambdas = Lambdas(site, self.logs)
        self.bus = EventBus(site, self.lambdas)
        self.api = HttpApi(site, self.lambdas)
        engine = Engine(site, self.logs, self.bus, self._images, market=self._market)
        self.sagemaker = SageMaker(engine)
        self._objects = ObjectMirror(site.state_dir / "s3", skip=ASSET_BUCKET)
        self._tables = TableMirror(site, site.state_dir / "dynamodb")
        self._executions = ExecutionLog(site.state_dir / "executions.jsonl")
        control = Control(self)
        front.paths = {
            f"{PREFIX}/": self.api.handle,
            "/_rt/": self.lambdas.runtime_api,
            "/_imds/": self.sagemaker.metadata,
            "/_local/": control.handle,
        }
        front.lambda_api = self.lambdas.api
        front.events_api = self.bus.api
        front.sagemaker_api = self.sagemaker.api
        front.changed_tables = self._tables.changed
        hooks = moto_patches.hooks
        hooks.wait_speed = site.speed
        hooks.object_created = [self.bus.object_created]
        hooks.object_changed = [self._objects.changed]
        hooks.execution_changed = [self._executions.changed, self.bus.execution_changed]

    def _restore(self) -> None:
        objects, items = self._objects.restore(), self._tables.restore()
        executions = self._executions.restore()
        self.lost = self.sagemaker.restore()
        self.lost += [f"execution {e.name} was running and is now ABORTED" for e in executions]
        if objects or items:
            self._report(f"restored {objects} objects and {items} items from {self._state_dir}")
        for line in self.lost:
            self._report(f"not kept: {line}")
        for execution in executions:
            self.bus.execution_changed(execution)

    def _flush(self) -> None:
        with self._flushing:
            self.logs.flush()
            self._objects.flush()
            self._tables.flush()


def _configure_moto() -> None:
    from moto.core.config import default_user_config

    default_user_config["stepfunctions"] = {"execute_state_machine": True}
    default_user_config["lambda"] = {"use_docker": False}
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("moto").setLevel(logging.ERROR)
    # Every failed task is an error to the interpreter's log; in a state machine it is a path.
    logging.getLogger("moto.stepfunctions").setLevel(logging.CRITICAL)

    # Every S3 object above 5 MB is an open file to moto.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _reset_moto() -> None:
    from moto.core.base_backend import BackendDict
    from moto.core.model_instances import reset_model_data

    BackendDict.reset()
    reset_model_data()


def _listen(port: int, front: Front) -> BaseWSGIServer:
    try:
        bound = socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        raise PortTakenError(f"port {port} of 127.0.0.1 is in use") from error
    with bound:
        return make_server(
            "127.0.0.1", port, front, threaded=True, request_handler=QuietHandler, fd=bound.fileno()
        )


@contextlib.contextmanager
def _variable(name: str, value: str) -> Any:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
