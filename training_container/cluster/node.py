"""One Ray node: the environment and the command of `ray start`, and the small wrapper that runs
it.

`python -m training_container.cluster.node <log file> -- <command>` sends the command's chatter to a
file and becomes the command, so that the supervisor's child *is* `ray start`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from training_container.cluster.addresses import Ports

__all__ = ["head_command", "main", "node_environment", "worker_command"]

_MIB = 1 << 20


def node_environment(environ: Mapping[str, str], token: str) -> dict[str, str]:
    """Environment of every Ray process of a host; nothing is left to what the machine holds.

    Ray's own detection of dead nodes is slower than the table's and only backs it up: tighter
    limits have killed live nodes on hosts whose cores were all busy.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        # Unset, Ray turns authentication on by itself where a token file lies in the home folder,
        # and hosts disagree (FACTS E.4).
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill its own actor when training fills the host's memory.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "10000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
        "RAY_DEDUP_LOGS": "0",
    }


def head_command(host_rank: int, address: str, ports: Ports, temp: Path, gpus: int) -> list[str]:
    """`ray start` of the leader."""
    head = ["--head", "--include-dashboard=false", "--disable-usage-stats"]
    return [*_ray(), *head, *ports.options(head=True), *_common(host_rank, address, temp, gpus)]


def worker_command(
    host_rank: int, address: str, ports: Ports, temp: Path, gpus: int, *, head: str
) -> list[str]:
    """`ray start` of another host; ``head`` is `address:port` of the leader."""
    return [
        *_ray(),
        f"--address={head}",
        *ports.options(head=False),
        *_common(host_rank, address, temp, gpus),
    ]


def _ray() -> list[str]:
    return [str(Path(sys.executable).with_name("ray")), "start", "--block"]


def _common(host_rank: int, address: str, temp: Path, gpus: int) -> list[str]:
    return [
        # Without it Ray picks an address itself, and rewrites a loopback one.
        f"--node-ip-address={address}",
        f"--temp-dir={temp}",
        # The cluster carries words, not work: no CPU slots, so no idle worker processes, and an
        # object store of the least size, away from /dev/shm, which may be as small as 64 MiB.
        "--num-cpus=0",
        f"--num-gpus={gpus}",
        f"--object-store-memory={80 * _MIB}",
        f"--plasma-directory={temp}",
        "--include-log-monitor=false",
        f'--resources={{"host:{host_rank}": 1}}',
    ]


def main(argv: list[str]) -> None:
    """Become the command after `--`, its output appended to the file named first."""
    log, dashes, *command = argv
    assert dashes == "--"
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, sys.stdout.fileno())
    os.dup2(target, sys.stderr.fileno())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
