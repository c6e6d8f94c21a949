"""The loss of one mini-batch of a GRPO step, micro-batch by micro-batch, and sums for metrics.

Shapes as in `algorithms`: B answers of the micro-batch, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from contracts.stages import GrpoSettings
from training_container.engine.algorithms import (
    LOSS_SETTINGS,
    aggregate,
    entropy_bonus,
    kl_per_token,
    policy_loss,
)
from training_container.engine.batches import MicroBatch, TokenSequence

__all__ = ["GrpoLoss", "MiniBatch"]


@dataclass
class MiniBatch:
    """The answers of one optimizer update, with what stays fixed while it is trained on."""

    sequences: list[TokenSequence]
    adv_B: Tensor
    finished_B: Tensor
    old: dict[int, Tensor] | None = None
    """Log-probs of the sampling policy by index, this rank's; None: on-policy, they are the new."""
    reference: dict[int, Tensor] | None = None

    def mask(self, micro: MicroBatch, mask_truncated: bool) -> Tensor:
        """The micro-batch's loss mask."""
        if not mask_truncated or not micro.indices:
            return micro.mask_B_T
        finished_B = self.finished_B[list(micro.indices)].to(micro.mask_B_T.device)
        return micro.mask_B_T & finished_B.unsqueeze(1)

    def tokens(self, mask_truncated: bool) -> int:
        """Tokens that carry loss, over all ranks."""
        counts = torch.tensor([int(s.target.sum()) for s in self.sequences])
        return int(counts[self.finished_B].sum() if mask_truncated else counts.sum())


@dataclass
class GrpoLoss:
    """What `Policy.backward` calls for each micro-batch of ``batch``.

    ``sums`` grows by this rank's totals: counts of `policy_loss`, `entropy`, and `kl/k1`, `kl/k3`
    and the configured estimator where there is a reference.
    """

    settings: GrpoSettings
    batch: MiniBatch
    kl_coefficient: float
    max_length: int
    sums: dict[str, float]
    total_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_tokens = self.batch.tokens(self.settings.mask_truncated)

    def add(self, name: str, value: float) -> None:
        """Add to a sum."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def silent(self) -> list[bool]:
        """Answers whose loss has no gradient: of an advantage of exactly 0, as in groups of equal
        rewards, or masked because they were cut off. Every policy loss is a multiple of the
        advantage; a KL term in the loss or an entropy bonus speaks for every answer that counts.
        """
        settings, batch = self.settings, self.batch
        silent_B = torch.zeros(len(batch.sequences), dtype=torch.bool)
        in_loss = settings.kl is not None and settings.kl.placement == "loss"
        if not in_loss and not settings.entropy_coefficient:
            silent_B |= batch.adv_B == 0
        if settings.mask_truncated:
            silent_B |= ~batch.finished_B
        found: list[bool] = silent_B.tolist()
        return found

    def __call__(self, micro: MicroBatch, logp_B_T: Tensor, entropy_B_T: Tensor) -> Tensor:
        """The micro-batch's contribution to the mini-batch's loss."""
        settings, batch = self.settings, self.batch
        mask_B_T = batch.mask(micro, settings.mask_truncated)
        indices = list(micro.indices)
        old_B_T = logp_B_T.detach()
        if batch.old is not None:
            old_B_T = micro.pad([batch.old[index] for index in indices])
        adv_B = batch.adv_B[indices] if indices else torch.zeros(1)
        options = LOSS_SETTINGS[settings.loss]
        loss_B_T, stats = policy_loss(
            settings.loss,
            logp_B_T,
            old_B_T,
            adv_B.to(logp_B_T.device),
            mask_B_T,
            **{ours: getattr(settings, theirs) for ours, theirs in options.items()},
        )
        if batch.reference is not None:
            reference_B_T = micro.pad([batch.reference[index] for index in indices])
            loss_B_T = loss_B_T + self._kl(logp_B_T, reference_B_T, mask_B_T)
        for name, value in stats.items():
            self.add(name, value.item())
        self.add("entropy", (entropy_B_T.detach() * mask_B_T).sum().item())
        total = aggregate(
            loss_B_T,
            mask_B_T,
            settings.aggregation,
            total_tokens=self.total_tokens,
            total_sequences=len(batch.sequences),
            max_length=self.max_length,
        )
        if settings.entropy_coefficient:
            total = total + entropy_bonus(
                entropy_B_T,
                mask_B_T,
                coefficient=settings.entropy_coefficient,
                total_tokens=self.total_tokens,
            )
        return total

    def _kl(self, logp_B_T: Tensor, reference_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
        """The KL term of each token's loss (0 when KL sits in the reward), measured on the way."""
        kl = self.settings.kl
        assert kl is not None
        with torch.no_grad():
            for name in sorted({"k1", "k3", kl.estimator}):
                kl_B_T = kl_per_token(name, logp_B_T, reference_B_T, mask_B_T)
                self.add(f"kl/{name}", kl_B_T.sum().item())
        if kl.placement == "reward":
            return torch.zeros_like(logp_B_T)
        kl_B_T = kl_per_token(kl.estimator, logp_B_T, reference_B_T, mask_B_T)
        return self.kl_coefficient * kl_B_T
