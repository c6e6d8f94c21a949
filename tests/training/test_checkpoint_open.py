"""The single door to a checkpoint: which one, whether it is whole, and what it costs to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.attempt import CheckpointRef
from contracts.checkpoints import CheckpointId
from contracts.failures import ExitCode
from tests.training.checkpoint_files import (
    LAYOUT,
    NEW,
    OLD,
    damage,
    put_checkpoint,
)
from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.open import HostShape, OpenedCheckpoint, open_checkpoint
from training_container.checkpoints.store import Store
from training_container.failure import StageError


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(server: S3Server) -> None:
    server.clear()


def opened(server: S3Server, folder: Path, **options: object) -> OpenedCheckpoint | None:
    return open_checkpoint(Store(BUCKET, server.client()), LAYOUT, folder, **options)


def test_newest_complete_is_highest_step_then_latest_generation(server, tmp_path) -> None:
    for step, generation in ((50, OLD), (100, OLD), (100, NEW), (99, NEW)):
        put_checkpoint(server, step, generation)
    assert opened(server, tmp_path).id == CheckpointId(100, NEW)


def test_steps_are_compared_as_numbers(server, tmp_path) -> None:
    put_checkpoint(server, 50)
    put_checkpoint(server, 100)
    assert opened(server, tmp_path).id.step == 100


def test_a_step_without_every_flag_is_invisible(server, tmp_path) -> None:
    """awslabs/awsome-distributed-ai#190: resume picked an incomplete sharded checkpoint."""
    put_checkpoint(server, 10, hosts=2)
    put_checkpoint(server, 20, hosts=2, without_flag_of=1)
    assert opened(server, tmp_path).id.step == 10


def test_a_listed_file_that_is_missing_or_torn_makes_it_incomplete(server, tmp_path) -> None:
    """axolotl-ai-cloud/axolotl#3948: the newest folder may lack its last object."""
    put_checkpoint(server, 10)
    put_checkpoint(server, 20)
    put_checkpoint(server, 30)
    key = LAYOUT.host_prefix(30, OLD, 0) + "shared/__0_0.distcp"
    server.client().delete_object(Bucket=BUCKET, Key=key)
    torn = LAYOUT.host_prefix(20, OLD, 0) + "shared/__0_0.distcp"
    server.client().put_object(Bucket=BUCKET, Key=torn, Body=b"torn")
    assert opened(server, tmp_path).id.step == 10


def test_a_truncated_flag_is_not_a_flag(server, tmp_path) -> None:
    """hiyouga/EasyR1#462: a tracker cut short crashed every restart."""
    put_checkpoint(server, 10)
    put_checkpoint(server, 20)
    server.client().put_object(Bucket=BUCKET, Key=LAYOUT.flag(20, OLD, 0), Body=b'{"format": 1')
    assert opened(server, tmp_path).id.step == 10


def test_a_damaged_shard_of_the_right_size_falls_back_and_is_reported(server, tmp_path) -> None:
    put_checkpoint(server, 10)
    put_checkpoint(server, 20)
    key = damage(server, 20)
    found = opened(server, tmp_path, floor=CheckpointRef(step=20, generation=OLD))
    assert found.id.step == 10
    assert key in found.skipped[0]


def test_all_damaged_is_an_error_and_no_fresh_start(server, tmp_path) -> None:
    put_checkpoint(server, 10)
    damage(server, 10)
    with pytest.raises(StageError, match="differs from its sha256") as caught:
        opened(server, tmp_path)
    assert caught.value.code is ExitCode.CHECKPOINT


def test_nothing_at_all_is_a_fresh_start(server, tmp_path) -> None:
    assert opened(server, tmp_path) is None


def test_nothing_complete_under_a_floor_is_an_error(server, tmp_path) -> None:
    """aws/sagemaker-python-sdk#1040: after an interruption training began again at step 0."""
    put_checkpoint(server, 20, hosts=2, without_flag_of=1)
    with pytest.raises(StageError, match="none") as caught:
        opened(server, tmp_path, floor=CheckpointRef(step=20, generation=OLD))
    assert caught.value.code is ExitCode.CHECKPOINT


def test_older_than_the_floor_is_an_error(server, tmp_path) -> None:
    put_checkpoint(server, 10)
    with pytest.raises(StageError, match="step 10") as caught:
        opened(server, tmp_path, floor=CheckpointRef(step=20, generation=OLD))
    assert caught.value.code is ExitCode.CHECKPOINT


def test_a_newer_one_than_the_floor_is_taken(server, tmp_path) -> None:
    """A managed Spot restart happens inside a job, after the control plane chose the floor."""
    put_checkpoint(server, 20)
    put_checkpoint(server, 30)
    found = opened(server, tmp_path, floor=CheckpointRef(step=20, generation=OLD))
    assert found.id.step == 30


@pytest.mark.parametrize("code", ["AccessDenied", "SlowDown", "InternalError"])
@pytest.mark.parametrize("target", ["list-type", "flag", "distcp"])
def test_an_s3_error_is_never_nothing_found(server, tmp_path, code: str, target: str) -> None:
    """The first design read AccessDenied as "not complete" and trained from step 0 again."""
    put_checkpoint(server, 10)
    server.fail("GET", target, code)
    with pytest.raises(StageError, match=code) as caught:
        opened(server, tmp_path)
    assert caught.value.code is ExitCode.STORAGE


