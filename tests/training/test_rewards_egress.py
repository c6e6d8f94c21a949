"""Where code that declares `network` cannot connect, by whatever way it tries."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.rewards import RewardSpec
from tests.training.refusals import UNSHARE, refusing
from training_container.rewards.egress import Policy, own_services
from training_container.rewards.interface import RewardRequest, Sample
from training_container.rewards.sources import PoolSource, SourceContext, build_source


def v4(address: str, port: int = 80) -> bytes:
    packed = socket.inet_aton(address)
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, packed)


def v6(address: str, port: int = 80) -> bytes:
    packed = socket.inet_pton(socket.AF_INET6, address)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", port, 0, packed, 0)


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (v4("93.184.216.34"), True),
        (v4("10.0.0.7", 8000), True),
        (v4("127.0.0.1", 8000), True),
        (v4("169.254.169.254"), False),  # EC2 metadata
        (v4("169.254.170.2"), False),  # ECS and SageMaker credentials
        (v4("169.254.170.23"), False),  # EKS pod identity
        (v4("169.254.169.253", 53), True),  # Amazon's resolver
        (v4("169.254.169.253", 80), False),
        (v6("2606:4700::1111"), True),
        (v6("fd00:ec2::254"), False),
        (v6("fd00:ec2::23"), False),
        (v6("fe80::1"), False),
        (v6("::ffff:169.254.169.254"), False),
        (v6("64:ff9b::a9fe:a9fe"), False),
        (v6("::1", 8000), True),
        (v4("127.0.0.1", 9001), False),
        (v4("127.1.2.3", 9001), False),
        (v4("0.0.0.0", 9001), False),
        (v6("::1", 9001), False),
        (v6("::ffff:127.0.0.1", 9001), False),
        (v4("10.1.2.3", 9001), True),
        (v4("10.9.9.9", 4566), False),
        (struct.pack("=H", socket.AF_UNIX) + b"/run/docker.sock\0", False),
        (struct.pack("=H", 40) + bytes(14), False),  # vsock
        (struct.pack("=H", socket.AF_INET), False),  # too short to tell
        (struct.pack("=H", socket.AF_UNSPEC) + bytes(14), True),
    ],
)
def test_what_may_be_connected_to(raw: bytes, wanted: bool) -> None:
    assert Policy(("127.0.0.1 9001", "10.9.9.9 4566")).allows(raw) is wanted


def test_the_job_s_own_services_are_those_its_environment_names() -> None:
    environment = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1338/creds",
        "AWS_LAMBDA_RUNTIME_API": "127.0.0.1:9001",
        "AWS_ENDPOINT_URL": "http://localhost:5000",
        "AWS_ENDPOINT_URL_S3": "https://s3.example.com",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://[fd00:ec2::254]",
        "JUDGE": "http://127.0.0.1:8000/v1",
    }
    assert own_services(environment) == (
        "127.0.0.1 1338", "127.0.0.1 5000", "127.0.0.1 9001", "fd00:ec2::254 80",
    )  # fmt: skip


class Server:
    """Accepts, counts, and says hello."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.accepted += 1
            with connection:
                connection.sendall(b"hello")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """A service anybody may use, and one whose address is in the job's environment."""
    free, own = Server(), Server()
    uri = f"http://127.0.0.1:{own.port}/credentials"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri)
    yield free, own
    free.socket.close()
    own.socket.close()


def run(folder: Path, code: str) -> tuple[list[float | None], PoolSource]:
    """Scores that a reward with the network gives to ten samples."""
    (folder / "r.py").write_text(textwrap.dedent(code))
    spec = RewardSpec(name="mine", weight=1.0, file="r.py", function="reward", network=True)
    source = build_source(spec, SourceContext(folder, workers=1))
    assert isinstance(source, PoolSource)
    source.prepare()
    scores = source.score(RewardRequest((Sample("x"),) * 10))
    assert not scores.failures, scores.failures[0].detail
    return scores.values, source


