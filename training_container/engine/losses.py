"""Policy losses and their aggregation over a mini-batch.

Shapes: B sequences of a micro-batch, T completion tokens. Losses are minimised.

Gradients do not depend on how a mini-batch is cut into micro-batches, padded, or spread over ranks:
every denominator is a figure of the *whole mini-batch over all ranks*, passed in, so that
contributions add up. The caller must therefore sum gradients over micro-batches (as `backward`
does) and over ranks. FSDP2 averages over ranks unless told `set_gradient_divide_factor(1.0)`, and
gloo then also needs `set_force_sum_reduction_for_comms(True)`: it has no pre-multiplied sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.stages import LOSS_FIELDS
from training_container.engine.kl import LOG_RATIO_BOUND

__all__ = ["AGGREGATIONS", "LOSSES", "LOSS_SETTINGS", "aggregate", "entropy_bonus", "policy_loss"]

LOSS_SETTINGS: dict[str, dict[str, str]] = {
    loss: {field.removeprefix("sapo_"): field for field in fields}
    for loss, fields in LOSS_FIELDS.items()
}
"""Which keyword arguments of `policy_loss` each loss reads, and the settings they come from."""

LOSSES = tuple(LOSS_SETTINGS)
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)


def policy_loss(
    name: str,
    logprobs_B_T: Tensor,
    old_logprobs_B_T: Tensor,
    adv_B: Tensor,
    mask_B_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token, per_token_loss_B_T (0 outside the mask), and counts for metrics.

    With the ratio r = exp(clamp(logp - logp_old, ±20)), A the advantage of the token's sequence and
    clip(r) = r limited to [1 - clip_low, 1 + clip_high]:

    - `ppo_clip`: max(-A r, -A clip(r)), and where A < 0 at most -A clip_dual (None: no such bound).
      PPO arXiv:1707.06347; dual clip arXiv:1912.09729; clip-higher arXiv:2503.14476 (DAPO).
    - `gspo`: max(-A s, -A clip(s)) with the sequence ratio s = exp(mean_t(logp - logp_old)), spread
      over the sequence's tokens (arXiv:2507.18071). Its clip range is of the order of 3e-4.
    - `cispo`: -A sg(clip(r)) logp, sg = no gradient (MiniMax-M1, arXiv:2506.13585). Every token
      keeps a gradient; clip_low = 1 means no lower bound. In TRL `epsilon_high` is 1 + clip_high.
    - `sapo`: -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_positive where A > 0, else tau_negative
      (arXiv:2511.20347).

    Differentiable in `logprobs_B_T` only. Positions outside the mask may hold anything, NaN
    included.

    The counts are sums over the micro-batch's tokens, detached, ready to be added over
    micro-batches and ranks and then divided by `tokens`: `tokens`, `clipped_low`, `clipped_high`,
    `clipped_dual` (tokens whose loss or weight was limited on that side), `ratio` (sum of r or s),
    `ratio_bounded` (tokens beyond ±20), `kl_old_k1`, `kl_old_k3` (estimates of KL(old || new), how
    far this update has moved).

    Raises ValueError for an unknown name.
    """
    if name not in LOSS_SETTINGS:
        raise ValueError(f"unknown loss {name!r}; valid: {', '.join(LOSSES)}")
    active_B_T = mask_B_T.bool()
    old_logprobs_B_T = old_logprobs_B_T.detach()
    token_delta_B_T = torch.where(active_B_T, logprobs_B_T - old_logprobs_B_T, 0.0)
    delta_B_T = _sequence_mean(token_delta_B_T, active_B_T) if name == "gspo" else token_delta_B_T
    ratio_B_T = delta_B_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    adv_B_T = adv_B.detach().to(ratio_B_T).unsqueeze(1).expand_as(ratio_B_T)
    clipped_ratio_B_T = ratio_B_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    above_B_T = ratio_B_T > 1.0 + clip_high
    below_B_T = ratio_B_T < 1.0 - clip_low
    nowhere_B_T = torch.zeros_like(active_B_T)
    dual_B_T = nowhere_B_T

    if name == "cispo":
        loss_B_T = -adv_B_T * clipped_ratio_B_T.detach() * logprobs_B_T
        high_B_T, low_B_T = above_B_T, below_B_T
    elif name == "sapo":
        tau_B_T = torch.full_like(adv_B_T, tau_negative).masked_fill(adv_B_T > 0, tau_positive)
        loss_B_T = -adv_B_T * torch.sigmoid(tau_B_T * (ratio_B_T - 1.0)) * 4.0 / tau_B_T
        high_B_T, low_B_T = nowhere_B_T, nowhere_B_T
    else:
        loss_B_T = torch.maximum(-adv_B_T * ratio_B_T, -adv_B_T * clipped_ratio_B_T)
        if name == "ppo_clip" and clip_dual is not None:
            bounded_B_T = torch.minimum(loss_B_T, -adv_B_T * clip_dual)
            loss_B_T = torch.where(adv_B_T < 0, bounded_B_T, loss_B_T)
            dual_B_T = (adv_B_T < 0) & (ratio_B_T > clip_dual)
        high_B_T, low_B_T = above_B_T & (adv_B_T > 0), below_B_T & (adv_B_T < 0)

    loss_B_T = torch.where(active_B_T, loss_B_T, 0.0)
    with torch.no_grad():
        bounded_delta_B_T = token_delta_B_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        counts = {
            "tokens": active_B_T,
            "clipped_low": low_B_T & active_B_T,
            "clipped_high": high_B_T & active_B_T,
            "clipped_dual": dual_B_T & active_B_T,
            "ratio": torch.where(active_B_T, ratio_B_T, 0.0),
            "ratio_bounded": delta_B_T.abs() > LOG_RATIO_BOUND,
            "kl_old_k1": -bounded_delta_B_T,
            "kl_old_k3": torch.expm1(bounded_delta_B_T) - bounded_delta_B_T,
        }
        stats = {key: value.sum(dtype=loss_B_T.dtype) for key, value in counts.items()}
    return loss_B_T, stats


