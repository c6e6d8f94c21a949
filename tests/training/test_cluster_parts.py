"""Addresses, ports, the ticket, the command of `ray start`, and the beacon beside a rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.failures import ExitCode
from contracts.layout import RunLayout
from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.store import Store, StoreError
from training_container.cluster.addresses import (
    Ports,
    free_port,
    interface_of,
    own_address,
    reachable,
    resolve,
)
from training_container.cluster.beacon import Beacon, ProgressReader, note_step
from training_container.cluster.node import head_command, node_environment, worker_command
from training_container.cluster.ticket import Ticket, publish_ticket, read_ticket
from training_container.entrypoint import rank_variables
from training_container.failure import StageError
from training_container.sagemaker_env import SageMakerEnv

STAGE = RunLayout("tiny-20260101-abc").stage(0, "strict")


def test_a_name_that_resolves_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`aws/sagemaker-python-sdk#138`: SageMaker's names may not be known at first."""
    monkeypatch.setattr("training_container.cluster.addresses._RETRY_SECONDS", 0.01)
    asked = []

    def lookup(host: str) -> str:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror("Name or service not known")
        return "10.0.0.7"

    assert resolve("algo-1", time.monotonic() + 30, lookup=lookup) == "10.0.0.7"
    assert asked == ["algo-1"] * 4


def test_a_name_that_never_resolves_ends_at_the_deadline_and_is_named() -> None:
    """`aws/sagemaker-training-toolkit#9`"""
    with pytest.raises(StageError, match=r"name of host algo-7\.invalid does not resolve") as e:
        resolve("algo-7.invalid", time.monotonic())
    assert e.value.code is ExitCode.CLUSTER


def test_the_interface_is_the_platforms_and_must_exist() -> None:
    """`hiyouga/EasyR1#431`, `volcengine/verl#726`: left to choose, Gloo took a wrong one."""
    assert interface_of("lo", "algo-1") == "lo"
    assert interface_of(None, "127.9.0.12") == "lo"
    with pytest.raises(StageError, match="no network interface 'eth7' here"):
        interface_of("eth7", "algo-1")


def test_ranks_are_told_the_interface_and_the_leaders_address() -> None:
    """`hiyouga/EasyR1#431`: NCCL and Gloo must not choose for themselves."""
    env = SageMakerEnv(
        base=Path("/opt/ml"), hyperparameters={}, hosts=("algo-1", "algo-2"),
        current_host="algo-2", network_interface="eth0", channels={}, ranks_per_host=2,
    )  # fmt: skip
    ranks = rank_variables(env, {"OMP_NUM_THREADS": "3"}, ["10.0.0.1", 29500], "eth0")
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("3", "1")]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert rank["GLOO_SOCKET_IFNAME"] == rank["NCCL_SOCKET_IFNAME"] == "eth0"
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("10.0.0.1", "29500")
        assert rank["OMP_NUM_THREADS"] == "3"


def test_a_host_named_by_an_address_is_that_address_and_else_its_interfaces() -> None:
    assert own_address("127.9.0.12", "lo") == "127.9.0.12"
    assert own_address("algo-1", "lo") == "127.0.0.1"


def test_every_port_of_a_node_is_explicit_and_outside_of_rays_own_range() -> None:
    """`ray start` refuses fixed ports in 10002-19999, which it gives to workers."""
    ports = Ports.of("127.9.0.12")
    numbers = {
        option.split("=")[0]: int(option.split("=")[1]) for option in ports.options(head=True)
    }
    assert len(set(numbers.values())) == len(numbers) == 11
    assert all(20000 <= number < 32768 for number in numbers.values())
    assert numbers["--port"] == ports.head
    assert "--port" not in " ".join(ports.options(head=False)).replace("-port=", "")


def test_a_block_with_a_taken_port_is_passed_over() -> None:
    ports = Ports.of("127.9.0.13")
    with socket.socket() as other:
        other.bind(("", ports.first + 5))
        other.listen()
        assert Ports.of("127.9.0.13") != ports


def test_a_listening_port_is_reachable_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert reachable("127.0.0.1", listening.getsockname()[1])
    assert not reachable("127.0.0.1", free_port("127.0.0.1"))


