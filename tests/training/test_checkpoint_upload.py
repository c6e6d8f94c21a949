"""The uploader: flags last, faults without harm, the fence, pruning, metrics before flags."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from contracts.checkpoints import complete_checkpoints, parse_flag
from contracts.control import Control
from tests.training.checkpoint_files import LAYOUT, NEW, OLD, put_checkpoint, put_control
from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.spool import Spool, UploadStatus
from training_container.checkpoints.store import Store
from training_container.checkpoints.uploader import Uploader, UploaderConfig


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(server: S3Server) -> None:
    server.clear()
    put_control(server)
    server.requests.clear()


class Host:
    """One host's spool with an uploader that drains it in this process."""

    def __init__(self, server: S3Server, root: Path, **options: Any) -> None:
        self.server = server
        values: dict[str, Any] = {
            "bucket": BUCKET, "run_id": LAYOUT.run.run_id, "stage_index": LAYOUT.index,
            "stage": LAYOUT.name, "attempt": 1, "generation": NEW, "host_rank": 0, "num_hosts": 1,
            "world_size": 1, "local_ranks": 1, "spool": str(root / "spool"),
            "outputs": str(root / "outputs"), "keep": 3, "pause_seconds": 0.01, "tries": 3,
        }  # fmt: skip
        self.config = UploaderConfig(**{**values, **options})
        self.spool = Spool(Path(self.config.spool), self.config.local_ranks)
        self.outputs = Path(self.config.outputs)
        self.outputs.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, *, finish: bool = True, metrics: Mapping[str, float] = {}) -> None:
        folder = self.spool.folder(step)
        for name in ("sharded/.metadata", "sharded/__0_0.distcp", "shared/__0_0.distcp"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(f"{name} {step}".encode() * 100)
        for rank in range(self.config.local_ranks if finish else self.config.local_ranks - 1):
            self.spool.finish(step, rank, metrics)

    def drain(self) -> UploadStatus:
        asked = threading.Event()
        asked.set()
        store = Store(BUCKET, self.server.client(), part_mib=5)
        Uploader(self.config, store, asked, sleep=lambda _: None).run()
        return self.spool.status()

    def complete_steps(self) -> list[int]:
        store = Store(BUCKET, self.server.client())
        listing = store.listing(LAYOUT.checkpoints_prefix)
        reports = complete_checkpoints(LAYOUT, listing, store.read)
        return [report.id.step for report in reports if report.complete]


def puts(server: S3Server) -> list[str]:
    return [r.target.rsplit("/", 1)[-1].rstrip("?") for r in server.requests if r.method == "PUT"]


def test_the_flag_comes_last_and_lists_every_file(server, tmp_path) -> None:
    host = Host(server, tmp_path)
    host.write(7, metrics={"validation/reward": 0.5})
    status = host.drain()
    assert host.complete_steps() == [7]
    assert puts(server)[-1] == "sync_completed_0.flag"
    key = LAYOUT.flag(7, NEW, 0)
    flag = parse_flag(server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    assert {file.key.rsplit("host-0/", 1)[1] for file in flag.files} == {
        "sharded/.metadata", "sharded/__0_0.distcp", "shared/__0_0.distcp",
    }  # fmt: skip
    assert flag.metrics == {"validation/reward": 0.5}
    assert status.committed_step == 7
    assert status.uploaded_bytes == status.committed_bytes > 0
    assert not host.spool.folder(7).exists()


def test_a_step_that_one_rank_has_not_finished_stays_unseen(server, tmp_path) -> None:
    host = Host(server, tmp_path, local_ranks=2, world_size=2)
    host.write(3, finish=False)
    host.drain()
    assert host.complete_steps() == []
    assert server.count("PUT", "step-") == 0


@pytest.mark.parametrize("code", ["AccessDenied", "SlowDown", "InternalError"])
@pytest.mark.parametrize("pattern", ["distcp", "flag"])
def test_a_failed_upload_leaves_no_flag_and_training_goes_on(
    server, tmp_path, code: str, pattern: str
) -> None:
    """marin-community/marin#9213: one rank's failed upload held the others for half an hour."""
    host = Host(server, tmp_path)
    host.write(5)
    server.fail("PUT", pattern, code)
    status = host.drain()
    assert host.complete_steps() == []
    assert status.failures == (1 if code == "AccessDenied" else 3), "a refusal is not retried"
    assert status.abandoned == [5]
    assert code in status.last_error
    assert host.spool.backlog() == 0, "the next step finds room"
    server.mend()
    host.write(6)
    host.drain()
    assert host.complete_steps() == [6]


def test_a_passing_slowdown_is_retried_until_the_step_is_committed(server, tmp_path) -> None:
    """marin-community/marin#9213: SlowDown must be retried."""
    host = Host(server, tmp_path)
    host.write(5)
    server.fail("PUT", "distcp", "SlowDown", times=2)
    status = host.drain()
    assert host.complete_steps() == [5]
    assert status.failures >= 1
    assert status.abandoned == []


def test_large_files_go_up_in_parts(server, tmp_path) -> None:
    host = Host(server, tmp_path)
    host.write(5)
    (host.spool.folder(5) / "sharded/__0_0.distcp").write_bytes(b"0123456789abcdef" * 1_000_000)
    host.drain()
    assert host.complete_steps() == [5]
    assert server.count("PUT", "partNumber=") == 4


def test_an_older_attempt_may_not_commit(server, tmp_path) -> None:
    host = Host(server, tmp_path)
    host.write(5)
    put_control(server, attempt=2)
    status = host.drain()
    assert status.fenced_by == 2
    assert server.count("PUT", "flag") == 0


def test_without_a_control_object_nothing_is_committed(server, tmp_path) -> None:
    host = Host(server, tmp_path)
    host.write(5)
    server.client().delete_object(Bucket=BUCKET, Key=LAYOUT.control)
    assert host.drain().abandoned == [5]
    assert host.complete_steps() == []


def test_the_fence_is_read_after_the_upload_and_before_the_flag(server, tmp_path) -> None:
    """A takeover while the files go up must still be seen."""
    host = Host(server, tmp_path)
    host.write(5)

    def take_over(method: str, target: str) -> None:
        if method == "PUT" and "distcp" in target:
            server.hooks.clear()
            body = Control(attempt=2).model_dump_json().encode()
            server.client().put_object(Bucket=BUCKET, Key=LAYOUT.control, Body=body)

    server.hooks.append(take_over)
    assert host.drain().fenced_by == 2
    assert host.complete_steps() == []


def test_metrics_rows_are_in_s3_before_the_flag(server, tmp_path) -> None:
    host = Host(server, tmp_path)
    (host.outputs / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n{"st')
    (host.outputs / "rollouts").mkdir()
    (host.outputs / "rollouts/step-00000005.parquet").write_bytes(b"rows")
    (host.outputs / "sample_prompt.json").write_text('{"messages": []}')
    host.write(5)
    host.drain()
    assert list(server.keys(LAYOUT.sample_prompt)) == [LAYOUT.sample_prompt]
    order = puts(server)
    assert order.index(f"001-{NEW}.jsonl") < order.index("sync_completed_0.flag")
    assert order.index("step-00000005.parquet") < order.index("sync_completed_0.flag")
    key = LAYOUT.metrics(1, NEW)
    body = server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert body == b'{"step": 4}\n{"step": 5}\n', "a row half written waits"


def test_only_the_leader_writes_metrics_and_prunes(server, tmp_path) -> None:
    for step in (1, 2, 3, 4):
        put_checkpoint(server, step)
    host = Host(server, tmp_path, host_rank=1, num_hosts=2, world_size=2)
    (host.outputs / "metrics.jsonl").write_text('{"step": 4}\n')
    host.write(5)
    host.drain()
    assert server.count("PUT", "metrics") == 0
    assert server.count("POST", "delete") == 0
    assert server.count("PUT", "sync_completed_1.flag") == 1


def test_pruning_keeps_the_newest_the_best_and_the_pinned(server, tmp_path) -> None:
    """volcengine/verl#3792: the best checkpoint by validation must survive, also over a restart."""
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        put_checkpoint(server, step, metrics={"validation/reward": value})
    host = Host(server, tmp_path, keep=2, best_metric="validation/reward", pinned_steps=(3,))
    host.write(6, metrics={"validation/reward": 0.5})
    host.drain()
    assert host.complete_steps() == [6, 5, 3, 2]
    assert not server.keys(f"{LAYOUT.checkpoints_prefix}step-00000004/")


def test_pruning_deletes_flags_before_data(server, tmp_path) -> None:
    """volcengine/verl#4873: the old one went before the new one was whole."""
    for step in (1, 2, 3):
        put_checkpoint(server, step)
    host = Host(server, tmp_path, keep=2)
    host.write(4)
    server.fail("POST", "delete", "SlowDown", times=1)
    status = host.drain()
    assert host.complete_steps() == [4, 3, 2, 1], "a failed prune deletes nothing and stops nothing"
    assert "SlowDown" in status.last_error
    bodies: list[str] = []
    host.write(5)
    server.hooks.append(lambda method, target: bodies.append(f"{method} {target}"))
    host.drain()
    assert host.complete_steps() == [5, 4]
    flag = next(i for i, line in enumerate(bodies) if line.startswith("PUT") and "flag" in line)
    deletes = [i for i, line in enumerate(bodies) if line.startswith("POST")]
    assert len(deletes) == 2, "one request for flags, then one for data"
    assert deletes[0] > flag, "nothing is pruned before the new one is committed"


def test_an_unfinished_older_step_of_a_dead_incarnation_is_swept(server, tmp_path) -> None:
    put_checkpoint(server, 2, hosts=2, without_flag_of=1)
    host = Host(server, tmp_path)
    host.write(4)
    host.drain()
    assert not server.keys(f"{LAYOUT.checkpoints_prefix}step-00000002/{OLD}/")


def test_a_killed_uploader_starts_again_from_the_spool(server, tmp_path) -> None:
    """Killed after the files and before the flag; its successor commits the step."""
    host = Host(server, tmp_path)
    host.write(5)
    store = Store(BUCKET, server.client())

    def die(*_: object) -> None:
        raise SystemExit

    store.put = die  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        Uploader(host.config, store, threading.Event())._attempt_step(host.spool.ready()[0])
    assert host.complete_steps() == []
    host.drain()
    assert host.complete_steps() == [5]
