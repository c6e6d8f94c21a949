"""Containers as process trees: started as a session of their own, ended as `docker stop` ends a
container.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from local_aws.images import Command
from local_aws.logs import LogShipper

# What a process needs from the machine that a container would bring in its image. Thread counts
# pass through so that several hosts can share one machine's cores.
INHERITED = ("LANG", "LC_ALL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV")
NICENESS = 2  # the control plane stays quick while training uses every core


class Container:
    """One container: `base` is its /opt/ml, and the mark by which all its processes are known."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Command,
        argument: str,
        environment: Mapping[str, str],
        *,
        logs: LogShipper,
        group: str,
        stream: str,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Run the image's entrypoint with SageMaker's argument, `train` or `serve`."""
        home = self.base.parent / f"{self.base.name}-home"
        home.mkdir(parents=True, exist_ok=True)
        python_path = os.pathsep.join([str(command.folder), str(_checkout())])
        self._process = subprocess.Popen(
            [*command.argv, argument],
            cwd=command.folder,
            env={
                **{name: os.environ[name] for name in INHERITED if name in os.environ},
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "HOME": str(home),
                "PYTHONPATH": python_path,
                "PYTHONUNBUFFERED": "1",
                **environment,
                "SAGEMAKER_BASE_DIR": str(self.base),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        psutil.Process(self._process.pid).nice(NICENESS)
        assert self._process.stdout is not None
        self._pump = logs.follow(self._process.stdout, group, stream, on_line)

    def exit_code(self) -> int | None:
        """The first process's exit code as Docker gives it (128 + signal), or None while it
        runs.
        """
        if self._process is None:
            return None
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """SIGTERM to the first process alone, as `docker stop` sends it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every process of the container, daemons in sessions of their own included."""
        kill_all(self.base)
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End what the first process left behind, and wait for its last output."""
        self.kill()
        if self._process is not None:
            self._pump.join(timeout=5)


def stop_containers(containers: list[Container], grace_seconds: float) -> None:
    """SIGTERM to all, SIGKILL to what is left after the grace period; every process is gone on
    return.
    """
    for container in containers:
        container.terminate()
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline:
        if all(c.exit_code() is not None for c in containers):
            break
        time.sleep(0.05)
    for container in containers:
        container.close()


def kill_all(base: Path) -> int:
    """Kill every process whose SAGEMAKER_BASE_DIR lies at or under `base`; returns how many."""
    killed = 0
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("SAGEMAKER_BASE_DIR")
            if mark and Path(mark).is_relative_to(base) and process.pid != os.getpid():
                process.kill()
                killed += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return killed


def _checkout() -> Path:
    return Path(__file__).resolve().parents[2]
