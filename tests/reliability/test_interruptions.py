"""An interrupted run ends as the uninterrupted one, to the last bit, wherever that happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from contracts.attempt import CheckpointRef
from contracts.failures import ExitCode
from tests.reliability.job import Job, toy_job
from tests.reliability.kills import (
    ANNOUNCE,
    RESTORE,
    SECOND_FLAG,
    SECOND_UPLOAD,
    interrupt_randomly,
    kill_at,
)
from tests.reliability.toy_rank import Policy, train_step
from tests.training.s3 import S3Server, s3_server
from training_container.engine.distributed import single_process

STEPS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


Result = tuple[dict[int, float], bytes]


@pytest.fixture(scope="module")
def reference(server: S3Server, tmp_path_factory: pytest.TempPathFactory):
    """(losses by step, weights) of runs that nobody interrupted, by number of ranks."""
    found: dict[int, Result] = {}

    def run(ranks: int) -> Result:
        if ranks not in found and ranks == 1:
            found[1] = train_here(dropout=0.1)
        elif ranks not in found:
            folder = tmp_path_factory.mktemp(f"reference-{ranks}")
            run_id = f"reference-20260101-{ranks}"
            job = toy_job(server, folder, steps=STEPS, ranks=ranks, run_id=run_id)
            assert job.run() == 0, job.log
            found[ranks] = losses(job), job.model()
        return found[ranks]

    return run


def train_here(*, dropout: float) -> Result:
    """The toy stage on one rank in this process: no container, no checkpoint."""
    torch.set_num_threads(1)
    world = single_process()
    policy = Policy(world, dropout)
    found = {step: train_step(policy, world, step) for step in range(1, STEPS + 1)}
    return found, safetensors.torch.save(dict(policy.module.state_dict()))


def new_job(server: S3Server, folder: Path, **options) -> Job:
    server.mend()
    server.hooks.clear()
    run_id = f"toy-20260101-{folder.name[-12:].strip('_-').replace('_', '-')}"
    return toy_job(server, folder, steps=STEPS, run_id=run_id, **options)


def losses(job: Job) -> dict[int, float]:
    return {step: row["metrics"]["loss"] for step, row in job.rows().items()}


def same(job: Job, expected: tuple[Mapping[int, float], bytes]) -> None:
    """Every step once, every loss and every weight to the last bit."""
    assert sorted(job.rows()) == list(range(1, STEPS + 1))
    assert losses(job) == expected[0]
    assert job.model() == expected[1]


def next_attempt(job: Job) -> None:
    """What the control plane does after a terminal status: a new attempt with a floor."""
    newest = job.complete()
    job.attempt += 1
    if newest:
        job.floor = CheckpointRef(step=newest[0].id.step, generation=newest[0].id.generation)
    job.prepare()


@pytest.mark.timeout(900)
def test_killed_in_upload_restore_and_export_it_ends_bit_identical(
    server, tmp_path, reference
) -> None:
    """aws-samples/amazon-sagemaker-managed-spot-training#3; huggingface/trl#3148."""
    job = new_job(server, tmp_path)
    assert kill_at(job, SECOND_UPLOAD), job.log
    saved = job.complete()[0].id.step
    next_attempt(job)
    assert kill_at(job, RESTORE), job.log
    assert kill_at(job, ANNOUNCE), job.log
    assert job.layout.model_manifest not in server.keys(job.layout.model_prefix)
    resumed = [row["step"] for row in job.rows().values() if row["resumed"]]
    assert min(resumed) == saved + 1, "nothing before the save was trained again"
    assert job.run() == 0, job.log
    same(job, reference(1))


@pytest.mark.timeout(900)
def test_two_ranks_killed_before_a_flag_end_bit_identical(server, tmp_path, reference) -> None:
    """volcengine/verl#625: shards of other ranks were missing after a restart."""
    job = new_job(server, tmp_path, ranks=2)
    assert kill_at(job, SECOND_FLAG), job.log
    (saved,) = job.complete()
    assert saved.flags[0].world_size == 2
    assert job.run() == 0, job.log
    assert "resuming after step" in job.log
    same(job, reference(2))


@pytest.mark.timeout(900)
def test_sigterm_saves_and_the_next_step_is_the_first(server, tmp_path, reference) -> None:
    """aws/sagemaker-python-sdk#1040: the first step of attempt 2 is the checkpoint's plus one."""
    job = new_job(server, tmp_path, every_minutes=30, tags={"pause": "0.2"})
    stop_in_training(job)
    (saved,) = job.complete()
    assert max(job.rows()) == saved.id.step < STEPS
    next_attempt(job)
    assert job.run() == 0, job.log
    resumed = [step for step, row in job.rows().items() if row["resumed"]]
    assert min(resumed) == saved.id.step + 1
    same(job, reference(1))


@pytest.mark.timeout(900)
def test_other_numbers_of_ranks_continue_within_rounding(server, tmp_path) -> None:
    """volcengine/verl#2265: another number of ranks failed with FileNotFoundError."""
    tags = {"dropout": "0", "pause": "0.2"}  # dropout is drawn per rank
    job = new_job(server, tmp_path, every_minutes=30, tags=tags)
    for ranks in (1, 2):
        job.ranks = ranks
        stop_in_training(job)
    first, second = job.complete()[::-1]
    assert (first.flags[0].world_size, second.flags[0].world_size) == (1, 2)
    assert first.id.step < second.id.step < STEPS
    job.ranks = 1
    assert job.run() == 0, job.log
    assert losses(job) == pytest.approx(train_here(dropout=0)[0], abs=1e-5)
    assert [job.rows()[s.id.step + 1]["resumed"] for s in (first, second)] == [True, True]


def stop_in_training(job: Job) -> None:
    """SIGTERM after the first steps; the container saves and leaves."""
    job.server.requests.clear()
    container = job.start()
    # Once when the container starts, once when the rank restores; then after steps.
    container.wait_for(lambda: job.server.count("GET", f"{job.run_id}.*control.json") >= 3)
    container.sigterm()
    assert container.wait() == ExitCode.STOPPED, job.log
    assert job.failure.startswith("outcome=interrupted retryable=true code=stopped")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(16))
def test_random_interruptions_end_bit_identical(server, tmp_path, reference, ranks, seed) -> None:
    """32 runs, each interrupted once or twice at moments drawn from the seed."""
    job = new_job(server, tmp_path, ranks=ranks)
    done: list[str] = []
    for number in range(1 + seed % 2):
        done.append(interrupt_randomly(job, 1000 * ranks + 10 * seed + number))
        if (seed // 2 + number) % 2:
            next_attempt(job)
    assert job.run() == 0, f"{done}\n{job.log}"
    same(job, reference(ranks))
