"""The hosts of one incarnation: addresses, instance ids, and the /opt/ml tree that each container
finds.
"""

import json
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_aws.sagemaker.processes import Container

FIRST, LAST = 11, 99  # two digits, so that the order of names is the order of ranks


class Addresses:
    """Loopback addresses as host names: they resolve by themselves, differ, and need no root.

    The second and third parts come from the port, so that two clouds on one machine never share an
    address, and with it a port of Ray's.
    """

    def __init__(self, port: int) -> None:
        self._prefix = f"127.{port >> 8}.{port & 255}"
        self._used: set[int] = set()
        self._lock = threading.Lock()

    def take(self, count: int) -> list[str]:
        """Reserve consecutive addresses, in host-rank order.

        Raises:
            RuntimeError: more hosts at once than there are addresses.
        """
        with self._lock:
            for start in range(FIRST, LAST - count + 2):
                wanted = range(start, start + count)
                if self._used.isdisjoint(wanted):
                    self._used.update(wanted)
                    return [f"{self._prefix}.{number}" for number in wanted]
        raise RuntimeError(f"no {count} free loopback addresses are left")

    def release(self, addresses: list[str]) -> None:
        """Give addresses back."""
        with self._lock:
            self._used -= {int(address.rpartition(".")[2]) for address in addresses}


@dataclass
class Host:
    """One instance of a training job. `warned` is what the metadata service says about Spot, once
    it does.
    """

    rank: int
    address: str
    base: Path
    instance_id: str = field(default_factory=lambda: f"i-{uuid.uuid4().hex[:17]}")
    warned: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.container = Container(self.base)

    @property
    def name(self) -> str:
        """What SageMaker calls the host in log streams."""
        return f"algo-{self.rank + 1}"

    def failure(self) -> str:
        """What the container wrote about its failure, if anything."""
        file = self.base / "output" / "failure"
        if not file.is_file():
            return ""
        return file.read_text(encoding="utf-8", errors="replace")[:1024].strip()


def write_tree(host: Host, request: dict[str, Any], hosts: list[Host]) -> None:
    """Lay out /opt/ml: folders and the JSON files under input/config."""
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (host.base / folder).mkdir(parents=True, exist_ok=True)
    config = host.base / "input" / "config"
    channels = request.get("InputDataConfig", ())
    default_mode = request["AlgorithmSpecification"]["TrainingInputMode"]
    resources = request["ResourceConfig"]
    names = [h.address for h in hosts]
    files: dict[str, Any] = {
        "hyperparameters": request.get("HyperParameters", {}),
        "inputdataconfig": {
            channel["ChannelName"]: _channel_config(channel, default_mode) for channel in channels
        },
        "resourceconfig": {
            "current_host": host.address,
            "current_instance_type": resources["InstanceType"],
            "current_group_name": "homogeneousCluster",
            "hosts": names,
            "instance_groups": [
                {
                    "instance_group_name": "homogeneousCluster",
                    "instance_type": resources["InstanceType"],
                    "hosts": names,
                }
            ],
            "network_interface_name": "lo",
        },
    }
    if checkpoints := request.get("CheckpointConfig"):
        files["checkpointconfig"] = checkpoints
    for name, content in files.items():
        (config / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def checkpoint_folder(host: Host, request: dict[str, Any]) -> Path:
    """The local path that SageMaker mirrors."""
    local = request["CheckpointConfig"].get("LocalPath", "/opt/ml/checkpoints")
    return host.base / Path(local).relative_to("/opt/ml")


def _channel_config(channel: dict[str, Any], default_mode: str) -> dict[str, Any]:
    source = channel["DataSource"]["S3DataSource"]
    config = {
        "TrainingInputMode": channel.get("InputMode", default_mode),
        "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
        "RecordWrapperType": channel.get("RecordWrapperType", "None"),
    }
    if "ContentType" in channel:
        config["ContentType"] = channel["ContentType"]
    return config