def aggregate(
    per_token_B_T: Tensor,
    mask_B_T: Tensor,
    mode: str,
    *,
    total_tokens: float | Tensor,
    total_sequences: float | Tensor,
    max_length: int,
) -> Tensor:
    """This micro-batch's contribution to the mini-batch mean, a scalar; contributions add up.

    With m the mask, |o_i| the masked-in tokens of sequence i:

    - `token_mean`: sum_it(x m) / total_tokens (DAPO; TRL `dapo`, `bnpo`; verl `token-mean`)
    - `sequence_mean_token_mean`: sum_i(sum_t(x m) / |o_i|) / total_sequences (GRPO, GSPO)
    - `sequence_mean_token_sum`: sum_it(x m) / total_sequences (verl `seq-mean-token-sum`)
    - `sequence_mean_token_sum_norm`: sum_it(x m) / (total_sequences max_length) (Dr. GRPO)

    `total_tokens` is the number of masked-in tokens and `total_sequences` the number of sequences,
    both of the whole mini-batch over all ranks; sequences masked out as truncated count among the
    latter (as in TRL), so that a batch full of them takes a smaller step, not a noisier one. Both
    are floored at 1. `max_length` is the longest completion allowed, in tokens.

    Raises ValueError for an unknown mode.
    """
    active_B_T = mask_B_T.bool()
    masked_B_T = torch.where(active_B_T, per_token_B_T, 0.0)
    if mode == "token_mean":
        return masked_B_T.sum() / _at_least_one(total_tokens)
    if mode == "sequence_mean_token_mean":
        lengths_B = active_B_T.sum(dim=1).clamp(min=1)
        return (masked_B_T.sum(dim=1) / lengths_B).sum() / _at_least_one(total_sequences)
    if mode == "sequence_mean_token_sum":
        return masked_B_T.sum() / _at_least_one(total_sequences)
    if mode == "sequence_mean_token_sum_norm":
        return masked_B_T.sum() / (_at_least_one(total_sequences) * max_length)
    raise ValueError(f"unknown aggregation {mode!r}; valid: {', '.join(AGGREGATIONS)}")


def entropy_bonus(
    entropy_B_T: Tensor, mask_B_T: Tensor, *, coefficient: float, total_tokens: float | Tensor
) -> Tensor:
    """Term to add to the loss, -coefficient * mean entropy per token; adds up as `aggregate` does.

    Always a token mean, whatever the aggregation of the policy loss, so that a coefficient means
    the same everywhere (TRL `entropy_coef`).
    """
    masked_B_T = torch.where(mask_B_T.bool(), entropy_B_T, 0.0)
    return -coefficient * masked_B_T.sum() / _at_least_one(total_tokens)


def _sequence_mean(values_B_T: Tensor, active_B_T: Tensor) -> Tensor:
    """Mean over each sequence's tokens, repeated at each of them; values are 0 outside the mask."""
    lengths_B_1 = active_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B_1 = values_B_T.sum(dim=1, keepdim=True) / lengths_B_1
    return torch.where(active_B_T, mean_B_1, 0.0)


def _at_least_one(total: float | Tensor) -> float | Tensor:
    return total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
