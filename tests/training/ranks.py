"""Runs a function on several gloo ranks, each its own process, as the container's host does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on_ranks(target: str, count: int, *arguments: str, timeout: float = 500.0) -> None:
    """Call ``target`` ("package.module:function") with ``arguments`` in ``count`` processes.

    Raises:
        AssertionError: with the output of the first rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    module, function = target.split(":")
    code = f"import sys; from {module} import {function}; {function}(*sys.argv[1:])"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number}:\n{output[-4000:]}"
