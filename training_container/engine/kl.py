"""KL to the reference policy: per-token estimators, the in-reward penalty and its controllers.

Shapes: B sequences, T completion tokens. Log-ratios are clamped to ±20 so that exp cannot overflow.
Source of the estimators: J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "KL_CONTROLS",
    "KL_ESTIMATORS",
    "LOG_RATIO_BOUND",
    "AdaptiveKLController",
    "FixedKLController",
    "kl_controller",
    "kl_per_token",
    "subtract_kl",
]

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_CONTROLS = ("fixed", "adaptive")
LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0


def kl_per_token(
    estimator: str, logprobs_B_T: Tensor, ref_logprobs_B_T: Tensor, mask_B_T: Tensor
) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, kl_B_T; 0 outside the mask.

    With d = log p_ref - log p, clamped to ±20: k1 = -d (unbiased; as a loss its expected gradient
    is 0, so use it in the reward), k2 = d² / 2 (as a loss its gradient is that of the KL), k3 =
    exp(d) - d - 1, clamped to at most 10 (unbiased below the clamp, never negative; GRPO's choice).
    Where a clamp is active the gradient is 0. Values as in verl `kl_penalty_forward`.

    Differentiable in `logprobs_B_T`. Positions outside the mask may hold anything, NaN included.
    Raises ValueError for an unknown estimator.
    """
    active_B_T = mask_B_T.bool()
    difference_B_T = torch.where(active_B_T, ref_logprobs_B_T - logprobs_B_T, 0.0)
    d_B_T = difference_B_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return -d_B_T
    if estimator == "k2":
        return 0.5 * d_B_T.square()
    if estimator == "k3":
        # expm1 keeps the digits that exp(d) - 1 loses near d = 0, where training spends its time.
        return (torch.expm1(d_B_T) - d_B_T).clamp(max=_K3_BOUND)
    raise ValueError(f"unknown KL estimator {estimator!r}; valid: {', '.join(KL_ESTIMATORS)}")


def subtract_kl(rewards_B: Tensor, kl_B_T: Tensor, mask_B_T: Tensor, coefficient: float) -> Tensor:
    """KL in the reward: R_i - coefficient * sum_t kl_it, before advantages (TRL RLOO, verl
    `apply_kl_penalty`).

    `kl_B_T` is measured with the *old* log-probs and carries no gradient. A NaN reward stays NaN.
    """
    kl_B = torch.where(mask_B_T.bool(), kl_B_T.detach(), 0.0).sum(dim=1)
    return rewards_B - coefficient * kl_B.to(rewards_B)


class FixedKLController:
    """A coefficient that stays as configured."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, sequences: int) -> None:
        """Accept a measurement and ignore it."""

    def state_dict(self) -> dict[str, float]:
        """Nothing moves, so nothing is kept: a resumed run follows its run file."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Counterpart of `state_dict`."""


class AdaptiveKLController:
    """Steers the coefficient so that the measured KL approaches a target.

    beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon): D. Ziegler et al.,
    "Fine-tuning language models from human preferences", arXiv:1909.08593, section 2.2. The
    coefficient is part of a checkpoint: a resumed run must not start again from the configured one.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: int) -> None:
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, sequences: int) -> None:
        """Take in the mean KL of a step and its number of sequences.

        Raises ValueError for a KL that is not finite, which would poison the coefficient for good.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps; JSON round-trips it exactly."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict`; target and horizon come from the run file."""
        self.coefficient = state["coefficient"]


def kl_controller(
    control: str, coefficient: float, *, target: float, horizon: int
) -> FixedKLController | AdaptiveKLController:
    """The controller named in the run file: `fixed` or `adaptive`. Raises ValueError for another
    name."""
    if control == "fixed":
        return FixedKLController(coefficient)
    if control == "adaptive":
        return AdaptiveKLController(coefficient, target=target, horizon=horizon)
    raise ValueError(f"unknown KL control {control!r}; valid: {', '.join(KL_CONTROLS)}")
