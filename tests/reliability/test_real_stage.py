"""The whole container with the real trainer, interrupted, against the same stage run in one go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.run_spec import parse_run_spec
from tests.reliability.cluster import partition
from tests.reliability.job import REAL, Job
from tests.reliability.kills import SECOND_FLAG, kill_at
from tests.training.s3 import BUCKET, S3Server, s3_server
from tests.training.tiny import (
    grpo_rows,
    grpo_stage,
    run_document,
    save_model,
    sft_rows,
    sft_stage,
    split_pairs,
    write_jsonl,
)
from training_container.engine.distributed import single_process
from training_container.engine.state import Decision
from training_container.trainer import StageInputs, run_stage

REWARD = """
def score(predict: str, ground_truth: str) -> float:
    return len(set(predict)) / 100
"""
# What depends on the clock, and on which saves an incarnation made.
TIMED = ("seconds", "checkpoint/", "tokens_per_second")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


class NoCheckpoints:
    """The checkpointer of a stage that nothing interrupts."""

    def load_weights(self, _weights: Any) -> bool:
        return False

    def restore(self, _state: Any) -> bool:
        return False

    def after_step(self, *_: Any, **__: Any) -> Decision:
        return Decision.CONTINUE

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def grpo_document() -> dict[str, Any]:
    stage = grpo_stage(
        max_steps=6,
        rewards=[{"name": "letters", "file": "rewards.py", "function": "score", "weight": 1.0}],
        grpo={"group_size": 4, "prompts_per_step": 4, "kl": {"coefficient": 0.01}},
        rollout={"max_response_length": 12, "log_samples": 2},
    )
    return run_document(stage, checkpoint={"every_minutes": 0.001})


def sft_document() -> dict[str, Any]:
    stage = sft_stage(max_steps=8, sft={"batch_size": 8, "max_length": 192})
    return run_document(stage, checkpoint={"every_minutes": 0.001})


def make_job(server: S3Server, folder: Path, document: dict[str, Any], ranks: int) -> Job:
    server.clear()
    train, _ = split_pairs()
    rows = grpo_rows(train) if document["stages"][0]["method"] == "grpo" else sft_rows(train)
    write_jsonl(folder / "data/rows.jsonl", rows)
    job = Job(
        server, folder, document, module=REAL, ranks=ranks,
        channels={"train": folder / "data", "model": save_model(folder / "model")},
    )  # fmt: skip
    job.prepare()
    key = job.layout.run.code("rewards.py")
    server.client().put_object(Bucket=BUCKET, Key=key, Body=REWARD.encode())
    return job


def run_here(job: Job, folder: Path) -> tuple[dict[int, Mapping[str, Any]], bytes]:
    """(metrics rows by step, exported weights) of the stage on one rank in this process."""
    torch.set_num_threads(1)
    (folder / "code").mkdir(parents=True)
    (folder / "code/rewards.py").write_text(REWARD)
    inputs = StageInputs(
        train=job.channels["train"], validation=None, model=job.channels["model"],
        code=folder / "code", output=folder / "output", export=folder / "export",
    )  # fmt: skip
    run_stage(
        parse_run_spec(job.document), 0, inputs, world=single_process(),
        checkpointer=NoCheckpoints(), run_id=job.run_id, attempt=1, generation="here",
    )  # fmt: skip
    lines = (folder / "output/metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    return rows, (folder / "export/model.safetensors").read_bytes()


def exact(rows: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, str], Any]:
    """The metrics that must not depend on time, by step and name."""
    return {
        (step, name): value
        for step, row in rows.items()
        for name, value in row["metrics"].items()
        if not any(mark in name for mark in TIMED)
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (grpo_document, 1),
        pytest.param(sft_document, 1, marks=pytest.mark.long),
        pytest.param(sft_document, 2, marks=pytest.mark.long),
        pytest.param(grpo_document, 2, marks=pytest.mark.long),
    ],
)
def test_a_killed_stage_ends_bit_identical(server, tmp_path, make, ranks: int) -> None:
    """huggingface/trl#3148, hiyouga/EasyR1: metrics and data differed after a resume."""
    job = make_job(server, tmp_path, make(), ranks)
    assert kill_at(job, SECOND_FLAG), job.log
    saved = job.complete()[0].id.step
    job.attempt = 2
    job.prepare()
    assert job.run() == 0, job.log
    assert f"resumed after step {saved}" in job.log
    rows, weights = exact(job.rows()), job.model()
    if ranks == 1:
        expected_rows, expected_weights = run_here(job, tmp_path / "here")
    else:
        (tmp_path / "whole").mkdir()
        whole = make_job(server, tmp_path / "whole", make(), ranks)
        assert whole.run() == 0, whole.log
        expected_rows, expected_weights = whole.rows(), whole.model()
    same(rows, exact(expected_rows))
    assert weights == expected_weights


def same(rows: Mapping[tuple[int, str], Any], expected: Mapping[tuple[int, str], Any]) -> None:
    """The same metrics; those that differ are named."""
    assert {k: (rows.get(k), v) for k, v in expected.items() if rows.get(k) != v} == {}
    assert rows.keys() == expected.keys()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_grpo_on_two_hosts_that_are_cut_off_resumes_bit_identical(server, tmp_path) -> None:
    """The leader is partitioned: both hosts end, and one with as many ranks carries on."""
    from tests.reliability.namespaces import Namespaces, unavailable

    if reason := unavailable():
        pytest.skip(reason)
    document = grpo_document()
    document["stages"][0]["max_steps"] = 12
    (tmp_path / "whole").mkdir()
    whole = make_job(server, tmp_path / "whole", document, 2)
    assert whole.run() == 0, whole.log
    expected, weights = exact(whole.rows()), whole.model()
    with Namespaces(2, server.endpoint) as net:
        job = make_job(server, tmp_path, document, 1)
        job.module, job.environ = "training_container.rank", {"AWS_ENDPOINT_URL": net.endpoint}
        partition(job, net)
        assert job.complete()[0].id.step < 12
        job.attempt, job.ranks, job.module = 2, 2, REAL
        job.prepare()
        assert job.run() == 0, job.log
    same(exact(job.rows()), expected)
    assert job.model() == weights
