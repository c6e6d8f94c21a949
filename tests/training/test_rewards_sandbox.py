"""What a user's reward code cannot do to the job that runs it.

Every attack is real code in a real worker process. Where the host refuses a means of containment
the attack on it is skipped with the host's reason; the others must hold everywhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.rewards import RewardSpec
from tests.training.refusals import LANDLOCK, UNSHARE, refusing
from training_container.rewards.interface import (
    FailureKind,
    RewardConfigError,
    RewardRequest,
    Sample,
    Scores,
)
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import PoolSource, SourceContext, build_source

SECRET = "AKIAIOSFODNN7EXAMPLE"


class Bench:
    """Runs reward code as a stage would, and cleans up after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: list[PoolSource] = []

    def source(self, code: str, workers: int = 1, **settings: Any) -> PoolSource:
        path = self.folder / f"rewards{len(self.sources)}.py"
        path.write_text(textwrap.dedent(code))
        spec = RewardSpec(name="mine", weight=1.0, file=path.name, function="reward", **settings)
        context = SourceContext(self.folder, columns=("image", "other"), workers=workers)
        source = build_source(spec, context)
        assert isinstance(source, PoolSource)
        self.sources.append(source)
        source.prepare()
        return source

    def score(self, code: str, *texts: str, **settings: Any) -> Scores:
        return score(self.source(code, **settings), *texts)

    def contained(self, area: str) -> str:
        return self.source("def reward(predict, ground_truth): return 0").confinement()[area]


def score(source: PoolSource, *texts: str) -> Scores:
    return source.score(RewardRequest(tuple(Sample(text) for text in texts or ("x",))))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for source in made.sources:
        source.close()


def probe(expression: str) -> str:
    """A reward that is 1 when the attack works and 0 when it is refused."""
    return f"""
        import ctypes, os, pathlib, signal, socket
        def reward(predict, ground_truth):
            try:
                return float(bool({expression}))
            except OSError as error:
                print("refused:", error)
                return 0.0
    """


def test_what_the_host_grants_is_used_and_reported(bench: Bench) -> None:
    """The attacks below are skipped where a means is refused; this test keeps that honest."""
    unshare = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x78000000) != 0)"
    namespaces = subprocess.run([sys.executable, "-c", unshare], check=False).returncode == 0
    landlock = ctypes.CDLL(None).syscall(LANDLOCK, None, ctypes.c_size_t(0), 1)
    spaces = ("net", "pid", "user", "ipc")
    source = bench.source(
        f"""
        import os
        def reward(completions):
            inodes = {{space: os.stat("/proc/self/ns/" + space).st_ino for space in {spaces}}}
            return [{{"overall": 1, **inodes}}]
        """
    )
    inside = score(source).metrics
    for space in spaces:
        moved = inside[space] != os.stat(f"/proc/self/ns/{space}").st_ino
        assert moved == namespaces, space
    found = source.confinement()
    assert (found["files"] == f"allow-list (Landlock {landlock})") == (landlock > 0)
    assert (found["network"] == "none (namespace)") == namespaces
    assert (found["processes"] == "own PID namespace") == namespaces


# --- credentials ---------------------------------------------------------------------------------


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", f"/v2/credentials/{SECRET}")


@pytest.mark.usefixtures("credentials")
def test_no_variable_of_the_job_reaches_the_code(bench: Bench) -> None:
    scores = bench.score(
        f"""
        import os, subprocess
        def reward(predict, ground_truth):
            child = subprocess.run(["env"], capture_output=True, text=True).stdout
            names = [n for n in os.environ if n.startswith("AWS_") or "TOKEN" in n or "KEY" in n]
            return {{"overall": len(names), "leaks": "{SECRET}" in str(dict(os.environ)) + child}}
        """
    )
    assert scores.values == [1.0]  # AWS_EC2_METADATA_DISABLED, which is ours
    assert scores.metrics["leaks"] == 0


def test_the_trainer_s_environment_cannot_be_read_through_proc(bench: Bench) -> None:
    if "out of reach" not in (state := bench.contained("credentials")):
        pytest.skip(state)
    trainer = os.getpid()
    for place in (f"/proc/{trainer}/environ", f"/proc/{trainer}/mem", f"/proc/{trainer}/fd/0"):
        assert Path(place).exists()
        assert bench.score(probe(f"open('{place}', 'rb')")).values == [0.0]


