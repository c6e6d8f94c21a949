"""PID 1 of a container: starts the host's processes, passes signals on, reaps, and says how it
went.

As PID 1 it inherits every orphan, and nobody else would wait for them. The kernel kills a child
whose supervisor is gone (PR_SET_PDEATHSIG), so that a SIGKILL of this process leaves nothing
running.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.failures import ExitCode, Failure
from training_container.checkpoints.stop import StopSignal
from training_container.failure import StageError, read_rank_failures, root_cause

__all__ = ["Child", "Supervisor", "outcome_of_ranks"]

log = logging.getLogger("grpohub.supervisor")

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.1
NOTE_GRACE_SECONDS = 3.0
"""After a rank failed, time for the others to leave their own notes before they are killed."""
STRAGGLER_SECONDS = 600.0
"""After a rank ended well, time for the others to do the same."""
MAX_RESTARTS = 5
"""Of the uploader."""


@dataclass(slots=True)
class Child:
    """One process that we started; ``code`` is negative for a signal, as in subprocess."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    pid: int
    code: int | None = None
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.code is None


class Supervisor:
    """Children of this process by pid; everything that dies is reaped in `poll`."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        # Not PID 1 when run under a debugger or an init; orphans must come to us all the same.
        _prctl(_PR_SET_CHILD_SUBREAPER)

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        """Start a process in a group of its own, so that `kill` takes its children along."""
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            process_group=0,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        child = Child(name, command, environ, process.pid, process=process)
        self._children[process.pid] = child
        return child

    def restart(self, child: Child) -> None:
        """Start a child that died again.

        Raises:
            StageError: STORAGE when it has died too often.
        """
        if child.restarts >= MAX_RESTARTS:
            raise StageError(
                ExitCode.STORAGE, f"{child.name} died {child.restarts + 1} times ({child.code})"
            )
        log.error("%s died (%s) and is started again", child.name, child.code)
        fresh = self.start(child.name, child.command, child.environ)
        child.pid, child.process, child.code = fresh.pid, fresh.process, None
        child.restarts += 1
        self._children[child.pid] = child

    def poll(self) -> None:
        """Reap whatever ended: our children and adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                child.code = os.waitstatus_to_exitcode(status)
                assert child.process is not None
                child.process.returncode = child.code  # reaped here, so Popen must not wait again

    def wait(self, child: Child, deadline: float) -> bool:
        """Wait until ``child`` ends or the monotonic ``deadline`` passes; whether it ended."""
        while child.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_SECONDS / 2)
        return not child.running

    def signal(self, children: Sequence[Child], number: signal.Signals) -> None:
        for child in children:
            if child.running:
                os.kill(child.pid, number)

    def kill(self, children: Sequence[Child]) -> None:
        """SIGKILL the children with all they started, and reap them."""
        for child in children:
            if child.running:
                os.killpg(child.pid, signal.SIGKILL)
        for child in children:
            self.wait(child, time.monotonic() + 10)

    def watch_ranks(
        self,
        ranks: Sequence[Child],
        stop: StopSignal,
        *,
        every_turn: Callable[[], None] = lambda: None,
        note_grace_seconds: float = NOTE_GRACE_SECONDS,
        straggler_seconds: float = STRAGGLER_SECONDS,
    ) -> None:
        """Until all ranks have ended: by themselves, by failure of one, or by a stop request.

        A stop request is passed on once. Ranks that do not come to the end of their step in the
        time left are killed: the step is abandoned, and what was saved before stays.
        """
        told, failed_at, ended_at = False, None, None
        while any(rank.running for rank in ranks):
            self.poll()
            every_turn()
            now = time.monotonic()
            if stop.requested and not told:
                self.signal(ranks, signal.SIGTERM)
                told = True
            if any(rank.code not in (None, 0, int(ExitCode.STOPPED)) for rank in ranks):
                failed_at = failed_at or now
            elif any(not rank.running for rank in ranks):
                ended_at = ended_at or now
            over = told and stop.seconds_left() <= 0
            over = over or (failed_at is not None and now - failed_at > note_grace_seconds)
            over = over or (ended_at is not None and now - ended_at > straggler_seconds)
            if over:
                self.kill(ranks)
            time.sleep(_POLL_SECONDS)


def outcome_of_ranks(ranks: Sequence[Child], notes: Path, *, stopping: bool) -> Failure | None:
    """What the ranks came to: None when all ended well, else the cause.

    Notes that ranks left say more than exit codes. A rank that died without a note was killed:
    by the kernel for memory, when the container's counter says so, or with its host.
    """
    codes = [rank.code for rank in ranks]
    if all(code == 0 for code in codes):
        return None
    cause = root_cause(read_rank_failures(notes))
    if cause is not None and cause.failure.code is not ExitCode.CLUSTER:
        return Failure(cause.failure.code, f"rank {cause.rank}: {cause.failure.cause}")
    if stopping or all(code == int(ExitCode.STOPPED) for code in codes):
        return Failure(ExitCode.STOPPED, "stopped on request")
    silent = [f"{rank.name} ended with {rank.code}" for rank in ranks if rank.code not in (0, None)]
    if -signal.SIGKILL in codes and out_of_memory_kills() > 0:
        return Failure(ExitCode.OUT_OF_MEMORY, f"host memory ran out: {'; '.join(silent)}")
    text = cause.failure.cause if cause else "; ".join(silent) or f"exit codes {codes}"
    return Failure(ExitCode.CLUSTER, text)


def out_of_memory_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this container that the kernel killed for memory (cgroup v2 and v1)."""
    for name in ("memory.events", "memory/memory.oom_control"):
        try:
            rows = dict(line.split() for line in (root / name).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(rows.get("oom_kill", 0))
    return 0


def _prctl(option: int, value: int = 1) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
