"""What SageMaker tells a container, read from the files that the platform itself writes.

`SM_HOSTS` and its kin are set by the training toolkit, which this image does not have; the JSON
files under `/opt/ml/input/config` are the contract.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["SageMakerEnv", "read_sagemaker_env"]

RANKS_VARIABLE = "GRPOHUB_RANKS_PER_HOST"


@dataclass(frozen=True, slots=True)
class SageMakerEnv:
    """One container of a training job."""

    base: Path
    hyperparameters: Mapping[str, str]
    hosts: tuple[str, ...]
    current_host: str
    network_interface: str | None
    channels: Mapping[str, Path]
    ranks_per_host: int
    """Training processes here: one per GPU, one on a CPU host."""

    @property
    def host_rank(self) -> int:
        """Index in SageMaker's sorted list; the leader is 0."""
        return self.hosts.index(self.current_host)

    @property
    def is_leader(self) -> bool:
        return self.host_rank == 0

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def output(self) -> Path:
        """Where the failure file lies."""
        return self.base / "output"

    def channel(self, name: str) -> Path:
        """Folder of an input channel.

        Raises:
            StageError: DATA when the job has no such channel or it arrived empty.
        """
        path = self.channels.get(name)
        if path is None:
            has = ", ".join(sorted(self.channels)) or "none"
            raise StageError(ExitCode.DATA, f"the job has no `{name}` channel (it has: {has})")
        if not path.is_dir() or not any(path.iterdir()):
            raise StageError(ExitCode.DATA, f"channel `{name}` holds no file: {path}")
        return path


def read_sagemaker_env(environ: Mapping[str, str] = os.environ) -> SageMakerEnv:
    """Read the container's surroundings under `SAGEMAKER_BASE_DIR` (default `/opt/ml`).

    Ranks per host are the GPUs that the NVIDIA driver shows, or 1; `GRPOHUB_RANKS_PER_HOST` (the
    job's Environment map) says otherwise, for CPU hosts with several ranks.

    Raises:
        StageError: BAD_INPUT when a file is missing, is not JSON, or contradicts another.
    """
    base = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    config = base / "input" / "config"
    resources = _read(config / "resourceconfig.json")
    hosts = tuple(resources.get("hosts") or ())
    current = resources.get("current_host")
    if current not in hosts:
        raise StageError(ExitCode.BAD_INPUT, f"host {current!r} is not among the hosts {hosts}")
    channels = (
        _read(config / "inputdataconfig.json") if (config / "inputdataconfig.json").exists() else {}
    )
    return SageMakerEnv(
        base=base,
        hyperparameters=_read(config / "hyperparameters.json"),
        hosts=hosts,
        current_host=current,
        network_interface=resources.get("network_interface_name"),
        channels={name: base / "input" / "data" / name for name in channels},
        ranks_per_host=_ranks(environ),
    )


def _read(path: Path) -> Any:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise StageError(ExitCode.BAD_INPUT, f"{path} is missing") from error
    except json.JSONDecodeError as error:
        raise StageError(ExitCode.BAD_INPUT, f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StageError(ExitCode.BAD_INPUT, f"{path} is not a JSON object")
    return value


def _ranks(environ: Mapping[str, str]) -> int:
    text = environ.get(RANKS_VARIABLE)
    if text is None:
        # One device file per GPU; asking torch would cost the supervisor an import and a CUDA
        # context.
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise StageError(ExitCode.BAD_INPUT, f"{RANKS_VARIABLE}={text!r} is not 1 to 64")
    return int(text)