def test_every_way_to_connect_is_judged(tmp_path: Path, servers: tuple[Server, Server]) -> None:
    free, own = servers
    code = f"""
        import asyncio, errno, socket, subprocess, sys, threading

        FREE, OWN = ("127.0.0.1", {free.port}), ("127.0.0.1", {own.port})
        METADATA = ("169.254.169.254", 80)

        def plainly(address, timeout=None):
            with socket.create_connection(address, timeout) as one:
                return one.recv(5) == b"hello"

        def with_asyncio(address):
            async def ask():
                reader, writer = await asyncio.open_connection(*address)
                data = await reader.read(5)
                writer.close()
                return data == b"hello"
            return asyncio.run(ask())

        def by_fast_open(address):
            with socket.socket() as one:
                return one.sendto(b"x", 0x20000000, address) == 1

        def mapped(address):
            with socket.socket(socket.AF_INET6) as one:
                one.connect(("::ffff:" + address[0], address[1]))
                return one.recv(5) == b"hello"

        def by_a_child(address):
            text = f"import socket; socket.create_connection({{address!r}}, 5)"
            ended = subprocess.run([sys.executable, "-c", text], stderr=subprocess.PIPE)
            if b"PermissionError" in ended.stderr:
                raise PermissionError(errno.EACCES, "in a child")
            return ended.returncode == 0

        def in_a_thread(address):
            found = []
            def work():
                try:
                    found.append(plainly(address))
                except OSError:
                    found.append(False)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return found[0]

        def tried(way, address):
            try:
                return float(way(address))
            except OSError as error:
                return 0.0 if error.errno in (errno.EACCES, errno.EOPNOTSUPP) else 9.0

        def reward(completions):
            ways = (plainly, with_asyncio, mapped, by_a_child, in_a_thread)
            assert all(tried(way, FREE) == 1 for way in ways), [tried(way, FREE) for way in ways]
            refused = [tried(way, OWN) for way in (*ways, by_fast_open)]
            refused += [tried(way, METADATA) for way in (plainly, by_fast_open)]
            for family, name in ((socket.AF_UNIX, "/run/x.sock"), (40, (2, 80))):
                try:
                    with socket.socket(family) as one:
                        one.connect(name)
                except OSError as error:
                    known = (errno.EACCES, errno.EAFNOSUPPORT)
                    refused.append(0.0 if error.errno in known else 9.0)
            return refused
    """
    values, source = run(tmp_path, code)
    report = source.confinement()["network"]
    source.close()
    if "(seccomp)" not in report:
        pytest.skip(report)
    assert values == [0.0] * 10
    assert own.accepted == 0
    assert free.accepted >= 5


def test_an_address_changed_while_it_is_judged_is_not_connected_to(
    tmp_path: Path, servers: tuple[Server, Server]
) -> None:
    """The kernel reads an address again after a listener let the call pass (seccomp_unotify(2))."""
    free, own = servers
    code = f"""
        import ctypes, socket, struct, threading

        def address(port):
            return struct.pack("=H", 2) + struct.pack("!H4s8x", port, socket.inet_aton("127.0.0.1"))

        def reward(completions):
            libc = ctypes.CDLL(None)
            allowed, refused = address({free.port}), address({own.port})
            shared = ctypes.create_string_buffer(allowed, 16)
            done = threading.Event()
            def flip():
                while not done.is_set():
                    shared.raw = refused
                    shared.raw = allowed
            thread = threading.Thread(target=flip)
            thread.start()
            made = 0
            for _ in range(100):
                with socket.socket() as one:
                    made += libc.connect(one.fileno(), shared, 16) == 0
            done.set()
            thread.join()
            return [float(made)] * len(completions)
    """
    values, source = run(tmp_path, code)
    report = source.confinement()["network"]
    source.close()
    if "(seccomp)" not in report:
        pytest.skip(report)
    assert values[0]
    assert own.accepted == 0


def test_where_a_host_does_not_let_a_supervisor_answer_it_is_said(tmp_path: Path) -> None:
    """Docker's default profile allows pidfd_getfd with CAP_SYS_PTRACE only."""
    (tmp_path / "r.py").write_text("def reward(completions): return [1.0] * len(completions)")
    script = refusing([(438, errno.EPERM), (UNSHARE, errno.EPERM)]) + textwrap.dedent(f"""
        from pathlib import Path
        from tests.training.test_rewards_egress import run
        values, source = run(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}, "r.py").read_text())
        print(values[0], source.confinement()["network"])
        source.close()
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == (
        "1.0 allowed, the source declares it; the instance's metadata and credentials services too"
        " (the host refuses pidfd_getfd (Operation not permitted))"
    )
