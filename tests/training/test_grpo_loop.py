"""The GRPO loop on a tiny model: exact resume, invariances, and each variant a run may name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from contracts.metrics import MARK
from contracts.run_spec import RunSpec, parse_run_spec
from tests.training import tiny
from training_container.engine.distributed import single_process
from training_container.engine.errors import DataChangedError
from training_container.trainer import StageResult, run_stage

TRAIN, HELD_OUT = tiny.split_pairs()
REWARDS = [
    {
        "name": "short",
        "function": "length",
        "weight": 1.0,
        "parameters": {"maximum": 20, "slack": 20},
    },
    {"name": "format", "function": "think_answer_format", "weight": 0.5},
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.warm_model(tmp_path_factory.mktemp("warm"))


def spec_of(**changes: Any) -> RunSpec:
    """Five small steps; ten rows and four prompts a step, so the third step crosses an epoch."""
    grpo = {"group_size": 4, "prompts_per_step": 4, "kl": None, **changes.pop("grpo", {})}
    rollout = {"max_response_length": 40, "log_samples": 2, **changes.pop("rollout", {})}
    document = changes.pop("document", {})
    data = {"train": "s3://bucket/train.jsonl", "validation": "s3://bucket/validation.jsonl"}
    settings = {"data": data, "max_steps": 5, "rewards": REWARDS, **changes}
    stage = tiny.grpo_stage(grpo=grpo, rollout=rollout, **settings)
    return parse_run_spec(tiny.run_document(stage, **document))


def train(
    root: Path, spec: RunSpec, base: Path, checkpointer: tiny.FolderCheckpointer, rows: int = 10
) -> StageResult:
    held_out = tiny.grpo_rows(HELD_OUT[:4])
    return run_stage(
        spec,
        0,
        tiny.inputs(root, tiny.grpo_rows(TRAIN[:rows]), held_out, base=base),
        world=single_process(),
        checkpointer=checkpointer,
        run_id="tiny-1",
        attempt=1,
        generation="g1",
    )


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "model/model.safetensors")


def same_weights(left: Path, right: Path) -> bool:
    a, b = weights(left), weights(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


EXACT = {
    "plain": {},
    "mini batches, epochs, adaptive KL": {
        "grpo": {
            "mini_batch_prompts": 2,
            "epochs_per_batch": 2,
            "kl": {"control": "adaptive", "target": 0.001, "horizon": 64},
        }
    },
    "KL in the reward, dynamic sampling": {
        "grpo": {
            "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.05},
            "dynamic_sampling": {"max_refills": 2},
        }
    },
    "LoRA with dropout and KL": {
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "grpo": {"kl": {"coefficient": 0.05}},
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_resume_at_any_step_is_bit_identical(tmp_path: Path, base: Path, name: str) -> None:
    """Metrics and final weights equal those of the uninterrupted run, past an epoch's end too.

    verl-project/verl#1425, #1875, #2653, huggingface/trl#3148, #3185.
    """
    spec = spec_of(optimizer={"learning_rate": 1e-3}, **EXACT[name])
    whole = tiny.FolderCheckpointer(tmp_path / "whole/checkpoints")
    train(tmp_path / "whole", spec, base, whole)
    for cut in (1, 3, 4) if name == "plain" else (3,):
        root = tmp_path / f"cut{cut}"
        first = tiny.FolderCheckpointer(root / "checkpoints", every=99, stop_after=cut)
        assert not train(root, spec, base, first).completed
        second = tiny.FolderCheckpointer(root / "checkpoints", every=99)
        assert train(root, spec, base, second).completed
        rows = tiny.comparable({**first.rows, **second.rows})
        assert min(second.rows) == cut + 1
        assert rows == tiny.comparable(whole.rows)
        assert same_weights(tmp_path / "whole", root)


def test_a_resume_after_the_last_step_only_exports(tmp_path: Path, base: Path) -> None:
    spec = spec_of(max_steps=2)
    train(tmp_path, spec, base, tiny.FolderCheckpointer(tmp_path / "checkpoints"))
    before = weights(tmp_path)
    again = tiny.FolderCheckpointer(tmp_path / "checkpoints")
    assert train(tmp_path, spec, base, again).completed
    assert again.rows == {}
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path).items())


def test_a_changed_dataset_is_refused_on_resume(tmp_path: Path, base: Path) -> None:
    """EasyR1 resumes inside another permutation without a word when the data grew."""
    first = tiny.FolderCheckpointer(tmp_path / "checkpoints", stop_after=2)
    train(tmp_path, spec_of(), base, first)
    with pytest.raises(DataChangedError, match="dataset"):
        train(tmp_path, spec_of(), base, tiny.FolderCheckpointer(tmp_path / "checkpoints"), rows=11)
    changed = spec_of(seed=2)
    with pytest.raises(DataChangedError, match="stage"):
        train(tmp_path, changed, base, tiny.FolderCheckpointer(tmp_path / "checkpoints"))


def test_micro_batches_do_not_change_training(tmp_path: Path, base: Path) -> None:
    """verl-project/verl#906, #5625, modelscope/ms-swift#10117."""
    grpo = {"kl": {"coefficient": 0.05}, "entropy_coefficient": 0.01, "mini_batch_prompts": 2}
    found = []
    for tokens in (104, 16384):
        root = tmp_path / str(tokens)
        checkpointer = tiny.FolderCheckpointer()
        spec = spec_of(grpo=grpo, micro_batch_tokens=tokens, max_steps=2)
        train(root, spec, base, checkpointer)
        found.append((checkpointer.rows[2], weights(root)))
    (rows_a, weights_a), (rows_b, weights_b) = found
    assert rows_a["loss"] == pytest.approx(rows_b["loss"], abs=1e-6)
    assert rows_a["grad_norm"] == pytest.approx(rows_b["grad_norm"], rel=1e-4)
    for name, value in weights_a.items():
        torch.testing.assert_close(value, weights_b[name], atol=1e-5, rtol=0)


