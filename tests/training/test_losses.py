"""Policy losses and aggregation: measured values, published numbers, invariance of the gradient."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts import stages
from training_container.engine import algorithms

torch.set_num_threads(1)

VECTORS = json.loads((Path(__file__).parents[1] / "data/grpo_vectors.json").read_text())["loss"]
NAN = float("nan")


def fixture(name: str) -> Tensor:
    return torch.tensor(VECTORS[name], dtype=torch.float64)


CLIP = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": None}

# name in the vectors: (our loss, aggregation, settings of the loss, figures that differ)
OURS: dict[str, tuple[str, str, dict, dict]] = {
    "grpo": ("ppo_clip", "sequence_mean_token_mean", CLIP, {}),
    "bnpo": ("ppo_clip", "token_mean", CLIP, {}),
    "dr_grpo": ("ppo_clip", "sequence_mean_token_sum_norm", CLIP, {}),
    "dapo": ("ppo_clip", "token_mean", CLIP, {}),
    # TRL's epsilon_high is the upper bound itself, ours is its distance from 1; TRL has no lower.
    "cispo eps_high=5": ("cispo", "token_mean", {"clip_low": 1.0, "clip_high": 4.0}, {}),
    "cispo eps_high=.2": ("cispo", "token_mean", {"clip_low": 1.0, "clip_high": -0.8}, {}),
    "sapo": ("sapo", "sequence_mean_token_mean", {"tau_positive": 1.0, "tau_negative": 1.05}, {}),
    "grpo sequence eps 3e-4/4e-4 (GSPO)": (
        "gspo",
        "sequence_mean_token_mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        {},
    ),
    "luspo sequence": (
        "gspo",
        "sequence_mean_token_sum",
        {"clip_low": 0.2, "clip_high": 0.2},
        {},
    ),
    "dapo eps_high .28": ("ppo_clip", "token_mean", {**CLIP, "clip_high": 0.28}, {}),
    # TRL's delta is the dual clip under another name.
    "dapo delta 1.3": ("ppo_clip", "token_mean", {**CLIP, "clip_dual": 1.3}, {}),
    # One of two micro-batches of a mini-batch of 8 sequences.
    "grpo GA=2": ("ppo_clip", "sequence_mean_token_mean", CLIP, {"total_sequences": 8}),
    "dapo GA=2 SPG=2": ("ppo_clip", "token_mean", CLIP, {}),
    # A generation batch of 9 tokens cut into 4 optimizer steps.
    "dapo GA=1 SPG=4": ("ppo_clip", "token_mean", CLIP, {"total_tokens": 9 / 4}),
}

NOT_OURS = {
    "vespo": "not among the design's losses",
    "grpo beta .04 bias-corrected": "the plain estimator, as in verl and EasyR1",
    "bnpo top_entropy_quantile .5": "no entropy masking in the design",
    "grpo beta .04 plain k3": "tested below, with KL",
    "bnpo entropy_coef .1 minus bnpo": "tested below, with the entropy bonus",
}


def totals(**different: float) -> dict[str, float]:
    defaults = VECTORS["defaults"]
    return {
        "total_tokens": defaults["num_items"],
        "total_sequences": 4,
        "max_length": defaults["max_completion_length"],
        **different,
    }


def test_every_measured_loss_is_ours_or_left_out_for_a_reason() -> None:
    assert set(OURS) | set(NOT_OURS) == set(VECTORS["expected"])


@pytest.mark.parametrize("case", OURS)
def test_losses_equal_the_measured_values(case: str) -> None:
    """FACTS D.2.2, huggingface/trl#5619 (denominators), huggingface/trl#5814 (sequence ratio)."""
    name, aggregation, loss_settings, different = OURS[case]
    new, old, adv, mask = (fixture(key) for key in ("new", "old", "adv", "mask"))
    loss_B_T, _ = algorithms.policy_loss(name, new, old, adv, mask, **loss_settings)
    loss = algorithms.aggregate(loss_B_T, mask, aggregation, **totals(**different))
    assert loss.item() == pytest.approx(VECTORS["expected"][case], abs=1e-6)


def test_kl_in_the_loss_equals_the_measured_value() -> None:
    new, old, ref, adv, mask = (fixture(key) for key in ("new", "old", "ref", "adv", "mask"))
    loss_B_T, _ = algorithms.policy_loss("ppo_clip", new, old, adv, mask, **CLIP)
    loss_B_T = loss_B_T + 0.04 * algorithms.kl_per_token("k3", new, ref, mask)
    loss = algorithms.aggregate(loss_B_T, mask, "sequence_mean_token_mean", **totals())
    assert loss.item() == pytest.approx(VECTORS["expected"]["grpo beta .04 plain k3"], abs=1e-6)


