"""The SFT step: token-mean cross-entropy on the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contracts.stages import SftStage
from training_container.engine.batches import MicroBatch, TokenSequence
from training_container.engine.clock import PhaseClock
from training_container.engine.data import DataOrder
from training_container.engine.distributed import World
from training_container.engine.loop import Metrics
from training_container.engine.policy import Policy
from training_container.engine.schedule import Plan, learning_rate
from training_container.engine.state import Progress

__all__ = ["Sft"]


@dataclass
class Sft:
    """An SFT stage. See `loop.Method`."""

    stage: SftStage
    world: World
    policy: Policy
    examples: Sequence[TokenSequence]
    validation_examples: Sequence[TokenSequence]
    plan: Plan
    progress: Progress
    order: DataOrder = field(init=False)

    def __post_init__(self) -> None:
        data = self.stage.data
        self.order = DataOrder(len(self.examples), seed=self.stage.seed, shuffle=data.shuffle)

    def begin(self, step: int) -> None:
        """Nothing to hand over."""

    def step(self, step: int, clock: PhaseClock) -> Metrics:
        size, progress = self.stage.sft.batch_size, self.progress
        batch = [self.examples[row] for row in self.order.take(progress.position, size)]
        progress.position += size
        tokens = _targets(batch)
        rate = learning_rate(self.stage.optimizer, step, self.plan.steps)
        sums = {"entropy": 0.0}

        def loss(micro: MicroBatch, logp_B_T: Tensor, entropy_B_T: Tensor) -> Tensor:
            sums["entropy"] += (entropy_B_T.detach() * micro.mask_B_T).sum().item()
            return -(logp_B_T * micro.mask_B_T).sum() / tokens

        with clock.phase("update"):
            sums["loss"] = self.policy.backward(batch, loss)
            norm = self.policy.update(rate, self.stage.optimizer.max_grad_norm)
        sums = self.world.total(sums)
        counters = progress.counters
        counters["samples"] = counters.get("samples", 0) + size
        counters["tokens"] = counters.get("tokens", 0) + tokens
        return {
            "loss": sums["loss"],
            "grad_norm": norm,
            "learning_rate": rate,
            "entropy": sums["entropy"] / tokens,
            "epoch": progress.position / len(self.examples),
            "total/samples": counters["samples"],
            "total/tokens": counters["tokens"],
            "tokens_per_second": sum(len(s.ids) for s in batch) / clock.total,
        }

    def validate(self, step: int) -> dict[str, float]:  # noqa: ARG002 - `loop.Method`
        if not self.validation_examples:
            return {}
        rows = self.policy.log_probs(self.validation_examples).values()
        total = self.world.total({"nll": -sum(float(row.double().sum()) for row in rows)})
        return {"validation/loss": total["nll"] / _targets(self.validation_examples)}


def _targets(sequences: Sequence[TokenSequence]) -> int:
    return int(torch.stack([sequence.target.sum() for sequence in sequences]).sum())