def test_rewards_rise(tmp_path: Path, base: Path) -> None:
    checkpointer = tiny.FolderCheckpointer()
    spec = spec_of(
        max_steps=25,
        optimizer={"learning_rate": 2e-3},
        grpo={"group_size": 8, "prompts_per_step": 4},
        validation={"every_steps": 100},
    )
    train(tmp_path, spec, base, checkpointer)
    rewards = [row["reward/short"] for row in checkpointer.rows.values()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


VARIANTS = {
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "sequence_mean_token_sum_norm"},
    "rloo": {"advantage": "rloo", "scale_rewards": "batch"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},
    "remax": {"advantage": "remax"},
    "gdpo": {"advantage": "gdpo"},
    "fusion": {"reward_fusion": "normalize_then_sum", "scale_rewards": "batch"},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean_token_mean", "clip_low": 3e-4},
    "cispo": {"loss": "cispo", "clip_high": 4.0},
    "sapo": {"loss": "sapo"},
    "dapo": {
        "clip_high": 0.28,
        "mask_truncated": True,
        "overlong": {"buffer": 10},
        "dynamic_sampling": {"low": 0.01, "high": 0.99},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(tmp_path: Path, base: Path, name: str) -> None:
    checkpointer = tiny.FolderCheckpointer()
    before = load_file(base / "model.safetensors")
    grpo = {"mini_batch_prompts": 2, **VARIANTS[name]}
    train(tmp_path, spec_of(grpo=grpo, max_steps=2), base, checkpointer)
    assert checkpointer.rows[2]["grad_norm"] > 0
    assert any(not torch.equal(value, before[key]) for key, value in weights(tmp_path).items())


def test_without_a_signal_refills_are_bounded_and_the_step_is_skipped(
    tmp_path: Path, base: Path
) -> None:
    """hiyouga/EasyR1#497, verl-project/verl#953: "No sample is kept" ends the run there."""
    constant = [{"name": "any", "function": "length", "weight": 1.0, "parameters": {"maximum": 99}}]
    grpo = {"dynamic_sampling": {"max_refills": 2}}
    checkpointer = tiny.FolderCheckpointer()
    train(tmp_path, spec_of(rewards=constant, grpo=grpo, max_steps=1), base, checkpointer)
    row = checkpointer.rows[1]
    assert row["sampling/refills"] == 2
    assert row["sampling/kept_fraction"] == 0
    assert row["total/samples"] == 3 * 16
    assert row["loss"] is None
    before = load_file(base / "model.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in weights(tmp_path).items())


def test_equal_rewards_change_nothing(tmp_path: Path, base: Path) -> None:
    """Zero-variance groups have advantage exactly 0, so without KL the gradient is exactly 0."""
    constant = [{"name": "any", "function": "length", "weight": 0.9, "parameters": {"maximum": 99}}]
    checkpointer = tiny.FolderCheckpointer()
    train(tmp_path, spec_of(rewards=constant, max_steps=1), base, checkpointer)
    assert checkpointer.rows[1]["grad_norm"] == 0
    assert checkpointer.rows[1]["advantage/zero_variance_fraction"] == 1


def test_rows_samples_and_stdout_tell_the_step(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """huggingface/trl#5352: the logged reward is weighted; #4040: KL says "not computed"."""
    train(tmp_path, spec_of(max_steps=2), base, tiny.FolderCheckpointer())
    lines = (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert set(rows[0]["metrics"]) >= {"validation/reward", "validation/reward/short"}
    metrics = rows[1]["metrics"]
    expected = metrics["reward/short"] + 0.5 * metrics["reward/format"]
    assert metrics["reward"] == pytest.approx(expected)
    assert metrics["kl/k1"] == metrics["kl/k3"] == "not computed"
    assert "validation/reward" in rows[2]["metrics"]
    samples = pyarrow.parquet.read_table(tmp_path / "output/rollouts/step-00000001.parquet")
    assert samples.num_rows == 2
    assert {"prompt", "completion", "reward", "reward/short"} <= set(samples.column_names)
    left = json.loads((tmp_path / "output/sample_prompt.json").read_text())
    asked = tiny.grpo_rows(HELD_OUT)[0]["problem"]
    assert left["messages"][-1] == {"role": "user", "content": asked}
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    assert [line.split()[1] for line in printed] == ["step=0", "step=1", "step=2"]


def test_kl_is_measured_against_the_starting_weights_also_after_a_resume(
    tmp_path: Path, base: Path
) -> None:
    """Peers measure against the resumed weights: KL then starts again at 0."""
    spec = spec_of(
        optimizer={"learning_rate": 5e-3}, grpo={"kl": {"coefficient": 0.001}}, max_steps=4
    )
    first = tiny.FolderCheckpointer(tmp_path / "checkpoints", stop_after=3)
    train(tmp_path, spec, base, first)
    assert first.rows[1]["kl/k3"] == pytest.approx(0, abs=1e-9)
    second = tiny.FolderCheckpointer(tmp_path / "checkpoints")
    train(tmp_path, spec, base, second)
    assert second.rows[4]["kl/k3"] > 1e-4


def test_continuing_takes_weights_only(tmp_path: Path, base: Path) -> None:
    """Continue is not resume: weights of the named checkpoint, step and optimizer from 0.

    NVIDIA-NeMo/RL#3171, thinking-machines-lab/tinker-cookbook#446.
    """
    spec = spec_of(optimizer={"learning_rate": 5e-3}, max_steps=2)
    train(tmp_path / "a", spec, base, tiny.FolderCheckpointer(tmp_path / "a/checkpoints"))
    named = tmp_path / "a/checkpoints/step-0002"
    continued = tiny.FolderCheckpointer(weights=named)
    train(tmp_path / "b", spec, base, continued)
    from_export = tiny.FolderCheckpointer()
    train(tmp_path / "c", spec, tmp_path / "a/model", from_export)
    assert tiny.comparable(continued.rows) == tiny.comparable(from_export.rows)
    assert same_weights(tmp_path / "b", tmp_path / "c")


def test_the_best_step_survives_a_resume(tmp_path: Path, base: Path) -> None:
    """verl-project/verl#3792: best by validation, kept over resume and never of another step."""
    spec = spec_of(
        validation={"every_steps": 1},
        document={"checkpoint": {"keep_best": {"metric": "validation/reward"}}},
    )
    whole = tiny.FolderCheckpointer(tmp_path / "whole")
    train(tmp_path / "w", spec, base, whole)
    first = tiny.FolderCheckpointer(tmp_path / "cut", stop_after=2)
    train(tmp_path / "x", spec, base, first)
    second = tiny.FolderCheckpointer(tmp_path / "cut")
    train(tmp_path / "x", spec, base, second)
    assert second.best == whole.best
    assert whole.best is not None
    values = {step: row["validation/reward"] for step, row in whole.rows.items()}
    assert whole.best.value == max(values.values()) == values[whole.best.step]
