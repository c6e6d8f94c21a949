"""How fast two hosts meet, and how fast they notice that one is lost: `python -m bench.cluster`.

Real containers, real Ray, toy ranks, on loopback addresses of this machine with the default limits.
On a machine without spare cores the numbers measure the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.reliability.cluster import Hosts
from tests.reliability.job import toy_job
from tests.training.s3 import S3Server, s3_server
from training_container.cluster.limits import ClusterLimits

RANK = "tests.reliability.toy_rank"


def start(server: S3Server, folder: Path) -> tuple[Hosts, float]:
    """Two training hosts, and the seconds from their start to the third step."""
    server.clear()
    limits = {**asdict(ClusterLimits()), "join": 300.0}
    job = toy_job(server, folder, steps=5000, module=RANK, tags={"pause": "0.2"})
    hosts = Hosts(job, limits=limits)
    began = time.monotonic()
    hosts.start_all()
    hosts.wait_for(lambda: hosts.step() >= 3)
    return hosts, time.monotonic() - began


def lose(server: S3Server, lost: int) -> tuple[float, float, str]:
    """Seconds to the third step; from the loss of host ``lost`` to the other's exit; its cause."""
    with tempfile.TemporaryDirectory() as folder:
        hosts, formed = start(server, Path(folder))
        try:
            began = time.monotonic()
            hosts.kill(lost)
            (code,) = hosts.wait()
            seconds = time.monotonic() - began
            assert code == 20, hosts.logs()
            return formed, seconds, hosts.failure(1 - lost).splitlines()[1]
        finally:
            hosts.kill_all()


def main() -> None:
    """Print one line per trial, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2)
    trials = parser.parse_args().trials
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    formed: list[float] = []
    noticed: dict[str, list[float]] = {"worker lost": [], "leader lost": []}
    with s3_server() as server:
        for name, lost in (("worker lost", 1), ("leader lost", 0)):
            for _ in range(trials):
                start_seconds, seconds, cause = lose(server, lost)
                formed.append(start_seconds)
                noticed[name].append(seconds)
                print(f"{name}: third step after {start_seconds:.1f} s, "
                      f"other host ended {seconds:.1f} s after the loss: {cause}")  # fmt: skip
    print(f"start to third step: median {statistics.median(formed):.1f} s of {len(formed)}")
    for name, values in noticed.items():
        print(f"{name} to exit: median {statistics.median(values):.1f} s, "
              f"worst {max(values):.1f} s of {len(values)}")  # fmt: skip


if __name__ == "__main__":
    main()
