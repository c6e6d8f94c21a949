"""Fusion and advantages against measured vectors, published formulas and each other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import stages
from training_container.engine import algorithms

torch.set_num_threads(1)

VECTORS = json.loads((Path(__file__).parents[1] / "data/grpo_vectors.json").read_text())[
    "advantage"
]
GROUP = VECTORS["num_generations"]
NAN = float("nan")

# ms-swift counts "no score" as 0: a row nobody judged gets an advantage. Ours must differ.
DIFFERS_FROM = {("ms-swift", "RN", "group"), ("ms-swift", "RN", "gdpo")}


def computed(case: dict) -> list[float]:
    """A vector case in our names."""
    gdpo = case.get("aggregation") == "normalize_then_sum" or case.get("scale") == "gdpo"
    if gdpo:
        name, scale = "gdpo", None
    elif case["impl"] == "trl-rloo":
        name, scale = "rloo", "batch" if case.get("normalize_advantages") else "none"
    else:
        name, scale = case.get("estimator", "grpo"), case["scale"]
    epsilon = 1e-8 if gdpo and case["impl"] == "ms-swift" else 1e-4
    rewards_B = algorithms.fuse_rewards(
        algorithms.scores_tensor(VECTORS[case["R"]]),
        torch.tensor(case.get("weights", [1.0, 1.0])),
        mode="normalize_then_sum" if gdpo else "sum_then_normalize",
        group_size=GROUP,
        epsilon=epsilon,
    )
    if "reward_clip_range" in case:
        rewards_B = rewards_B.clamp(*case["reward_clip_range"])
    adv_B = algorithms.advantages(name, rewards_B, GROUP, scale=scale, epsilon=epsilon)
    return adv_B.tolist()


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda c: "-".join(map(str, c.values()))[:60]
)
def test_advantages_equal_the_measured_vectors(case: dict) -> None:
    """FACTS D.2.1, huggingface/trl#5902, modelscope/ms-swift#8123."""
    ours = computed(case)
    if (case["impl"], case["R"], case.get("scale")) in DIFFERS_FROM:
        assert ours != pytest.approx(case["adv"], abs=1e-2)
        assert ours[2] == 0.0, "a row nobody scored has no advantage"
        assert ours[4:] == [0.0] * 4, "a group with one score has no baseline"
    else:
        assert ours == pytest.approx(case["adv"], abs=6e-6)


def test_zero_variance_fraction_equals_the_measured_one() -> None:
    rewards_B = fused(VECTORS["R2"], [1.0, 1.0])
    zero_N = algorithms.zero_variance_groups(rewards_B, GROUP)
    assert zero_N.tolist() == [False, True]


def fused(rows: list, weights: list[float], mode: str = "sum_then_normalize") -> torch.Tensor:
    return algorithms.fuse_rewards(
        algorithms.scores_tensor(rows), torch.tensor(weights), mode=mode, group_size=GROUP
    )


def test_logged_reward_carries_the_weights() -> None:
    """huggingface/trl#5352: weights .7 and .3 on scores 1 and 0 make .7."""
    assert fused([[1, 0]] * 4, [0.7, 0.3]).tolist() == pytest.approx([0.7] * 4)
    assert fused(VECTORS["R2"], [0.1, 1.0]).mean().item() == pytest.approx(0.575)
    assert fused(VECTORS["RN"], [1.0, 1.0]).nanmean().item() == pytest.approx(0.725)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("group", [[0.9] * 7, [1 / 3] * 7, [0.0] * 7, [-1e4] * 7, [NAN] * 7])
def test_equal_rewards_give_exactly_zero(name: str, group: list[float]) -> None:
    """FACTS D.1: seven rewards of 0.9 make -0.0560 each in verl and EasyR1."""
    rewards_B = torch.tensor([*group, 0, 1, 0, 1, 0, 1, 0])
    for scale in algorithms.ADVANTAGE_SCALES[name]:
        adv_B = algorithms.advantages(name, rewards_B, 7, scale=scale, epsilon=1e-6)
        assert adv_B[:7].tolist() == [0.0] * 7
        assert adv_B[7:].abs().min() > 0


def test_rewards_equal_but_for_float_rounding_have_no_variance() -> None:
    """FACTS E.3: with weights of 0.2 a zero-variance fraction of 0 was logged for equal rewards."""
    scores = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1], [0.0, 0.3]], dtype=torch.float32)
    rewards_B = algorithms.fuse_rewards(
        scores, torch.tensor([0.2, 0.2]), mode="sum_then_normalize", group_size=4
    )
    assert len(set(rewards_B.tolist())) > 1, "the premise: rounding makes them differ"
    assert algorithms.zero_variance_groups(rewards_B, 4).tolist() == [True]
    assert algorithms.advantages("grpo", rewards_B, 4).tolist() == [0.0] * 4