def test_files_outside_the_allow_list_cannot_be_read_or_written(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if "allow-list" not in (state := bench.contained("files")):
        pytest.skip(state)
    outside = tmp_path_factory.mktemp("home") / ".aws"
    outside.mkdir()
    secret = outside / "credentials"
    secret.write_text(SECRET)
    assert bench.score(probe(f"open('{secret}').read()")).values == [0.0]
    assert bench.score(probe(f"os.listdir('{outside}')")).values == [0.0]
    assert bench.score(probe(f"pathlib.Path('{outside}/new').write_text('x')")).values == [0.0]
    assert bench.score(probe("os.listdir('/dev/shm') or True")).values == [0.0]
    beside = bench.folder / "table.txt"
    beside.write_text("known")
    assert bench.score(probe(f"open('{beside}').read() == 'known'")).values == [1.0]
    assert bench.score(probe(f"open('{beside}', 'w')")).values == [0.0]
    assert bench.score(probe("pathlib.Path.home().joinpath('t').write_text('x')")).values == [1.0]


# --- network -------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_network_is_out_of_reach_unless_declared(bench: Bench, listener: int) -> None:
    if (state := bench.contained("network")).startswith("open"):
        pytest.skip(state)
    connect = f"socket.create_connection(('127.0.0.1', {listener}), 2)"
    assert bench.score(probe(connect)).values == [0.0]
    assert bench.score(probe(connect), network=True).values == [1.0]
    assert bench.score(probe("socket.create_connection(('169.254.169.254', 80), 2)")).values == [0]


def test_no_socket_of_any_family_and_no_way_round_the_filter(bench: Bench) -> None:
    if (state := bench.contained("network")).startswith("open"):
        pytest.skip(state)
    assert bench.score(probe("socket.socket(socket.AF_UNIX)")).values == [0.0]
    # io_uring can open sockets without the socket call; 425 is io_uring_setup.
    uring = "ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)) >= 0"
    assert bench.score(probe(uring)).values == [0.0]
    new_namespace = "ctypes.CDLL(None).unshare(0x10000000) == 0"
    assert bench.score(probe(new_namespace)).values == [0.0]


def test_asyncio_works_without_the_network(bench: Bench) -> None:
    code = """
        import asyncio
        async def reward(completions):
            await asyncio.gather(*(asyncio.sleep(0.001) for _ in completions))
            return [1.0 for _ in completions]
    """
    assert bench.score(code, "a", "b").values == [1.0, 1.0]


# --- the job's processes -------------------------------------------------------------------------


def test_the_trainer_cannot_be_signalled_or_traced(bench: Bench) -> None:
    files, processes = bench.contained("files"), bench.contained("processes")
    if "Landlock" not in files and "PID namespace" not in processes:
        pytest.skip(f"{files}; {processes}")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert bench.score(probe(f"os.kill({victim.pid}, 9) is None")).values == [0.0]
        trace = f"ctypes.CDLL(None).ptrace(16, {victim.pid}, 0, 0) == 0"
        assert bench.score(probe(trace)).values == [0.0]
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


# --- time ----------------------------------------------------------------------------------------


def running_below(folder: Path) -> list[str]:
    """Command lines of processes that mention a file of the test's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in text:
            found.append(text)
    return found


def test_a_hang_is_killed_and_counted_and_the_next_batch_is_scored(bench: Bench) -> None:
    """volcengine/verl#5839: without its timeout the reward hung the run at step 2 for ever."""
    source = bench.source(
        """
        def reward(completions):
            while "hang" in completions:
                pass
            return [1.0] * len(completions)
        """,
        timeout_seconds=1.0,
    )
    late = score(source, "hang", "b")
    assert [failure.kind for failure in late.failures.values()] == [FailureKind.TIMEOUT] * 2
    assert score(source, "a").values == [1.0]


def test_only_the_hanging_sample_of_a_per_sample_function_is_lost(bench: Bench) -> None:
    source = bench.source(
        """
        import time
        def reward(predict, ground_truth):
            while predict == "hang":
                time.sleep(1)
            return 1.0
        """,
        timeout_seconds=16.0,
    )
    scores = score(source, "a", "b", "hang", "c", "d", "e")  # in chunks of two
    assert scores.values == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert list(scores.failures) == [2]
    assert scores.failures[2].kind is FailureKind.TIMEOUT
    assert "one sample took over 4 s" in scores.failures[2].detail


def test_what_the_code_started_does_not_outlive_the_deadline(bench: Bench) -> None:
    """Not by ignoring signals, nor by leaving the session, nor by forking twice."""
    sleeper = bench.folder / "sleeper.py"
    sleeper.write_text("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)")
    source = bench.source(
        f"""
        import os, subprocess, sys, time
        def reward(completions):
            subprocess.Popen([sys.executable, "{sleeper}"], start_new_session=True)
            if os.fork() == 0:
                subprocess.Popen([sys.executable, "{sleeper}"])
                os._exit(0)
            time.sleep(600)
        """,
        timeout_seconds=2.0,
    )
    score(source)
    deadline = time.monotonic() + 20
    while (left := running_below(bench.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_workers_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """SIGKILL runs no clean-up; a reward that holds the interpreter's lock must still end."""
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(600)")
    (tmp_path / "rewards.py").write_text(
        "import subprocess, sys\n"
        "def reward(completions):\n"
        f"    subprocess.run([sys.executable, {str(sleeper)!r}])\n"
    )
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from contracts.rewards import RewardSpec\n"
        "from training_container.rewards.interface import RewardRequest, Sample\n"
        "from training_container.rewards.sources import SourceContext, build_source\n"
        "spec = RewardSpec(name='r', weight=1.0, file='rewards.py', function='reward')\n"
        "source = build_source(spec, SourceContext(Path(sys.argv[1]), workers=1))\n"
        "source.prepare()\nsource.score(RewardRequest((Sample('x'),)))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(trainer), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not any("sleeper" in line for line in running_below(tmp_path)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while (left := running_below(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_regular_expression_that_backtracks_for_ever_is_killed() -> None:
    spec = RewardSpec(
        name="r",
        weight=1.0,
        function="regex",
        parameters={"pattern": r"(a+)+$", "match": "fullmatch"},
        timeout_seconds=16.0,
    )
    source = build_source(spec, SourceContext(workers=1))
    source.prepare()
    try:
        scores = source.score(RewardRequest((Sample("a" * 5000 + "b"), Sample("aaa"))))
    finally:
        source.close()
    assert scores.failures[0].kind is FailureKind.TIMEOUT
    assert scores.values[1] == 1.0


def test_mathematics_is_scored_from_a_thread_that_is_not_the_main_one() -> None:
    """huggingface/Math-Verify#50, volcengine/verl#5635: `signal.alarm` fails there and every
    score silently became 0."""
    spec = RewardSpec(name="r", weight=1.0, function="boxed_math", parameters={"seconds": 1})
    source = build_source(spec, SourceContext(workers=1))
    source.prepare()
    samples = [
        Sample(r"\boxed{\frac{2}{4}}", ground_truth="0.5"),
        Sample(r"\boxed{9^{9^{9^{9}}}}", ground_truth="0.5"),
        Sample(r"\boxed{3}", ground_truth="0.5"),
    ]
    found: list[Scores] = []
    thread = threading.Thread(
        target=lambda: found.append(source.score(RewardRequest(tuple(samples))))
    )
    thread.start()
    thread.join()
    source.close()
    assert found[0].values == [1.0, None, 0.0]
    assert found[0].failures[1].kind is FailureKind.TIMEOUT


# --- memory and processes ------------------------------------------------------------------------


def test_memory_beyond_the_limit_is_refused_and_the_sample_fails(bench: Bench) -> None:
    code = """
        def reward(predict, ground_truth):
            return float(len(bytearray(int(predict) * 1024 * 1024)) > 0)
    """
    scores = bench.score(code, "10", "4000", "10", memory_mb=512)
    assert scores.values == [1.0, None, 1.0]
    assert "MemoryError" in scores.failures[1].detail


def test_memory_shared_out_over_many_children_is_counted_together(bench: Bench) -> None:
    code = """
        import os, time
        def reward(completions):
            for _ in range(8):
                if os.fork() == 0:
                    held = bytearray(os.urandom(1024 * 1024)) * 100
                    time.sleep(600)
            time.sleep(600)
    """
    scores = bench.score(code, memory_mb=400)
    assert scores.failures[0].kind is FailureKind.CRASH
    assert "MB of the 400 MB allowed" in scores.failures[0].detail


@pytest.mark.parametrize(
    "call", ["os.memfd_create('held')", "libc.syscall(447, 0)", "libc.shmget(0, 4096, 0o1600)"]
)
def test_no_memory_is_had_that_counts_only_while_it_is_mapped(bench: Bench, call: str) -> None:
    """800 MB were held so under a limit of 512."""
    if (state := bench.contained("network")).startswith("open"):
        pytest.skip(state)
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def reward(predict, ground_truth):
            try:
                return 0 if {call} >= 0 else ctypes.get_errno()
            except OSError as error:
                return error.errno
    """
    assert bench.score(code).values == [errno.EPERM]


def test_a_line_without_an_end_does_not_fill_the_trainer(bench: Bench) -> None:
    source = bench.source(
        """
        import os
        def reward(predict, ground_truth):
            for _ in range(64):
                os.write(int(predict), b"x" * (1 << 20))
            os._exit(1)
        """
    )
    for stream in "12":
        tracemalloc.start()
        failure = score(source, stream).failures[0]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20
        assert failure.detail.strip("x\n") == ""


def test_an_answer_s_length_and_number_are_bounded(bench: Bench) -> None:
    code = """
        import json, os, struct
        def reward(completions):
            answer = json.dumps({"index": 0, "value": 1.0, "extra": {"a": 1.0}}).encode()
            repeated = (struct.pack(">I", len(answer)) + answer) * 2
            announced = struct.pack(">I", 64 << 20)
            for fd in range(3, 40):
                try:
                    os.write(fd, announced if completions[0] == "long" else repeated)
                except OSError:
                    pass
            return [1.0] * len(completions)
    """
    source = bench.source(code)
    assert "67108864 bytes announced" in score(source, "long").failures[0].detail
    assert "answered twice" in score(source, "many", "b").failures[1].detail


def test_an_error_s_message_of_any_length_is_cut_and_told(bench: Bench) -> None:
    for style in ("predict, ground_truth", "completions"):
        code = f"def reward({style}):\n    raise ValueError('x' * (8 << 20))"
        failure = bench.score(code).failures[0]
        assert failure.kind is FailureKind.EXCEPTION
        assert "ValueError: xxx" in failure.detail


def test_a_fork_bomb_is_ended(bench: Bench) -> None:
    code = """
        import os, time
        def reward(completions):
            for _ in range(500):
                try:
                    if os.fork() == 0:
                        time.sleep(600)
                except OSError:
                    break
            time.sleep(600)
    """
    scores = bench.score(code, timeout_seconds=15.0)
    assert scores.values == [None]
    assert scores.failures[0].kind in (FailureKind.CRASH, FailureKind.TIMEOUT)


def test_a_worker_that_leaks_is_replaced(bench: Bench) -> None:
    """volcengine/verl#275: an evaluator's leak ended the job."""
    code = """
        held, calls = [], 0
        def reward(predict, ground_truth):
            global calls
            calls += 1
            held.append(b"x" * 30 * 1024 * 1024)
            return float(calls)
    """
    config = replace(bench.source(code).config, max_growth_mb=50)
    leaking = PoolSource("leaking", config)
    leaking.prepare()
    seen = [score(leaking).values[0] for _ in range(4)]
    leaking.close()
    assert seen == [1.0, 2.0, 3.0, 1.0]  # 60 MB more than after the first batch


# --- starts that outlast a batch ------------------------------------------------------------------

COUNTING = """
    import os, time
    folder = os.path.dirname(__file__)
    while os.path.exists(folder + "/held"):
        time.sleep(0.01)
    time.sleep(1.0 if os.path.exists(folder + "/slow") else 0.0)
    calls = 0
    def reward(predict, ground_truth):
        global calls
        calls += 1
        return float(calls)
"""


def test_a_batch_does_not_wait_for_a_worker_that_is_only_starting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training_container.rewards.plane._GRACE_SECONDS", 0.1)
    source = bench.source(COUNTING, workers=2, timeout_seconds=30.0)
    held = bench.folder / "held"
    held.touch()
    spec = RewardSpec(name="mine", weight=1.0, function="exact_match", timeout_seconds=30.0)
    plane = RewardPlane([spec], SourceContext(start_seconds=1.0), [source])
    samples = tuple(Sample(text) for text in "abcd")
    assert plane.dry_run(samples).scores_B_K == [[1.0], [2.0], [3.0], [4.0]]
    assert plane.score(RewardRequest(samples)).scores_B_K == [[5.0], [6.0], [7.0], [8.0]]
    source.close()


def test_a_worn_out_worker_is_replaced_between_batches_whatever_its_start_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement within the batch ended healthy runs: the plane took its import for a hang."""
    monkeypatch.setattr("training_container.rewards.plane._GRACE_SECONDS", 0.1)
    config = replace(bench.source(COUNTING).config, max_batches=1)
    source = PoolSource("mine", config)
    spec = RewardSpec(name="mine", weight=1.0, function="exact_match", timeout_seconds=0.5)
    request = RewardRequest(tuple(Sample(text) for text in "abcdefgh"))
    with RewardPlane([spec], SourceContext(), [source]) as plane:
        plane.prepare()
        (bench.folder / "slow").touch()
        for _ in range(2):
            assert plane.score(request).sources[0].scores == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_replacement_that_does_not_start_fails_its_batch(bench: Bench) -> None:
    code = COUNTING.replace("calls += 1", "os._exit(1)")
    source = PoolSource("mine", replace(bench.source(code).config, start_seconds=5.0))
    source.prepare()
    (bench.folder / "held").touch()
    lost = score(source, "a")
    assert "ended" in lost.failures[0].detail
    late = score(source, "a", "b")
    source.close()
    assert {failure.kind for failure in late.failures.values()} == {FailureKind.CRASH}
    assert "did not start" in late.failures[1].detail


# --- crashes and lies ----------------------------------------------------------------------------


def test_a_crash_loses_one_sample_and_says_why(bench: Bench) -> None:
    code = """
        import ctypes, sys
        def reward(predict, ground_truth):
            if predict == "crash":
                print("about to touch address 0", file=sys.stderr, flush=True)
                ctypes.string_at(0)
            return 1.0
    """
    scores = bench.score(code, "a", "crash", "b")
    assert scores.values == [1.0, None, 1.0]
    assert scores.failures[1].kind is FailureKind.CRASH
    assert "address 0" in scores.failures[1].detail


@pytest.mark.parametrize("way", ["raise SystemExit(3)", "os._exit(0)", "os.kill(0, 9)"])
def test_leaving_for_good_is_a_failure_and_not_the_end(bench: Bench, way: str) -> None:
    code = f"""
        import os
        def reward(completions):
            {way}
    """
    scores = bench.score(code, "a", "b")
    assert len(scores.failures) == 2


def test_an_exception_in_a_batch_function_fails_its_samples_with_the_traceback(
    bench: Bench,
) -> None:
    scores = bench.score("def reward(completions):\n    return 1 / 0", "a", "b")
    assert scores.values == [None, None]
    assert scores.failures[1].kind is FailureKind.EXCEPTION
    assert "ZeroDivisionError" in scores.failures[1].detail
    assert "return 1 / 0" in scores.failures[1].detail


def test_what_the_code_prints_does_not_disturb_the_scores(bench: Bench) -> None:
    code = """
        import os, subprocess
        def reward(predict, ground_truth):
            print("x" * 100_000)
            os.write(1, b"raw")
            subprocess.run(["echo", "child"])
            return 1.0
    """
    assert bench.score(code, "a", "b").values == [1.0, 1.0]


@pytest.mark.parametrize(
    "frames",
    [
        [{"index": 7, "value": 1e9}],
        [{"index": 0, "value": "1"}],
        [{"index": 0, "value": 1.0, "extra": {"x": "y"}}],
        [{"done": True}],
        [{"failed": ["no such kind", ""]}],
        [["not", "an", "object"]],
    ],
)
def test_a_forged_frame_loses_the_batch_and_nothing_else(bench: Bench, frames: list[Any]) -> None:
    code = f"""
        import json, os, struct
        def reward(completions):
            for frame in {frames!r}:
                body = json.dumps(frame).encode()
                for fd in range(3, 40):
                    try:
                        os.write(fd, struct.pack(">I", len(body)) + body)
                    except OSError:
                        pass
            return [1.0] * len(completions)
    """
    scores = bench.score(code, "a", "b")
    assert scores.values == [None, None]
    assert {failure.kind for failure in scores.failures.values()} == {FailureKind.CRASH}


# --- hosts that refuse some of the means ------------------------------------------------------

_RUN_TESTS = """
import sys
import pytest
sys.exit(pytest.main([{file!r}, "-v", "-p", "no:cacheprovider", "-k", {which!r}]))
"""


@pytest.mark.parametrize(
    ("refused", "which", "skipped"),
    [
        pytest.param(
            [(UNSHARE, errno.EPERM)],
            "unless_declared or no_way_round or proc or allow_list or signalled or outlive",
            "",
            id="Docker's profile: no namespaces",
        ),
        pytest.param(
            [(LANDLOCK, errno.ENOSYS)],
            "unless_declared or no_way_round or proc or signalled",
            "",
            id="an old kernel: no Landlock",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [(UNSHARE, errno.EPERM), (LANDLOCK, errno.ENOSYS)],
            "unless_declared or no_way_round or allow_list or outlive",
            "1 skipped",
            id="neither",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_other_means_hold_where_a_host_refuses_one(
    refused: list[tuple[int, int]], which: str, skipped: str
) -> None:
    script = refusing(refused) + _RUN_TESTS.format(
        file=__file__, which=f"({which}) and not refuses_one"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert skipped in run.stdout


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def reward(completions):\n    return [", "syntax error at line"),
        ("def rewards(completions): pass", "Did you mean `rewards`"),
        ("import no_such_module\ndef reward(completions): pass", "No module named"),
        ("raise SystemExit(1)\ndef reward(completions): pass", "SystemExit"),
        ("import os; os._exit(1)\ndef reward(completions): pass", "did not start"),
        ("def reward(completions, colour): pass", "colour"),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_anything_loads(
    bench: Bench, code: str, message: str
) -> None:
    with pytest.raises(RewardConfigError, match=message):
        bench.source(code)


def test_a_sibling_module_and_a_row_with_bytes_arrive(bench: Bench) -> None:
    (bench.folder / "helper.py").write_text("def size(x): return float(len(x))")
    source = bench.source(
        """
        from helper import size
        def reward(completions, image):
            return [size(one["bytes"]) for one in image]
        """
    )
    row = {"image": {"bytes": b"\x89PNG\xff"}, "other": object()}
    scores = source.score(RewardRequest((Sample("a", columns=row), Sample("b", columns=row))))
    assert scores.values == [5.0, 5.0]


def test_only_what_the_function_reads_is_sent(bench: Bench) -> None:
    """Messages may hold images; a group's answers share the row, which travels once."""
    sent: list[int] = []
    row, prompt = {"image": "x" * 100_000}, [{"role": "user", "content": "y" * 100_000}]
    samples = tuple(Sample(text, columns=row, prompt=prompt) for text in "abcdefgh")
    for code in (
        "def reward(completions): return [1.0] * 8",
        "def reward(completions, image): return [len(i) for i in image]",
        "def reward(completions, messages): return [len(m[0]['content']) for m in messages]",
    ):
        source = bench.source(code)
        before = written()
        assert all(source.score(RewardRequest(samples)).values)
        sent.append(written() - before)
    assert sent[0] < 10_000
    assert 100_000 < sent[1] < 150_000
    assert 100_000 < sent[2] < 150_000


def written() -> int:
    """Bytes this process has written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_a_column_that_cannot_be_sent_fails_by_name(bench: Bench) -> None:
    source = bench.source("def reward(completions, other): return [1.0]")
    scores = source.score(RewardRequest((Sample("a", columns={"other": object()}),)))
    assert "column 'other' is a object" in scores.failures[0].detail
    assert source.score(RewardRequest((Sample("a", columns={"other": 1}),))).values == [1.0]


def test_closing_during_a_batch_ends_it_with_failures(bench: Bench) -> None:
    sleeper = bench.folder / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(600)")
    source = bench.source(
        f"""
        import subprocess, sys
        def reward(completions):
            subprocess.run([sys.executable, {str(sleeper)!r}])
        """
    )
    found: list[Scores] = []
    thread = threading.Thread(target=lambda: found.append(score(source, "a")))
    thread.start()
    deadline = time.monotonic() + 60
    while not any("sleeper" in line for line in running_below(bench.folder)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    source.close()
    thread.join(timeout=30)
    assert found[0].failures[0].kind is FailureKind.CRASH
