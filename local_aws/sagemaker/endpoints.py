"""One endpoint: the inference container as a process, health-checked, replaced blue/green, invoked.

An update starts the new container beside the old one and moves traffic only when it is healthy; if
it never is, the old one keeps serving and the endpoint says so. Only the first production variant
runs.
"""

import http.client
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from contracts.events import endpoint_event
from local_aws.images import UnknownImageError
from local_aws.sagemaker.capacity import Shortage
from local_aws.sagemaker.engine import Engine, Record, tag_map, with_datetimes
from local_aws.sagemaker.errors import ApiError
from local_aws.sagemaker.processes import Container, stop_containers
from local_aws.sagemaker.storage import download_prefix, split_uri

STOP_GRACE_SECONDS = 30.0
PING_SECONDS = 2.0
HEALTH_SECONDS = 240.0
LOG_PREFIX = "/aws/sagemaker/Endpoints"
NO_INSTANCES = (
    "InsufficientInstanceCapacity: Unable to provision requested ML compute capacity due to "
    "InsufficientInstanceCapacity error. Please retry using a different ML instance type or after "
    "some time."
)


class DeploymentError(Exception):
    """Why a fleet could not come up; the text becomes FailureReason."""


@dataclass(frozen=True)
class Fleet:
    """What one endpoint configuration runs as: a container listening on a port of its own."""

    variant: str
    container: Container
    port: int
    folder: Path


