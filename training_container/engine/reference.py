"""The policy that KL is measured against: the stage's starting weights, frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from contracts.stages import GrpoStage
from training_container.engine.batches import TokenSequence
from training_container.engine.distributed import World
from training_container.engine.loading import cast_weights, empty_twin
from training_container.engine.lora import adapter_off
from training_container.engine.policy import Passes, Policy, compute_dtype, shard
from training_container.engine.scorer import LogProbScorer

__all__ = ["AdapterReference", "FrozenReference", "Reference"]


class FrozenReference:
    """A frozen copy of the model, made before the first update (and again in each attempt, from
    the same starting weights, never from a checkpoint)."""

    def __init__(self, model: PreTrainedModel, stage: GrpoStage, world: World) -> None:
        dtype = compute_dtype(stage.precision, world.device)
        # Sharded, it holds what FSDP2 would cast to anyway, in half the memory.
        stored = torch.float32 if world.mesh is None else dtype
        if world.is_leader:
            frozen = cast_weights(copy.deepcopy(model), stored)
        else:
            frozen = empty_twin(model, stored)
        scorer = LogProbScorer(frozen.requires_grad_(False))
        if world.mesh is not None:
            shard(scorer, world, dtype, trained=False)
        self._passes = Passes(scorer, world, dtype, stage.micro_batch_tokens)

    def log_probs(
        self, sequences: Sequence[TokenSequence], *, temperature: float = 1.0
    ) -> dict[int, Tensor]:
        """As `Policy.log_probs`, of the starting weights."""
        return self._passes.log_probs(sequences, temperature)


class AdapterReference:
    """The policy with its adapter switched off: needs no second copy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def log_probs(
        self, sequences: Sequence[TokenSequence], *, temperature: float = 1.0
    ) -> dict[int, Tensor]:
        """As `Policy.log_probs`, of the base weights."""
        with adapter_off(self._policy.model):
            return self._policy.log_probs(sequences, temperature=temperature)


Reference = FrozenReference | AdapterReference