def test_a_passing_slowdown_is_retried(server, tmp_path, monkeypatch) -> None:
    put_checkpoint(server, 10)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    server.fail("GET", "distcp", "SlowDown", times=1)
    assert open_checkpoint(Store(BUCKET), LAYOUT, tmp_path).id.step == 10


def test_listing_is_paginated_and_uses_no_head(server, tmp_path) -> None:
    put_checkpoint(server, 10)
    put_checkpoint(server, 20)
    client = server.client()
    client.meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 3}
    )
    server.requests.clear()
    assert open_checkpoint(Store(BUCKET, client), LAYOUT, tmp_path).id.step == 20
    assert server.count("GET", "list-type") == 4, "ten objects, three a page"
    assert server.count("HEAD", "") == 0


def test_exact_takes_that_one_or_fails(server, tmp_path) -> None:
    put_checkpoint(server, 10)
    put_checkpoint(server, 20)
    found = opened(server, tmp_path, exact=CheckpointRef(step=10, generation=OLD))
    assert found.id.step == 10
    for bad in (CheckpointRef(step=10, generation=NEW), CheckpointRef(step=11, generation=OLD)):
        with pytest.raises(StageError, match="not usable"):
            opened(server, tmp_path, exact=bad)
    damage(server, 10)
    with pytest.raises(StageError, match="sha256") as caught:
        opened(server, tmp_path, exact=CheckpointRef(step=10, generation=OLD))
    assert caught.value.code is ExitCode.CHECKPOINT


class Worker:
    """Host 1 is told the choice; it neither lists nor judges."""

    def from_leader(self, choice: CheckpointId | None) -> CheckpointId | None:
        assert choice is None
        return CheckpointId(10, OLD)

    def problems(self, problem: str | None) -> list[str]:
        return [problem] if problem else []


EVERY_SHARD = {
    "sharded/.metadata",
    "sharded/__0_0.distcp",
    "sharded/__1_0.distcp",
    "shared/.metadata",
    "shared/__0_0.distcp",
}
"""Of two hosts with a rank each, and one copy of what they share."""


def test_a_host_of_the_old_shape_reads_its_own_files_and_the_index(server, tmp_path) -> None:
    """NovaSky-AI/SkyRL#800: every worker downloaded the whole checkpoint."""
    put_checkpoint(server, 10, hosts=2, ranks_per_host=2)
    server.requests.clear()
    shape = HostShape(host_rank=1, num_hosts=2, world_size=4)
    found = opened(server, tmp_path, shape=shape, agreement=Worker())
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {
        "sharded/.metadata",
        "sharded/__2_0.distcp",
        "sharded/__3_0.distcp",
        "shared/.metadata",
        "shared/__0_0.distcp",
    }
    read = sum(r.sent for r in server.requests if r.method == "GET" and "host-" in r.target)
    assert read == found.downloaded_bytes < sum(server.keys("runs/").values()) * 0.6
    assert not found.resharded


def test_a_changed_shape_reads_every_shard_and_one_copy_of_the_rest(server, tmp_path) -> None:
    put_checkpoint(server, 10, hosts=2)
    found = opened(server, tmp_path, shape=HostShape())
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert names == EVERY_SHARD
    assert found.resharded
    assert b"host 0" in (tmp_path / "shared/__0_0.distcp").read_bytes()


@pytest.mark.parametrize("host_rank", [0, 1])
def test_a_model_that_is_loaded_whole_needs_every_shard_on_the_first_host_alone(
    server, tmp_path, host_rank: int
) -> None:
    put_checkpoint(server, 10, hosts=2)

    found = opened(
        server, tmp_path, shape=HostShape(host_rank, 2, 2), whole=True,
        agreement=Worker() if host_rank else None,
        exact=CheckpointRef(step=10, generation=OLD),
    )  # fmt: skip
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert names == (EVERY_SHARD if host_rank == 0 else set())
    assert (found.downloaded_bytes > 0) is (host_rank == 0)


def test_hosts_skip_a_checkpoint_together_when_one_finds_damage(server, tmp_path) -> None:
    put_checkpoint(server, 10, hosts=2)
    put_checkpoint(server, 20, hosts=2)

    class Peer:
        """Host 0 is content with step 20, host 1 is not."""

        def from_leader(self, choice: CheckpointId | None) -> CheckpointId | None:
            self.choice = choice
            return choice

        def problems(self, _problem: str | None) -> list[str]:
            return ["host 1: torn"] if self.choice.step == 20 else []

    found = opened(server, tmp_path, shape=HostShape(0, 2, 2), agreement=Peer())
    assert found.id.step == 10
    assert found.skipped == ("host 1: torn",)


def test_a_body_that_breaks_off_is_continued_where_it_broke(server, tmp_path, monkeypatch) -> None:
    put_checkpoint(server, 10)
    store = Store(BUCKET, server.client())
    real = store._body
    broken = []

    def breaking(file, start):
        chunks = real(file, start)
        if start == 0 and file.key.endswith("__0_0.distcp"):
            from botocore.exceptions import ResponseStreamingError

            body = b"".join(chunks)
            yield body[:100]
            broken.append(file.key)
            raise ResponseStreamingError(error="reset")
        yield from chunks

    monkeypatch.setattr(store, "_body", breaking)
    assert open_checkpoint(store, LAYOUT, tmp_path).id.step == 10
    assert len(broken) == 2