class Endpoint:
    """An endpoint and its running fleet. `record` is what DescribeEndpoint answers."""

    def __init__(
        self,
        engine: Engine,
        record: Record,
        lookup: Callable[[str], tuple[Record, Record]],
        save: Callable[[Record], None],
    ) -> None:
        self.record = record
        self._engine, self._lookup, self._save = engine, lookup, save
        self._fleet: Fleet | None = None
        self._deployments = 0
        self._deleted = False

    @property
    def status(self) -> str:
        """EndpointStatus."""
        return str(self.record["EndpointStatus"])

    @property
    def fleet(self) -> Fleet | None:
        """What serves at present, if anything does."""
        return self._fleet

    def create(self) -> None:
        """Bring the endpoint up in the background."""
        self._set("Creating")
        self._in_background(self._create)

    def update(self, config_name: str) -> None:
        """Replace the fleet in the background, blue/green."""
        self._set("Updating")
        self._in_background(self._update, config_name)

    def delete(self, forget: Callable[[], None]) -> None:
        """Take the endpoint down in the background, then forget it."""
        self._deleted = True
        self._set("Deleting")
        self._in_background(self._delete, forget)

    def shut_down(self) -> None:
        """End the containers with the cloud; the record stays, for the next process to serve
        again.
        """
        self._deleted = True
        if self._fleet:
            self._fleet.container.close()

    def _create(self) -> None:
        try:
            fleet = self._deploy(self.record["EndpointConfigName"])
        except DeploymentError as error:
            self._set("Failed", FailureReason=str(error))
        else:
            self._fleet = fleet
            self._set("InService")

    def _update(self, config_name: str) -> None:
        old = self._fleet
        try:
            self._fleet = self._deploy(config_name)
        except DeploymentError as error:
            self._set("RollingBack")
            # On the old fleet, as after an automatic rollback.
            self._set("InService", FailureReason=str(error))
            return
        self._set("InService", EndpointConfigName=config_name)
        self._stop(old)

    def _delete(self, forget: Callable[[], None]) -> None:
        self._stop(self._fleet)
        self._fleet = None
        forget()

    def _deploy(self, config_name: str) -> Fleet:
        """Start a configuration's container and wait until it is healthy.

        Raises:
            DeploymentError: it never was.
        """
        try:
            config, model = self._lookup(config_name)
        except ApiError as error:
            raise DeploymentError(error.message) from error
        variant = config["ProductionVariants"][0]
        if self._engine.capacity.take(variant.get("InstanceType", ""), Shortage.CAPACITY):
            raise DeploymentError(NO_INSTANCES)
        name = self.record["EndpointName"]
        self._deployments += 1
        folder = self._engine.site.state_dir / "endpoints" / name / str(self._deployments)
        shutil.rmtree(folder, ignore_errors=True)
        fleet = Fleet(variant["VariantName"], Container(folder), _free_port(), folder)
        try:
            self._start(fleet, variant, model)
            self._await_health(fleet, variant)
        except (ClientError, BotoCoreError) as error:
            self._stop(fleet)
            raise DeploymentError(f"Failed to download model data: {error}") from error
        except DeploymentError:
            self._stop(fleet)
            raise
        return fleet

    def _start(self, fleet: Fleet, variant: Record, model: Record) -> None:
        container = model.get("PrimaryContainer") or model["Containers"][0]
        (fleet.folder / "model").mkdir(parents=True)
        self._download_model(container, fleet.folder / "model")
        try:
            command = self._engine.images.command(container["Image"])
        except UnknownImageError as error:
            raise DeploymentError(f"The image {error} does not exist.") from error
        name = self.record["EndpointName"]
        if self._engine.images.stands_in(container["Image"]):
            text = "the image it names is of an earlier deployment; the present one runs"
            self._engine.site.report(f"endpoint {name}: {text}")
        fleet.container.start(
            command,
            "serve",
            {
                **self._engine.site.credentials(),
                **container.get("Environment", {}),
                "SAGEMAKER_BIND_TO_PORT": str(fleet.port),
            },
            logs=self._engine.logs,
            group=f"{LOG_PREFIX}/{name}",
            stream=f"{variant['VariantName']}/i-{self._deployments:017x}",
        )

    def _download_model(self, container: Record, folder: Path) -> None:
        source = container.get("ModelDataSource", {}).get("S3DataSource")
        if source:
            copied = download_prefix(self._engine.s3, source["S3Uri"], folder)
            if not copied:
                raise DeploymentError(
                    f"Could not find model data at {source['S3Uri']}. Please make sure that the "
                    "role has access and that there is at least one object under the prefix."
                )
        elif uri := container.get("ModelDataUrl"):
            bucket, key = split_uri(uri)
            archive = folder.parent / "model.tar.gz"
            self._engine.s3.download_file(bucket, key, str(archive))
            shutil.unpack_archive(archive, folder, filter="data")

    def _await_health(self, fleet: Fleet, variant: Record) -> None:
        limit = variant.get("ContainerStartupHealthCheckTimeoutInSeconds", HEALTH_SECONDS)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not self._engine.site.stopping.is_set():
            if _ping(fleet.port):
                return
            code = fleet.container.exit_code()
            if code is not None:
                break
            time.sleep(0.1)
        raise DeploymentError(
            f"The {variant['VariantName']} variant failed to pass the ping health check for "
            f'production variant "{variant["VariantName"]}". Please check CloudWatch logs for '
            "this endpoint."
        )

    def _stop(self, fleet: Fleet | None) -> None:
        if fleet:
            stop_containers([fleet.container], self._engine.grace(STOP_GRACE_SECONDS))
            self._engine.logs.flush()  # who hears of a failure looks for its cause at once
            shutil.rmtree(fleet.folder, ignore_errors=True)

    def _set(self, status: str, **members: Any) -> None:
        with self._engine.lock:
            if self._deleted and status != "Deleting":
                return
            self.record.pop("FailureReason", None)
            self.record.update(EndpointStatus=status, LastModifiedTime=time.time(), **members)
            self._save(self.record)
            shown = with_datetimes({k: v for k, v in self.record.items() if k != "Tags"})
            self._engine.bus.send(endpoint_event(shown, tags=tag_map(self.record)))

    def _in_background(self, target: Callable[..., None], *arguments: Any) -> None:
        name = f"endpoint:{self.record['EndpointName']}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


def _ping(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PING_SECONDS)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