def test_authentication_is_explicit_and_nothing_of_rays_is_inherited() -> None:
    """Unset, Ray turns it on by itself where a token lies in the home folder (FACTS E.4)."""
    environ = node_environment(
        {"PATH": "/bin", "RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "x"}, "t" * 32
    )
    assert environ["PATH"] == "/bin"
    assert environ["RAY_AUTH_MODE"] == "token"
    assert environ["RAY_AUTH_TOKEN"] == "t" * 32
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "RAY_ADDRESS" not in environ


def test_a_node_bears_its_hosts_label_address_and_folder() -> None:
    ports = Ports(20000)
    head = head_command(0, "10.0.0.1", ports, Path("/tmp/x"), 8)
    worker = worker_command(3, "10.0.0.4", ports, Path("/tmp/y"), 8, head="10.0.0.1:20000")
    for command in (head, worker):
        assert command[1:3] == ["start", "--block"]
    assert {"--head", "--port=20000", "--node-ip-address=10.0.0.1"} <= set(head)
    assert '--resources={"host:3": 1}' in worker
    assert {"--address=10.0.0.1:20000", "--temp-dir=/tmp/y", "--num-gpus=8"} <= set(worker)
    assert "--head" not in worker


# The ticket


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def test_the_newest_ticket_of_an_attempt_is_read_and_no_other(server: S3Server) -> None:
    store = Store(BUCKET, server.client())
    assert read_ticket(store, STAGE, 1) is None
    old, new = Ticket.mint(20000), Ticket.mint(20032)
    publish_ticket(store, STAGE, 1, old)
    publish_ticket(store, STAGE, 1, new)
    assert read_ticket(store, STAGE, 1) == new
    assert read_ticket(store, STAGE, 2) is None
    assert len({old.session, new.session, old.token, new.token}) == 4


def test_a_refused_read_is_not_taken_for_no_ticket(server: S3Server) -> None:
    fault = server.fail("GET", "cluster/001", "AccessDenied")
    with pytest.raises(StoreError):
        read_ticket(Store(BUCKET, server.client()), STAGE, 1)
    server.faults.remove(fault)


def test_a_ticket_keeps_its_token_out_of_logs() -> None:
    ticket = Ticket.mint(20000)
    assert ticket.token not in repr(ticket)


# The beacon


def test_a_thread_that_moves_is_told_from_one_that_waits(tmp_path: Path) -> None:
    beacon, reader = Beacon(tmp_path, 3), ProgressReader(tmp_path, range(3, 4))
    assert reader.read(0.0)[0].step == -1
    beacon.look()
    first = reader.read(10.0)[0]
    note_step(tmp_path, 3, 7, False)
    assert reader.read(11.0)[0].step == 7
    beacon.look()
    moved = reader.read(12.0)[0]
    assert (first.idle, moved.idle, moved.waiting) == (0.0, 0.0, False)


def test_the_beacon_of_another_thread_sees_a_main_thread_that_stands_still(tmp_path: Path) -> None:
    beacon, reader = Beacon(tmp_path, 0), ProgressReader(tmp_path, range(1))
    looks = []

    def watch() -> None:
        for now in (0.0, 5.0, 9.0):
            beacon.look()
            looks.append(reader.read(now)[0])

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()  # this thread does not move meanwhile
    assert looks[-1].idle >= 4.0
    assert looks[-1].where.startswith("test_cluster_parts.test_the_beacon_of_another_thread")


def test_silence_counts_as_standing_still_and_as_not_waiting(tmp_path: Path) -> None:
    """A stopped process cannot say that it no longer waits."""
    reader = ProgressReader(tmp_path, range(1))
    (tmp_path / "beacon-00000.json").write_text(
        '{"beat": 1, "looks": 1, "waiting": true, "where": "grpo.step:1"}'
    )
    assert reader.read(0.0)[0].waiting
    silent = reader.read(11.0)[0]
    assert (silent.idle, silent.waiting, silent.where) == (11.0, False, "grpo.step:1, silent")


def test_a_rank_in_a_collective_is_seen_to_wait(tmp_path: Path) -> None:
    """Two real ranks; one never comes to the barrier."""
    script = (
        "import sys, time, threading, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from training_container.cluster.beacon import Beacon\n"
        "rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:' + port,"
        " rank=rank, world_size=2)\n"
        "Beacon(folder, rank).start()\n"
        "dist.barrier() if rank == 0 else time.sleep(600)\n"
    )
    port = str(free_port("127.0.0.1"))
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), port, str(tmp_path)],
                         env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        for rank in range(2)
    ]  # fmt: skip
    reader, deadline = ProgressReader(tmp_path, range(2)), time.monotonic() + 120
    try:
        while not (seen := reader.read(time.monotonic()))[0].waiting or seen[1].idle < 2:
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.2)
        assert [progress.waiting for progress in seen] == [True, False]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
