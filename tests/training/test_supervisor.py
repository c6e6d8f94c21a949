"""PID 1: signals are passed on, children and orphans reaped, failures told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.failures import ExitCode, Failure
from training_container.checkpoints.stop import StopSignal
from training_container.failure import note_rank_failure, write_atomically
from training_container.supervisor import (
    Child,
    Supervisor,
    out_of_memory_kills,
    outcome_of_ranks,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def start(supervisor: Supervisor, *codes: str) -> list[Child]:
    return [
        supervisor.start(f"rank {number}", python(code), os.environ)
        for number, code in enumerate(codes)
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_request_reaches_every_rank_and_its_code_is_kept(tmp_path: Path) -> None:
    """aws/sagemaker-training-toolkit#173: SIGTERM was not passed on."""
    supervisor, stop = Supervisor(), StopSignal()
    flags = [tmp_path / "a", tmp_path / "b"]
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(30))\nopen({!r}, 'w')\ntime.sleep(60)"  # noqa: E501
    ranks = start(supervisor, *(code.format(str(flag)) for flag in flags))
    until(lambda: all(flag.exists() for flag in flags))
    stop.trigger()
    supervisor.watch_ranks(ranks, stop)
    assert [rank.code for rank in ranks] == [30, 30]
    failure = outcome_of_ranks(ranks, tmp_path, stopping=True)
    assert failure.code is ExitCode.STOPPED


def test_ranks_that_outlast_the_grace_are_killed(tmp_path: Path) -> None:
    """A step of an hour cannot end in two minutes: it is abandoned."""
    supervisor = Supervisor()
    stop = StopSignal(grace_seconds=0.5, reserve_seconds=0.2)
    ranks = start(supervisor, "import signal, time\nsignal.signal(15, 1)\ntime.sleep(60)")
    stop.trigger()
    supervisor.watch_ranks(ranks, stop)
    assert ranks[0].code in (-signal.SIGKILL, -signal.SIGTERM)
    assert outcome_of_ranks(ranks, tmp_path, stopping=True).code is ExitCode.STOPPED


def test_a_lost_rank_ends_the_others_within_seconds(tmp_path: Path) -> None:
    supervisor = Supervisor()
    ranks = start(supervisor, "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)")
    began = time.monotonic()
    supervisor.watch_ranks(ranks, StopSignal(), note_grace_seconds=0.2)
    assert time.monotonic() - began < 15
    failure = outcome_of_ranks(ranks, tmp_path, stopping=False)
    assert failure.code is ExitCode.CLUSTER
    assert "rank 1 ended with -9" in failure.cause


def test_a_rank_that_ends_alone_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    supervisor = Supervisor()
    ranks = start(supervisor, "import time; time.sleep(60)", "pass")
    supervisor.watch_ranks(ranks, StopSignal(), straggler_seconds=0.3)
    assert outcome_of_ranks(ranks, tmp_path, stopping=False).code is ExitCode.CLUSTER


@pytest.mark.parametrize(
    ("codes", "notes", "stopping", "expected"),
    [
        ([0, 0], {}, False, None),
        ([30, 30], {}, False, ExitCode.STOPPED),
        ([30, -9], {}, True, ExitCode.STOPPED),
        ([30, 0], {}, False, ExitCode.CLUSTER),
        ([-9, 20], {1: ExitCode.CLUSTER}, False, ExitCode.CLUSTER),
        ([20, 13], {0: ExitCode.CLUSTER, 1: ExitCode.OUT_OF_MEMORY}, False, ExitCode.OUT_OF_MEMORY),
        ([14, 14], {0: ExitCode.NON_FINITE, 1: ExitCode.NON_FINITE}, True, ExitCode.NON_FINITE),
        ([17, 17], {0: ExitCode.FENCED}, False, ExitCode.FENCED),
        ([1, 0], {0: ExitCode.INTERNAL}, False, ExitCode.INTERNAL),
    ],
)
def test_outcomes(codes, notes, stopping, expected, tmp_path: Path) -> None:
    ranks = [Child(f"rank {i}", [], {}, i, code=code) for i, code in enumerate(codes)]
    for rank, code in notes.items():
        note_rank_failure(tmp_path, rank, Failure(code, "cause"))
    failure = outcome_of_ranks(ranks, tmp_path, stopping=stopping)
    assert (failure and failure.code) == expected


def test_the_kernels_memory_kills_are_counted(tmp_path: Path) -> None:
    write_atomically(tmp_path / "memory.events", b"low 0\noom 2\noom_kill 1\n")
    assert out_of_memory_kills(tmp_path) == 1
    assert out_of_memory_kills(tmp_path / "nothing") == 0


def test_orphans_are_adopted_and_reaped(tmp_path: Path) -> None:
    """A reward worker whose rank was killed comes to PID 1; nobody else would wait for it."""
    script = f"""
import os, subprocess, sys, time
from pathlib import Path
from training_container.supervisor import Supervisor
supervisor = Supervisor()
note = Path({str(tmp_path / "orphan")!r})
code = (
    "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', "
    "'import time; time.sleep(0.3)']); open(%r, 'w').write(str(p.pid)); os._exit(0)" % str(note)
)
child = supervisor.start("rank 0", [sys.executable, "-S", "-c", code], os.environ)
assert supervisor.wait(child, time.monotonic() + 20)
pid = int(note.read_text())
deadline = time.monotonic() + 20
while Path(f"/proc/{{pid}}").exists():
    assert time.monotonic() < deadline, "a zombie is left"
    supervisor.poll()
    time.sleep(0.05)
print("reaped")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "reaped\n", done.stderr


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from training_container.supervisor import Supervisor
child = Supervisor().start("rank 0", [sys.executable, "-S", "-c", "import time; time.sleep(60)"], os.environ)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""  # noqa: E501
    parent = subprocess.Popen([sys.executable, "-c", script])
    note = tmp_path / "pid"
    until(lambda: note.exists() and note.read_text())
    pid = int(note.read_text())
    assert alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid))


def test_a_dead_uploader_is_started_again_a_bounded_number_of_times() -> None:
    from training_container.failure import StageError

    supervisor = Supervisor()
    child = supervisor.start("uploader", python("raise SystemExit(3)"), os.environ)
    for _ in range(5):
        assert supervisor.wait(child, time.monotonic() + 20)
        supervisor.restart(child)
    assert supervisor.wait(child, time.monotonic() + 20)
    with pytest.raises(StageError, match="died") as caught:
        supervisor.restart(child)
    assert caught.value.code is ExitCode.STORAGE
    assert child.restarts == 5