def test_a_real_difference_of_a_thousandth_is_variance() -> None:
    rewards_B = torch.tensor([1.0, 1.0, 1.0, 1.001])
    assert algorithms.zero_variance_groups(rewards_B, 4).tolist() == [False]
    assert algorithms.advantages("grpo", rewards_B, 4)[3] > 1


def test_verl_epsilon_gives_verl_values() -> None:
    """FACTS E.6: groups of [1, 0] become ±0.7071 (unbiased deviation, epsilon 1e-6)."""
    adv_B = algorithms.advantages("grpo", torch.tensor([1.0, 0.0] * 2), 2, epsilon=1e-6)
    assert adv_B.tolist() == pytest.approx([0.7071058, -0.7071058] * 2, abs=1e-7)


def test_missing_score_of_one_source_leaves_the_other() -> None:
    rewards_B = fused([[1, None], [None, 0.5], [None, None], [0, 0.25]], [2.0, 4.0])
    assert rewards_B.tolist()[:2] == [2.0, 2.0]
    assert math.isnan(rewards_B[2])
    assert rewards_B[3] == 1.0


@pytest.mark.parametrize("mode", algorithms.FUSIONS)
def test_a_source_of_weight_0_makes_no_score_of_a_missing_one(mode: str) -> None:
    rewards_B = fused([[1, 0.9], [1, None], [1, 0.9], [1, 0.9]], [0.0, 1.0], mode)
    assert rewards_B.isnan().tolist() == [False, True, False, False]
    assert algorithms.advantages("grpo", rewards_B, GROUP).tolist() == [0.0] * 4


def test_normalize_then_sum_ignores_the_units_of_a_source() -> None:
    rows = [[1, 200], [0, 400], [1, 600], [0, 800], [0, 100], [0, 300], [1, 300], [1, 700]]
    small = [[a, b / 1000] for a, b in rows]
    large, little = (fused(r, [1.0, 1.0], "normalize_then_sum") for r in (rows, small))
    assert large.tolist() == pytest.approx(little.tolist(), abs=2e-3)
    assert fused(rows, [1.0, 1.0]).tolist() != pytest.approx(fused(small, [1.0, 1.0]).tolist())


def test_a_source_that_scores_all_alike_adds_nothing_when_normalised() -> None:
    alike = [[1, 0.9], [0, 0.9], [1, 0.9], [0, 0.9]]
    alone = [[a] for a, _ in alike]
    both = fused(alike, [1.0, 5.0], "normalize_then_sum")
    assert both.tolist() == fused(alone, [1.0], "normalize_then_sum").tolist()


def test_three_alike_scores_are_exactly_zero_when_normalised() -> None:
    """The mean of three times 0.1 is not 0.1, even in double precision."""
    rewards_B = algorithms.fuse_rewards(
        algorithms.scores_tensor([[0.1]] * 3),
        torch.ones(1),
        mode="normalize_then_sum",
        group_size=3,
    )
    assert rewards_B.tolist() == [0.0] * 3


def test_rloo_keeps_a_group_with_one_score_out_of_the_batch_figures() -> None:
    rewards_B = torch.tensor([1.0, 0.0, NAN, 1.0])
    adv_B = algorithms.advantages("rloo", rewards_B, 2, scale="batch", epsilon=1e-8)
    assert adv_B.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0])


def test_gdpo_standardises_over_the_batch_whatever_was_added_to_the_rewards() -> None:
    """A length or KL penalty after fusion moves group means; the batch mean is subtracted."""
    rewards_B = torch.tensor([1.0, 2.0, 4.0, 9.0])
    adv_B = algorithms.advantages("gdpo", rewards_B, 2, epsilon=1e-8)
    want_B = (rewards_B - rewards_B.mean()) / rewards_B.std()
    assert adv_B.tolist() == pytest.approx(want_B.tolist(), abs=1e-6)


def test_remax_subtracts_the_greedy_reward_of_the_prompt() -> None:
    rewards_B = torch.tensor([1.0, 0.0, 0.5, NAN, 1.0, 0.0])
    adv_B = algorithms.advantages(
        "remax", rewards_B, 2, greedy_rewards_N=torch.tensor([1.0, 0.25, NAN])
    )
    assert adv_B.tolist() == [0.0, -1.0, 0.25, 0.0, 0.0, 0.0]


def test_reinforce_plus_plus_with_one_answer_whitens_the_batch() -> None:
    """FACTS D.1: whitening with unbiased variance, as verl's masked_whiten."""
    rewards_B = torch.tensor([1.0, 2.0, 4.0, 9.0])
    adv_B = algorithms.advantages("reinforce_plus_plus", rewards_B, 1, epsilon=1e-8)
    want_B = (rewards_B - rewards_B.mean()) / rewards_B.std()
    assert adv_B.tolist() == pytest.approx(want_B.tolist(), abs=1e-6)


