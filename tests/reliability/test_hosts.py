"""Jobs of several hosts: real containers, a real Ray cluster, hosts that vanish, hang and fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from contracts.failures import ExitCode
from tests.reliability.cluster import Hosts, partition
from tests.reliability.job import Job, toy_job
from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.store import Store
from training_container.cluster.addresses import Ports
from training_container.cluster.ticket import Ticket, publish_ticket

pytestmark = pytest.mark.timeout(900)  # Ray takes minutes to start where every core is busy
RANK, WARM_RANK = "tests.reliability.toy_rank", "tests.reliability.warm"
STEPS = 16
APART_SECONDS = float(os.environ.get("GRPOHUB_TEST_APART_SECONDS", "10"))
"""Between the starts of two hosts; seconds show the same as the minute that has been seen."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def make(server: S3Server, tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """A prepared job of two hosts with one rank each; its processes end with the test."""
    server.clear()
    made: list[Hosts] = []

    def start(
        *, limits: Mapping[str, float] | None = None, tags: Mapping[str, str] | None = None,
        every_minutes: float = 0.001, rank: str = WARM_RANK,
    ) -> Hosts:  # fmt: skip
        job = toy_job(
            server, tmp_path, steps=STEPS, module=rank, every_minutes=every_minutes,
            tags={"pause": "0.2", **(tags or {})},
        )  # fmt: skip
        made.append(Hosts(job, limits=dict(limits or {})))
        return made[-1]

    yield start
    for hosts in made:
        hosts.kill_all()


@pytest.fixture(scope="module")
def reference(
    server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[int, float], bytes]:
    """Losses and weights of the same two ranks on one host, uninterrupted."""
    folder = tmp_path_factory.mktemp("reference")
    job = toy_job(server, folder, steps=STEPS, ranks=2, run_id="reference-20260101-2")
    assert job.run() == 0, job.log
    return losses(job), job.model()


def losses(job: Job) -> dict[int, float]:
    return {step: row["metrics"]["loss"] for step, row in job.rows().items()}


def continue_on_one_host(hosts: Hosts) -> None:
    """The next attempt gets one host with as many GPUs."""
    hosts.job.attempt += 1
    hosts.job.ranks, hosts.job.module = 2, "tests.reliability.toy_container"
    hosts.job.prepare()
    assert hosts.job.run() == 0, hosts.job.log


def test_a_lost_host_fails_the_attempt_by_name_and_new_hosts_carry_on_to_the_last_bit(
    reference: tuple[dict[int, float], bytes], server: S3Server, make: Callable[..., Hosts]
) -> None:
    """The next attempt's hosts have other addresses and start in the other order.

    `volcengine/verl#1314`, `#500`, `#625`, `NovaSky-AI/SkyRL#800`
    """
    hosts = make()
    hosts.start_all()
    hosts.wait_for(lambda: len(hosts.job.complete()) > 0 and hosts.step() < STEPS - 2)
    hosts.kill(1)
    assert hosts.wait() == [ExitCode.CLUSTER], hosts.logs()
    first, cause = hosts.failure(0).split("\n", 1)
    assert first == "outcome=infrastructure_failure retryable=true code=cluster"
    assert f"host 1 ({hosts.names[1]}) was lost" in cause

    saved = hosts.job.complete()[0]
    assert saved.id.step < STEPS
    hosts.job.attempt += 1
    hosts.job.prepare()
    hosts.rename(2)
    server.requests.clear()
    hosts.start(1)
    hosts.wait_for(lambda: server.count("GET", r"/cluster/002\.json"))
    hosts.start(0)
    assert hosts.wait() == [0, 0], hosts.logs()
    assert (losses(hosts.job), hosts.job.model()) == reference

    place = hosts.job.layout.checkpoint_prefix(saved.id.step, saved.id.generation)
    files = [file for flag in saved.flags for file in flag.files]
    names = {file.key.removeprefix(place): file for file in files}
    fetched = {name: asked(server, file.key) for name, file in names.items()}
    # Each host reads its own files, and all read the index of the shards.
    index = "host-0/sharded/.metadata"
    assert fetched.pop(index) == [names[index].size] * 2
    assert len(fetched) > 4
    assert fetched == {name: [names[name].size] for name in fetched}


def asked(server: S3Server, key: str) -> list[int]:
    """Bytes of each answer to a GET of ``key``."""
    return [r.sent for r in server.requests if r.method == "GET" and f"/{key}?" in r.target]


def test_a_worker_whose_leader_never_shows_says_so(make: Callable[..., Hosts]) -> None:
    """`aws/sagemaker-python-sdk#138`"""
    hosts = make(limits={"join": 3.0})
    hosts.start(1)
    assert hosts.wait() == [ExitCode.CLUSTER]
    assert f"the leader {hosts.names[0]} has not announced itself" in hosts.failure(1)


@pytest.mark.long
def test_hosts_stop_at_one_step_and_resume_in_place(
    reference: tuple[dict[int, float], bytes], server: S3Server, make: Callable[..., Hosts]
) -> None:
    """One host is told to stop; both do, after the same step, with a checkpoint. They come back in
    place, under new addresses, and find the ticket of the cluster before. `volcengine/verl#1144`
    """
    hosts = make(every_minutes=30)
    hosts.start_all()
    hosts.wait_for(lambda: hosts.step() >= 3)
    hosts.containers[1].sigterm()
    assert hosts.wait() == [ExitCode.STOPPED, ExitCode.STOPPED], hosts.logs()
    (saved,) = hosts.job.complete()
    assert [flag.host_rank for flag in saved.flags] == [0, 1]
    assert {(flag.num_hosts, flag.world_size) for flag in saved.flags} == {(2, 2)}
    assert max(hosts.job.rows()) == saved.id.step < STEPS

    hosts.rename(2)
    server.requests.clear()
    hosts.start(1)
    hosts.wait_for(lambda: server.count("GET", r"/cluster/001\.json"))
    hosts.start(0)
    assert hosts.wait() == [0, 0], hosts.logs()
    assert (losses(hosts.job), hosts.job.model()) == reference


@pytest.mark.long
def test_a_host_that_never_comes_is_named(make: Callable[..., Hosts]) -> None:
    """`ServerlessLLM/ServerlessLLM#311`"""
    hosts = make(limits={"join": 60.0})
    hosts.start(0)
    assert hosts.wait() == [ExitCode.CLUSTER]
    assert f"hosts are missing: {hosts.names[1]}: never came" in hosts.failure(0)


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_hosts_meet_in_any_order_and_some_time_apart(make: Callable[..., Hosts], order) -> None:
    """`volcengine/verl#1144`. Instances of a job have come up minutes apart."""
    hosts = make()
    hosts.start(order[0])
    time.sleep(APART_SECONDS)
    hosts.start(order[1])
    assert hosts.wait() == [0, 0], hosts.logs()


@pytest.mark.long
def test_a_ticket_of_a_dead_session_lets_nobody_in(
    server: S3Server, make: Callable[..., Hosts]
) -> None:
    """`volcengine/verl#1144`, `#595`: hosts met in the session of an incarnation before. The old
    ticket names the port of the new cluster, whose own ticket is late: the new one refuses it."""
    hosts = make()
    key = hosts.job.layout.cluster(1)
    stale = Ticket.mint(Ports.of(hosts.names[0]).head)
    publish_ticket(Store(BUCKET, server.client()), hosts.job.layout, 1, stale)
    server.hooks.append(lambda method, target: time.sleep(8 * (method == "PUT" and key in target)))
    hosts.start_all()
    assert hosts.wait() == [0, 0], hosts.logs()
    said = hosts.log(1)
    assert "; asking for the ticket again" in said or "the leader has a new ticket" in said


@pytest.mark.long
def test_a_worker_ends_when_its_leader_is_gone(
    reference: tuple[dict[int, float], bytes], make: Callable[..., Hosts]
) -> None:
    """`hiyouga/EasyR1#324`"""
    hosts = make()
    hosts.start_all()
    hosts.wait_for(lambda: len(hosts.job.complete()) > 0 and hosts.step() < STEPS - 2)
    hosts.kill(0)
    assert hosts.wait() == [ExitCode.CLUSTER], hosts.logs()
    assert f"the leader {hosts.names[0]} was lost" in hosts.failure(1)
    continue_on_one_host(hosts)
    assert (losses(hosts.job), hosts.job.model()) == reference


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "code", "cause"),
    [
        ("reward@4@1", ExitCode.REWARD, "source grid: 90% of samples failed"),
        ("nan@4@0", ExitCode.NON_FINITE, "loss is nan"),
    ],
)
def test_a_failure_on_one_rank_ends_all_hosts_with_its_message(
    make: Callable[..., Hosts], trouble: str, code: ExitCode, cause: str
) -> None:
    hosts = make(tags={"trouble": trouble})
    assert hosts.run() == [code, code], hosts.logs()
    for rank in range(2):
        assert f"code={code.name.lower()}" in hosts.failure(rank)
        assert cause in hosts.failure(rank)


@pytest.mark.long
def test_a_rank_that_hangs_is_found_and_named(make: Callable[..., Hosts]) -> None:
    """`volcengine/verl#3873`, `#3324`"""
    hosts = make(limits={"idle": 30.0}, rank=RANK)
    hosts.start_all()
    hosts.wait_for(lambda: hosts.step() >= 3)
    rank = next(p for p in tree(hosts, 1) if RANK in p.cmdline())
    rank.send_signal(signal.SIGSTOP)
    assert hosts.wait() == [ExitCode.CLUSTER, ExitCode.CLUSTER], hosts.logs()
    for host in range(2):
        assert "hung: no rank has moved" in hosts.failure(host)
        assert f"rank 1 on host 1 ({hosts.names[1]})" in hosts.failure(host)
        assert "1 others wait for it" in hosts.failure(host)


@pytest.mark.long
def test_nothing_is_left_behind_when_a_job_is_over(make: Callable[..., Hosts]) -> None:
    hosts = make(rank=RANK)
    hosts.start_all()
    hosts.wait_for(lambda: hosts.step() >= 3)
    processes = [p for rank in range(2) for p in tree(hosts, rank)]
    assert any("raylet" in p.name() for p in processes)
    assert hosts.wait() == [0, 0], hosts.logs()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not [path for rank in range(2) for path in hosts.folder(rank).glob("grpohub-*")]


def tree(hosts: Hosts, rank: int) -> list[Any]:
    return psutil.Process(hosts.containers[rank].process.pid).children(recursive=True)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_hosts_that_are_cut_off_from_each_other_both_end_and_lose_no_saved_step(
    reference: tuple[dict[int, float], bytes], server: S3Server, tmp_path: Path
) -> None:
    """A partition kills nobody and resets no connection: only silence tells."""
    from tests.reliability.namespaces import Namespaces, unavailable

    if reason := unavailable():
        pytest.skip(reason)
    server.clear()
    with Namespaces(2, server.endpoint) as net:
        job = toy_job(server, tmp_path, steps=STEPS, module=RANK, tags={"pause": "0.5"})
        job.environ["AWS_ENDPOINT_URL"] = net.endpoint
        hosts = partition(job, net)
        assert f"host 1 ({net.addresses[1]}) was lost" in hosts.failure(0)
        assert f"the leader {net.addresses[0]} was lost" in hosts.failure(1)
        assert job.complete()[0].id.step < STEPS
        continue_on_one_host(hosts)
    assert (losses(job), job.model()) == reference