def test_entropy_bonus_equals_the_measured_value() -> None:
    bonus = algorithms.entropy_bonus(
        fixture("entropy"), fixture("mask"), coefficient=0.1, total_tokens=9
    )
    want = VECTORS["expected"]["bnpo entropy_coef .1 minus bnpo"]
    assert bonus.item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("adv", "ratio", "want"), [(1, 2, -1.3), (-1, 2, 2.0), (-1, 10, 3.0), (-1, 0.1, 0.8)]
)
def test_dual_clip_equals_verl(adv: float, ratio: float, want: float) -> None:
    """FACTS D.1, run against verl: clip 0.2 / 0.3, dual 3."""
    loss_B_T, _ = algorithms.policy_loss(
        "ppo_clip",
        torch.tensor([[ratio]], dtype=torch.float64).log(),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([adv]),
        torch.ones(1, 1),
        clip_low=0.2,
        clip_high=0.3,
        clip_dual=3.0,
    )
    assert loss_B_T.item() == pytest.approx(want, abs=1e-9)


def gradient(name: str, new: list, old: list, adv: list, **loss_settings: float) -> list:
    logprobs = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(logprobs)
    loss_B_T, _ = algorithms.policy_loss(
        name, logprobs, torch.tensor([old], dtype=torch.float64), torch.tensor(adv), mask,
        **loss_settings,
    )  # fmt: skip
    loss_B_T.sum().backward()
    return logprobs.grad[0].tolist()


def test_clipped_tokens_have_no_gradient_and_the_others_that_of_the_ratio() -> None:
    log = torch.tensor([0.5, 1.1, 2.0, 10.0], dtype=torch.float64).log().tolist()
    zeros = [0.0] * 4
    up = gradient("ppo_clip", log, zeros, [1.0], clip_dual=3.0)
    down = gradient("ppo_clip", log, zeros, [-1.0], clip_dual=3.0)
    assert up == pytest.approx([-0.5, -1.1, 0, 0])
    assert down == pytest.approx([0, 1.1, 2.0, 0])


def test_cispo_keeps_a_gradient_on_clipped_tokens() -> None:
    log = torch.tensor([0.5, 1.1, 10.0], dtype=torch.float64).log().tolist()
    grad = gradient("cispo", log, [0.0] * 3, [2.0], clip_low=0.2, clip_high=0.3)
    assert grad == pytest.approx([-2 * 0.8, -2 * 1.1, -2 * 1.3])


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """Every token of a sequence carries the same gradient, A s / |o| each (arXiv:2507.18071)."""
    new, old = [0.1, -0.2, 0.3], [0.0, -0.1, 0.2]
    grad = gradient("gspo", new, old, [1.0], clip_low=0.5, clip_high=0.5)
    ratio = torch.tensor(0.1 / 3, dtype=torch.float64).exp().item()
    assert grad == pytest.approx([-ratio] * 3)


def test_on_policy_gradients_of_all_losses_agree() -> None:
    """At ratio 1 each loss has the plain policy gradient, -A, whatever its value there.

    huggingface/trl#3452: a loss of 0 for centred advantages is not an absence of gradient.
    """
    for name in algorithms.LOSSES:
        assert gradient(name, [-0.5, -2.0], [-0.5, -2.0], [1.5]) == pytest.approx([-1.5, -1.5])


@pytest.mark.parametrize("name", algorithms.LOSSES)
def test_old_log_probs_carry_no_gradient(name: str) -> None:
    """The very tensor of the new log-probs may stand for the old ones in a first update."""
    logprobs = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    loss_B_T, _ = algorithms.policy_loss(
        name, logprobs, logprobs, torch.tensor([1.5]), torch.ones(1, 2)
    )
    (grad,) = torch.autograd.grad(loss_B_T.sum(), logprobs)
    assert grad[0].tolist() == pytest.approx([-1.5, -1.5])


@pytest.mark.parametrize("name", algorithms.LOSSES)
@pytest.mark.parametrize("garbage", [NAN, float("-inf"), 1e30])
def test_padding_carries_neither_value_nor_gradient_nor_count(name: str, garbage: float) -> None:
    new = torch.tensor([[-0.5, garbage, garbage]], requires_grad=True)
    old = torch.tensor([[-0.7, garbage, -1.0]])
    loss_B_T, stats = algorithms.policy_loss(
        name, new, old, torch.tensor([-2.0]), torch.tensor([[1, 0, 0]])
    )
    (grad,) = torch.autograd.grad(loss_B_T.sum(), new)
    assert loss_B_T[0, 1:].tolist() == [0.0, 0.0]
    assert grad[0, 1:].tolist() == [0.0, 0.0]
    assert grad[0, 0] > 0
    assert stats["tokens"] == 1
    assert all(torch.isfinite(value) for value in stats.values())