def test_dr_grpo_is_grpo_without_scaling() -> None:
    rewards_B = fused(VECTORS["RN"], [1.0, 0.5])
    plain = algorithms.advantages("grpo", rewards_B, GROUP, scale="none")
    assert algorithms.advantages("dr_grpo", rewards_B, GROUP).tolist() == plain.tolist()


def test_groups_with_signal_drops_equal_groups_and_means_out_of_range() -> None:
    """DAPO dynamic sampling; EasyR1 filter_low < mean < filter_high."""
    rewards_B = torch.tensor([0, 0, 1, 1, 0, 1, 0.1, 0, 1, 0.9, NAN, 1, NAN, NAN])
    plain_N = algorithms.groups_with_signal(rewards_B, 2)
    bounded_N = algorithms.groups_with_signal(rewards_B, 2, low=0.06, high=0.94)
    assert plain_N.tolist() == [False, False, True, True, True, False, False]
    assert bounded_N.tolist() == [False, False, True, False, False, False, False]
    at_the_bound = torch.tensor([0.0, 0.5])
    assert not algorithms.groups_with_signal(at_the_bound, 2, low=0.25).any()
    assert not algorithms.groups_with_signal(at_the_bound, 2, high=0.25).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gea"}, "unknown advantage 'gea'; valid: grpo"),
        ({"name": "dr_grpo", "scale": "group"}, "no scale 'group'; valid: none"),
        ({"name": "rloo", "group_size": 1}, "at least 2"),
        ({"name": "grpo", "group_size": 3}, "4 rows do not divide into groups of 3"),
        ({"name": "remax"}, "greedy rewards go with"),
        ({"name": "grpo", "greedy_rewards_N": torch.zeros(2)}, "greedy rewards go with"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    call = {"rewards_B": torch.tensor([0.0, 1.0, 2.0, 3.0]), "group_size": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        algorithms.advantages(**call)


def test_fusion_refuses_unknown_modes_wrong_weights_and_infinite_scores() -> None:
    with pytest.raises(ValueError, match="unknown reward fusion 'sum'"):
        fused([[1]] * 4, [1.0], "sum")
    with pytest.raises(ValueError, match="1 reward weights for 2 reward sources"):
        fused([[1, 2]] * 4, [1.0])
    with pytest.raises(ValueError, match="infinite"):
        fused([[float("inf")]] * 4, [1.0])


def test_names_are_those_of_the_run_file() -> None:
    fields = stages.GrpoSettings.model_fields
    assert stages.AdvantageName.__args__ == algorithms.ADVANTAGES
    assert fields["reward_fusion"].annotation.__args__ == algorithms.FUSIONS
    assert set(algorithms.SCALES) == set(get_args(fields["scale_rewards"].annotation))


scores = st.one_of(st.just(NAN), st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.floats(-9, 9, width=32))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([n for n in algorithms.ADVANTAGES if n != "remax"]),
    group_size=st.integers(2, 5),
    data=st.data(),
)
def test_advantages_are_finite_centred_and_blind_to_order(name, group_size, data) -> None:
    """Whatever is scored or not: finite, 0 where not scored, mean 0 per group, order-free."""
    groups = data.draw(st.integers(1, 4))
    rows = data.draw(
        st.lists(
            st.tuples(scores, scores), min_size=groups * group_size, max_size=groups * group_size
        )
    )
    scale = data.draw(st.sampled_from(algorithms.ADVANTAGE_SCALES[name]))
    mode = data.draw(st.sampled_from(algorithms.ADVANTAGE_FUSIONS[name]))

    def run(rows: list) -> torch.Tensor:
        rewards_B = algorithms.fuse_rewards(
            algorithms.scores_tensor(rows),
            torch.tensor([1.0, 0.5]),
            mode=mode,
            group_size=group_size,
        )
        return algorithms.advantages(name, rewards_B, group_size, scale=scale)

    adv_B = run(rows)
    assert torch.isfinite(adv_B).all()
    unscored = [i for i, row in enumerate(rows) if all(math.isnan(s) for s in row)]
    assert adv_B[unscored].tolist() == [0.0] * len(unscored)
    assert adv_B.view(groups, group_size).sum(dim=1).abs().max() < 1e-4 * max(1, adv_B.abs().max())
    turned = [g * group_size + i for g in range(groups) for i in reversed(range(group_size))]
    assert run([rows[i] for i in turned]).tolist() == pytest.approx(
        adv_B[turned].tolist(), abs=1e-6
    )
