"""The SFT loop: it learns, resumes exactly, and stops where the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contracts.run_spec import RunSpec, parse_run_spec
from contracts.stages import GrpoStage, OptimizerSpec, SftStage
from tests.training import tiny
from training_container.engine.distributed import single_process
from training_container.engine.errors import DataError
from training_container.engine.schedule import learning_rate, plan_steps
from training_container.trainer import StageResult, run_stage

TRAIN, HELD_OUT = tiny.split_pairs()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.save_model(tmp_path_factory.mktemp("base"), hidden=32)


def spec_of(**changes: Any) -> RunSpec:
    data = {"train": "s3://bucket/train.jsonl", "validation": "s3://bucket/validation.jsonl"}
    sft = {"batch_size": 8, "max_length": 192}
    settings = {"data": data, "sft": sft, "max_steps": 6, **changes}
    return parse_run_spec(tiny.run_document(tiny.sft_stage(**settings)))


def train(
    root: Path, spec: RunSpec, base: Path, checkpointer: tiny.FolderCheckpointer, rows: int = 20
) -> StageResult:
    return run_stage(
        spec,
        0,
        tiny.inputs(root, tiny.sft_rows(TRAIN[:rows]), tiny.sft_rows(HELD_OUT[:8]), base=base),
        world=single_process(),
        checkpointer=checkpointer,
        run_id="tiny-1",
        attempt=1,
        generation="g1",
    )


def test_the_loss_falls(tmp_path: Path, base: Path) -> None:
    checkpointer = tiny.FolderCheckpointer()
    spec = spec_of(max_steps=25, optimizer={"learning_rate": 1e-2}, validation={"every_steps": 25})
    assert train(tmp_path, spec, base, checkpointer, rows=200).completed
    assert checkpointer.rows[25]["loss"] < 0.5 * checkpointer.rows[1]["loss"]
    assert checkpointer.rows[25]["validation/loss"] < 0.5 * checkpointer.rows[1]["loss"]


def test_resume_is_bit_identical_past_an_epoch(tmp_path: Path, base: Path) -> None:
    """20 rows by 8: the third and fifth step cross an epoch. verl-project/verl#5725: a checkpoint
    right at an epoch's end must train on."""
    spec = spec_of(lora={"rank": 4, "alpha": 8, "dropout": 0.1}, validation={"every_steps": 2})
    whole = tiny.FolderCheckpointer()
    train(tmp_path / "whole", spec, base, whole)
    first = tiny.FolderCheckpointer(tmp_path / "checkpoints", every=99, stop_after=5)
    train(tmp_path / "cut", spec, base, first)
    second = tiny.FolderCheckpointer(tmp_path / "checkpoints", every=99)
    train(tmp_path / "cut", spec, base, second)
    assert tiny.comparable({**first.rows, **second.rows}) == tiny.comparable(whole.rows)
    a, b = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_micro_batches_change_nothing(tmp_path: Path, base: Path) -> None:
    rows = []
    for tokens in (192, 16384):
        checkpointer = tiny.FolderCheckpointer()
        spec = spec_of(micro_batch_tokens=tokens, max_steps=2)
        train(tmp_path / str(tokens), spec, base, checkpointer)
        rows.append(checkpointer.rows[2])
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-6)
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-4)


def stage_of(**changes: Any) -> SftStage:
    document = {**tiny.sft_stage(), "sft": {"batch_size": 8}, "max_steps": None, **changes}
    return SftStage.model_validate(document, strict=False)


def test_the_smaller_of_steps_and_epochs_ends_a_stage() -> None:
    assert plan_steps(stage_of(epochs=2), 20).steps == 5
    assert plan_steps(stage_of(epochs=2, max_steps=3), 20).steps == 3
    plan = plan_steps(stage_of(epochs=2), 20)
    assert [plan.ends(step, 8 * step) for step in (4, 5)] == [False, True]
    with pytest.raises(DataError, match="fewer than the 8 rows"):
        plan_steps(stage_of(epochs=1), 7)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1]),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(scheduler: str, expected: list[float]) -> None:
    spec = OptimizerSpec.model_validate(
        {
            "learning_rate": 1.0,
            "lr_scheduler": scheduler,
            "warmup_steps": 2,
            "min_lr_ratio": 0.1,
        },
        strict=False,
    )
    found = [learning_rate(spec, step, 6) for step in range(1, 7)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_folder_without_a_model_is_an_error_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        train(tmp_path, spec_of(), tmp_path, tiny.FolderCheckpointer())


def test_grpo_plans_by_prompts() -> None:
    stage = GrpoStage.model_validate({**tiny.grpo_stage(max_steps=None), "epochs": 3}, strict=False)
    assert plan_steps(stage, 20).steps == 7
