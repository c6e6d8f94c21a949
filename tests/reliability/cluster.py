"""Several hosts of one job on this machine: containers as process trees on loopback addresses.

Hosts are named by loopback literals, which resolve by themselves and differ (FACTS E.4); or by
addresses of network namespaces, where a test needs hosts that can be cut off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.failures import ExitCode
from local_aws.sagemaker.processes import kill_all
from tests.reliability.job import ROOT, Container, Job
from tests.reliability.namespaces import Namespaces

CONTAINER = "tests.reliability.cluster_container"
LIMITS = {"join": 300.0, "lost": 20.0}
"""Roomy, because a crowded machine makes a live host silent for seconds; `bench/cluster.py`
measures the defaults."""
_used = iter(range(10, 250))


@dataclass
class Hosts:
    """The hosts of one incarnation after another. ``job`` is the job as host 0 sees it; ``count``
    may change between incarnations."""

    job: Job
    count: int = 2
    limits: dict[str, float] = field(default_factory=dict)
    prefix: str = ""
    wrap: Callable[[int], Sequence[str]] = lambda _rank: ()
    """Command in front of a host's container."""
    interface: str = "lo"
    names: list[str] = field(default_factory=list)
    containers: dict[int, Container] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job.prepare()
        if not self.names:
            self.rename(self.count)

    def rename(self, count: int) -> None:
        """Fresh addresses, as every incarnation may have."""
        self.count = count
        number = next(_used)
        prefix = self.prefix or f"127.{os.getpid() % 200 + 20}.{number}"
        self.names = [f"{prefix}.{11 + rank}" for rank in range(count)]

    def folder(self, rank: int) -> Path:
        return self.job.folder / f"host-{rank}"

    def start(self, rank: int) -> Container:
        """Start the container of one host."""
        base = self.folder(rank) / "opt-ml"
        config = base / "input/config"
        config.mkdir(parents=True, exist_ok=True)
        for name in ("hyperparameters", "inputdataconfig"):
            (config / f"{name}.json").write_text(
                (self.job.base / f"input/config/{name}.json").read_text()
            )
        (config / "resourceconfig.json").write_text(json.dumps({
            "current_host": self.names[rank], "hosts": self.names,
            "network_interface_name": self.interface,
        }))  # fmt: skip
        data = base / "input/data"
        if not data.exists():
            data.symlink_to(self.job.base / "input/data")
        (base / "output/failure").unlink(missing_ok=True)
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RAY_"))},
            **self.job.server.environ(),
            "SAGEMAKER_BASE_DIR": str(base),
            "GRPOHUB_RANKS_PER_HOST": str(self.job.ranks),
            "AWS_EC2_METADATA_DISABLED": "true",
            "TMPDIR": str(self.folder(rank)),
            "OMP_NUM_THREADS": "1",
            "TEST_LIMITS": json.dumps({**LIMITS, **self.limits}),
            "TEST_MODULE": self.job.module,
            **self.job.environ,
        }
        with self.log_file(rank).open("ab") as log:
            process = subprocess.Popen(
                [*self.wrap(rank), sys.executable, "-m", CONTAINER],
                cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.containers[rank] = Container(self.job, process)
        return self.containers[rank]

    def start_all(self) -> None:
        for rank in range(self.count):
            self.start(rank)

    def run(self) -> list[int]:
        """One incarnation to its end; the exit codes by host rank."""
        self.start_all()
        return self.wait()

    def wait(self, seconds: float = 600) -> list[int]:
        """Exit codes of the hosts of this incarnation, by host rank."""
        deadline = time.monotonic() + seconds
        codes = {}
        for rank, container in sorted(self.containers.items()):
            try:
                codes[rank] = container.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill_all()
                raise AssertionError(f"host {rank} does not end:\n{self.logs()}") from None
        self.containers.clear()
        return list(codes.values())

    def kill(self, rank: int) -> None:
        """The host vanishes, daemons in sessions of their own included."""
        self.containers.pop(rank).sigkill()
        kill_all(self.folder(rank))

    def kill_all(self) -> None:
        for rank in list(self.containers):
            self.kill(rank)

    def wait_for(self, condition: Callable[[], Any], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [r for r, c in self.containers.items() if c.process.poll() is not None]
            assert not ended, f"hosts {ended} ended early:\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.logs()}"
            time.sleep(0.05)

    def log_file(self, rank: int) -> Path:
        self.folder(rank).mkdir(parents=True, exist_ok=True)
        return self.folder(rank) / "container.log"

    def log(self, rank: int) -> str:
        return self.log_file(rank).read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- host {r}\n{self.log(r)[-2500:]}" for r in range(self.count))

    def failure(self, rank: int) -> str:
        path = self.folder(rank) / "opt-ml/output/failure"
        assert path.exists(), f"host {rank} left no failure file:\n{self.logs()}"
        return path.read_text()

    def step(self) -> int:
        """The last step whose row host 0 has written in this incarnation."""
        found = list(self.folder(0).glob("grpohub-*/output/metrics.jsonl"))
        return len(found[0].read_text().splitlines()) if found else 0


def partition(job: Job, net: Namespaces) -> Hosts:
    """Train on two hosts, cut one off after a checkpoint, and see both end."""
    hosts = Hosts(job, wrap=net.command, names=net.addresses, interface=net.interface)
    try:
        hosts.start_all()
        hosts.wait_for(lambda: len(job.complete()) > 0 and hosts.step() >= 3)
        net.cut(1)
        assert hosts.wait() == [ExitCode.CLUSTER, ExitCode.CLUSTER], hosts.logs()
    finally:
        hosts.kill_all()
    return hosts