def test_each_loss_reads_the_settings_listed_for_it_and_no_others() -> None:
    """A setting without effect can then be refused in the run file."""
    generator = torch.Generator().manual_seed(1)
    new, old = (-torch.randn(40, 1, generator=generator).abs() * 2 for _ in range(2))
    adv = torch.randn(40, generator=generator)
    changed = {
        "clip_low": 0.1,
        "clip_high": 0.1,
        "clip_dual": 2.0,
        "tau_positive": 2.0,
        "tau_negative": 2.0,
    }
    for name in algorithms.LOSSES:
        plain, _ = algorithms.policy_loss(name, new, old, adv, torch.ones(40, 1))
        read = {
            key
            for key, value in changed.items()
            if not torch.equal(
                plain,
                algorithms.policy_loss(name, new, old, adv, torch.ones(40, 1), **{key: value})[0],
            )
        }
        assert read == set(algorithms.LOSS_SETTINGS[name])


@pytest.mark.parametrize("name", algorithms.LOSSES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    """huggingface/trl#6637: exp of an unbounded log-ratio overflows to inf."""
    new = torch.tensor([[-1e4, -0.1, -500.0, -0.1]], requires_grad=True)
    old = torch.tensor([[-0.1, -1e4, -0.1, -500.0]])
    for sign in (1.0, -1.0):
        loss_B_T, stats = algorithms.policy_loss(
            name, new, old, torch.tensor([sign]), torch.ones(1, 4), clip_dual=None
        )
        (grad,) = torch.autograd.grad(loss_B_T.sum(), new)
        assert torch.isfinite(loss_B_T).all()
        assert torch.isfinite(grad).all()
        assert stats["ratio_bounded"] == (0 if name == "gspo" else 4)


def test_counts_are_the_tokens_limited_on_each_side() -> None:
    """huggingface/trl#4772: how much is clipped must show."""
    ratios = torch.tensor([[0.5, 1.0, 2.0, 9.0], [0.5, 1.0, 2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    adv, zeros = torch.tensor([1.0, -1.0]), torch.zeros_like(ratios)

    def count(name: str) -> dict[str, float]:
        _, stats = algorithms.policy_loss(name, ratios.log(), zeros, adv, mask)
        return {key: value.item() for key, value in stats.items()}

    assert count("ppo_clip") == pytest.approx(
        {
            "tokens": 7,
            "clipped_low": 1,
            "clipped_high": 1,
            "clipped_dual": 1,
            "ratio": 16.0,
            "ratio_bounded": 0,
            "kl_old_k1": -(ratios.log() * mask).sum().item(),
            "kl_old_k3": ((ratios - 1 - ratios.log()) * mask).sum().item(),
        }
    )
    cispo, sapo = count("cispo"), count("sapo")
    assert (cispo["clipped_low"], cispo["clipped_high"], cispo["clipped_dual"]) == (2, 3, 0)
    assert (sapo["clipped_low"], sapo["clipped_high"], sapo["clipped_dual"]) == (0, 0, 0)


def test_aggregations_by_hand() -> None:
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    want = {
        "token_mean": 16 / 4,
        "sequence_mean_token_mean": (2 + 10) / 3,
        "sequence_mean_token_sum": 16 / 3,
        "sequence_mean_token_sum_norm": 16 / 30,
    }
    for mode in algorithms.AGGREGATIONS:
        got = algorithms.aggregate(
            per_token, mask, mode, total_tokens=4, total_sequences=3, max_length=10
        )
        assert got.item() == pytest.approx(want[mode])


@pytest.mark.parametrize("zero", [0, torch.tensor(0)])
def test_a_mini_batch_without_tokens_has_loss_zero(zero: int | Tensor) -> None:
    """Every answer truncated and masked: no division by zero (huggingface/trl#6369)."""
    per_token, mask = torch.full((2, 3), NAN), torch.zeros(2, 3)
    for mode in algorithms.AGGREGATIONS:
        loss = algorithms.aggregate(
            per_token, mask, mode, total_tokens=zero, total_sequences=2, max_length=3
        )
        assert loss == 0
    assert algorithms.entropy_bonus(per_token, mask, coefficient=1.0, total_tokens=zero) == 0


def test_unknown_names_list_the_valid_ones() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="unknown loss 'ppo'; valid: ppo_clip, gspo, cispo, sapo"):
        algorithms.policy_loss("ppo", one, one, torch.zeros(1), one)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; valid: token_mean"):
        algorithms.aggregate(one, one, "mean", total_tokens=1, total_sequences=1, max_length=1)


def test_names_are_those_of_the_run_file() -> None:
    assert stages.LossName.__args__ == algorithms.LOSSES
    assert stages.AggregationName.__args__ == algorithms.AGGREGATIONS


WIDTH = 3  # parameters of the toy policy below


def contribution(
    weights: Tensor, batch: dict[str, Tensor], rows: list[int], padding: int, variant: dict
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of some rows of a mini-batch, padded further with garbage."""

    def pad(values: Tensor, filler: float) -> Tensor:
        return torch.nn.functional.pad(values[rows], (0, padding), value=filler)

    features = torch.nn.functional.pad(batch["features"][rows], (0, 0, 0, padding), value=7.0)
    logprobs = -torch.nn.functional.softplus(features @ weights)
    mask = pad(batch["mask"], 0.0)
    loss_B_T, stats = algorithms.policy_loss(
        variant["loss"], logprobs, pad(batch["old"], NAN), batch["adv"][rows], mask
    )
    kl_B_T = algorithms.kl_per_token(variant["kl"], logprobs, pad(batch["ref"], -1e9), mask)
    loss = algorithms.aggregate(
        loss_B_T + 0.3 * kl_B_T,
        mask,
        variant["aggregation"],
        total_tokens=batch["mask"].sum(),
        total_sequences=len(batch["mask"]),
        max_length=5,
    )
    entropy_B_T = -logprobs * logprobs.exp()
    return loss + algorithms.entropy_bonus(
        entropy_B_T, mask, coefficient=0.1, total_tokens=batch["mask"].sum()
    ), stats


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("loss", algorithms.LOSSES)
def test_gradient_does_not_depend_on_the_cut_into_micro_batches_padding_or_ranks(
    loss: str, data: st.DataObject, seed: int
) -> None:
    """verl#906, verl#5625, verl#3741, verl#7321, modelscope/ms-swift#10117.

    Rows are dealt in any order to any number of micro-batches, wherever they are computed, each
    with padding of its own that holds NaN; values, gradients and counts add up to the whole.
    """
    variant = {
        "loss": loss,
        "aggregation": data.draw(st.sampled_from(algorithms.AGGREGATIONS)),
        "kl": data.draw(st.sampled_from(algorithms.KL_ESTIMATORS)),
    }
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    count, longest = len(lengths), 5
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = {
        "features": normal(count, longest, WIDTH),
        "mask": (torch.arange(longest) < torch.tensor(lengths)[:, None]).double(),
        "old": -normal(count, longest).abs() - 0.1,
        "ref": -normal(count, longest).abs() - 0.1,
        "adv": normal(count),
    }
    order = data.draw(st.permutations(range(count)))
    inner = data.draw(st.sets(st.integers(1, count), max_size=count))
    bounds = [0, *sorted(inner - {count}), count]
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]

    weights = normal(WIDTH).requires_grad_()
    whole, whole_stats = contribution(weights, batch, list(range(count)), 0, variant)
    (want,) = torch.autograd.grad(whole, weights)

    value, grads = 0.0, torch.zeros_like(want)
    stats = dict.fromkeys(whole_stats, 0.0)
    for rows in parts:
        padding = data.draw(st.integers(0, 3))
        part, part_stats = contribution(weights, batch, list(rows), padding, variant)
        (grad,) = torch.autograd.grad(part, weights)
        value, grads = value + part.item(), grads + grad
        stats = {key: stats[key] + part_stats[key] for key in stats}
    assert value == pytest.approx(whole.item(), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(grads, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(stats, whole_stats, rtol=1e-10, atol=1e-12)


def test_gradient_under_fsdp_equals_that_of_one_rank(tmp_path: Path) -> None:
    """verl#906, verl#5625: two real ranks with unequal shares of the rows and tokens."""
    root = Path(__file__).parents[2]
    worker = [sys.executable, Path(__file__).with_name("fsdp_gradient_worker.py")]
    ranks = [
        subprocess.Popen(
            [*worker, str(rank), "2", tmp_path / "store"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root)},
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    differences = json.loads(outputs[0].splitlines()[-1])
    assert len(differences) == len(algorithms.LOSSES) * len(algorithms.AGGREGATIONS)
    assert max(differences.values()) < 1e-6
