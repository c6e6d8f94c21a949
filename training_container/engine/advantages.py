"""Rewards to advantages: fusing reward sources, group baselines, scaling.

Shapes: B sequences of the step, N groups (prompts), G sequences per group, K reward sources.
B = N * G, and the rows of one group are adjacent. NaN means "no score". Everything is computed in
float64: scores are few, and float32 turns seven rewards of 0.9 into advantages of -0.056.

Each function needs the *whole* step's rewards (batch scaling looks at every row), so a rank calls
it with the gathered rewards and keeps its own rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.stages import ADVANTAGE_SCALES

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_FUSIONS",
    "ADVANTAGE_SCALES",
    "FUSIONS",
    "SCALES",
    "advantages",
    "fuse_rewards",
    "groups_with_signal",
    "scores_tensor",
    "zero_variance_groups",
]

FUSIONS = ("sum_then_normalize", "normalize_then_sum")
SCALES = ("group", "batch", "none")

ADVANTAGE_FUSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ADVANTAGE_SCALES, FUSIONS),
    # A greedy answer belongs to no group, so its sources cannot be normalised within one.
    "remax": ("sum_then_normalize",),
    "gdpo": ("normalize_then_sum",),
}
"""Fusions that are defined for each advantage."""

ADVANTAGES = tuple(ADVANTAGE_SCALES)

_SPREAD_TOLERANCE = 4 * torch.finfo(torch.float32).eps
"""Relative spread below which rewards are equal: what float32 weighted sums may differ by."""


def scores_tensor(rows: Sequence[Sequence[float | None]]) -> Tensor:
    """Scores as rewards deliver them, `rows[b][k]` with None for "no score", as scores_B_K."""
    return torch.tensor(
        [[float("nan") if score is None else score for score in row] for row in rows],
        dtype=torch.float64,
    )


def fuse_rewards(
    scores_B_K: Tensor,
    weights_K: Tensor,
    *,
    mode: str,
    group_size: int,
    epsilon: float = 1e-4,
) -> Tensor:
    """Weighted reward of each sequence, rewards_B (float64); NaN where no source scored it.

    A source of weight 0 is only watched: where it alone scored, there is no reward, and not one
    of 0.

    `sum_then_normalize`: R_i = sum_k w_k r_ik over the sources that scored i (TRL, verl).
    `normalize_then_sum`: R_i = sum_k w_k (r_ik - mean_gk) / (std_gk + epsilon), each source brought
    to the same scale within its group first, so that a source with large numbers does not drown the
    others (GDPO, arXiv:2601.05242; TRL `multi_objective_aggregation`). A source that scored a
    single row of a group, or all its rows alike, adds exactly 0 there. Missing scores are left out,
    not counted as 0.

    Raises ValueError for an unknown mode, a wrong number of weights, an infinite score or a ragged
    batch.
    """
    if mode not in FUSIONS:
        raise ValueError(f"unknown reward fusion {mode!r}; valid: {', '.join(FUSIONS)}")
    if weights_K.shape != scores_B_K.shape[1:]:
        raise ValueError(
            f"{weights_K.numel()} reward weights for {scores_B_K.shape[-1]} reward sources"
        )
    if torch.isinf(scores_B_K).any():
        raise ValueError("a reward score is infinite")
    scores_B_K = scores_B_K.double()
    scored_B = (~torch.isnan(scores_B_K) & (weights_K != 0).to(scores_B_K.device)).any(dim=1)
    if mode == "normalize_then_sum":
        stats = _group_statistics(scores_B_K, group_size)
        normalised_N_G_K = (stats.values - stats.mean) / (stats.std + epsilon)
        scores_B_K = normalised_N_G_K.masked_fill(stats.equal, 0.0).view_as(scores_B_K)
    fused_B = (scores_B_K * weights_K.to(scores_B_K)).nansum(dim=1)
    return fused_B.masked_fill(~scored_B, torch.nan)


def advantages(
    name: str,
    rewards_B: Tensor,
    group_size: int,
    *,
    scale: str | None = None,
    epsilon: float = 1e-4,
    greedy_rewards_N: Tensor | None = None,
) -> Tensor:
    """Advantage of each sequence, adv_B (float32), from the fused rewards of the whole step.

    With mean, std (unbiased) and n over the scored rows of a group, and m, s the same over the
    batch:

    | name | centred reward C | scales, published one first |
    |---|---|---|
    | grpo | R - mean (DeepSeekMath, arXiv:2402.03300) | group, batch, none |
    | dr_grpo | R - mean (arXiv:2503.20783) | none |
    | rloo | R - mean of the other n - 1 (arXiv:2402.14740) | none, group, batch |
    | reinforce_plus_plus | R - mean, or R when G = 1 (arXiv:2501.03262) | batch |
    | remax | R - reward of the prompt's greedy answer (arXiv:2310.10505) | none |
    | gdpo | R, already `normalize_then_sum` (arXiv:2601.05242) | batch |

    `group` divides by std + epsilon. `batch` divides by s + epsilon for grpo (TRL) and standardises
    C over the batch, (C - m_C) / (s_C + epsilon), for the others. `none` leaves C. `scale=None` is
    the published one. epsilon is TRL's 1e-4 unless given; verl and EasyR1 use 1e-6.

    A row without a score gets 0. A group whose scored rewards are equal gets exactly 0 (DESIGN 7),
    except under remax, whose baseline is not the group, and reinforce_plus_plus with G = 1.
    `greedy_rewards_N` is needed by remax only: one fused reward per group; NaN there means no
    baseline and gives the group 0.

    Raises ValueError for an unknown name, a scale the advantage is not defined with, a ragged
    batch, a group of one where the group is the baseline, or greedy rewards missing or given
    without remax.
    """
    scale = _resolve_scale(name, scale)
    if group_size < 2 and name not in ("remax", "reinforce_plus_plus"):
        raise ValueError(f"advantage {name!r} needs at least 2 answers per prompt")
    if (greedy_rewards_N is not None) != (name == "remax"):
        raise ValueError("greedy rewards go with advantage 'remax', and only with it")
    stats = _group_statistics(rewards_B.double(), group_size)
    rewards_N_G = stats.values
    centred_N_G = rewards_N_G - stats.mean
    if name == "rloo":
        # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1). With one scored row this is 0 / 0: there
        # are no others to compare with, and NaN keeps the row out of the batch figures too.
        centred_N_G = centred_N_G * stats.count / (stats.count - 1)
    elif greedy_rewards_N is not None:
        centred_N_G = rewards_N_G - greedy_rewards_N.double().reshape(-1, 1)
    elif name == "gdpo" or group_size == 1:
        centred_N_G = rewards_N_G

    if scale == "group":
        centred_N_G = centred_N_G / (stats.std + epsilon)
    elif scale == "batch" and name == "grpo":
        _, std = _nan_mean_std(rewards_N_G)
        centred_N_G = centred_N_G / (std + epsilon)
    elif scale == "batch":
        mean, std = _nan_mean_std(centred_N_G)
        centred_N_G = (centred_N_G - mean) / (std + epsilon)
    if name != "remax" and group_size > 1:
        centred_N_G = centred_N_G.masked_fill(stats.equal, 0.0)
    return torch.nan_to_num(centred_N_G, nan=0.0).reshape(-1).float()


def zero_variance_groups(rewards_B: Tensor, group_size: int) -> Tensor:
    """Groups that teach nothing, zero_N (bool): scored rewards all equal, or fewer than two scores.

    Equal means up to float32 rounding, so that 0.1 + 0.2 and 0.3 are one reward.
    """
    return _group_statistics(rewards_B.double(), group_size).equal.view(-1)


def groups_with_signal(
    rewards_B: Tensor, group_size: int, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """Groups that dynamic sampling keeps, keep_N (bool): DAPO, arXiv:2503.14476, section 3.2.

    Drops groups of zero variance, and, as EasyR1's online filtering does, groups whose mean reward
    is at or below `low` or at or above `high`. Give it rewards before any KL penalty.
    """
    stats = _group_statistics(rewards_B.double(), group_size)
    mean_N = stats.mean.view(-1)
    keep_N = ~stats.equal.view(-1)
    if low is not None:
        keep_N &= mean_N > low
    if high is not None:
        keep_N &= mean_N < high
    return keep_N


@dataclass(frozen=True)
class _GroupStatistics:
    """Per-group figures over scored rows; trailing source dimension K when there is one."""

    values: Tensor  # N_G[_K], NaN where not scored
    count: Tensor  # N_1[_K]
    mean: Tensor  # N_1[_K]
    std: Tensor  # N_1[_K], unbiased; 0 with fewer than two scores
    equal: Tensor  # N_1[_K], bool


def _group_statistics(values_B: Tensor, group_size: int) -> _GroupStatistics:
    if group_size < 1 or values_B.shape[0] % group_size:
        raise ValueError(f"{values_B.shape[0]} rows do not divide into groups of {group_size}")
    values_N_G = values_B.reshape(-1, group_size, *values_B.shape[1:])
    scored_N_G = ~torch.isnan(values_N_G)
    count = scored_N_G.sum(dim=1, keepdim=True)
    mean = values_N_G.nansum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = (values_N_G - mean).square().nansum(dim=1, keepdim=True)
    largest = values_N_G.masked_fill(~scored_N_G, -torch.inf).amax(dim=1, keepdim=True)
    smallest = values_N_G.masked_fill(~scored_N_G, torch.inf).amin(dim=1, keepdim=True)
    tolerance = _SPREAD_TOLERANCE * torch.maximum(largest.abs(), smallest.abs())
    return _GroupStatistics(
        values=values_N_G,
        count=count,
        mean=mean,
        std=(squares / (count - 1).clamp(min=1)).sqrt(),
        equal=(count < 2) | (largest - smallest <= tolerance),
    )


def _nan_mean_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation over everything that is not NaN; 0 where undefined."""
    count = (~torch.isnan(values)).sum()
    mean = values.nansum() / count.clamp(min=1)
    return mean, ((values - mean).square().nansum() / (count - 1).clamp(min=1)).sqrt()


def _resolve_scale(name: str, scale: str | None) -> str:
    if name not in ADVANTAGE_SCALES:
        raise ValueError(f"unknown advantage {name!r}; valid: {', '.join(ADVANTAGES)}")
    defined = ADVANTAGE_SCALES[name]
    if scale is not None and scale not in defined:
        raise ValueError(f"advantage {name!r} has no scale {scale!r}; valid: {', '.join(defined)}")
    return scale or defined[0]
