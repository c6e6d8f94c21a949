"""The model being trained: loading, sharding, LoRA, forward passes and the optimizer.

Runs under plain torchrun: needs torch, transformers and, for adapters, peft.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from transformers import PreTrainedModel

from contracts.stages import GrpoStage, OptimizerSpec, SftStage
from training_container.engine.batches import MicroBatch, TokenSequence, micro_batches
from training_container.engine.distributed import World
from training_container.engine.errors import NonFiniteError
from training_container.engine.loading import cast_weights, deal_weights
from training_container.engine.lora import add_adapter, merged_weights
from training_container.engine.scorer import LogProbScorer
from training_container.engine.seeds import seed_everything

__all__ = ["Loss", "Passes", "Policy", "compute_dtype", "shard"]

Loss = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""(micro-batch, log-probs B x T, entropies B x T) -> its part of the batch's loss."""


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Type of activations: `auto` is bfloat16 on GPU and float32 on CPU."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def shard(scorer: LogProbScorer, world: World, dtype: torch.dtype, *, trained: bool) -> None:
    """Shard the leader's weights by FSDP2, layer by layer and then the rest, summing gradients over
    ranks. What other ranks' models held is of no account.

    The rest (embeddings and output layer) stays gathered between a forward and a backward pass; of
    a model that is not ``trained`` it would stay so for ever.

    FSDP2 averages by default; our losses are already divided by totals over all ranks. Gloo has no
    pre-multiplied sum, hence the plain one.
    """
    assert world.mesh is not None
    whole = scorer.state_dict()
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in _layers(scorer.model):
        fully_shard(layer, mesh=world.mesh, mp_policy=mixed)
    fully_shard(scorer, mesh=world.mesh, mp_policy=mixed, reshard_after_forward=not trained)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if world.size > 1:
        deal_weights(scorer, whole, world)


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers: the list of modules that holds the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=())


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes of one model over this rank's share of a batch."""

    scorer: LogProbScorer
    world: World
    dtype: torch.dtype
    micro_batch_tokens: int

    def micro_batches(
        self, sequences: Sequence[TokenSequence], kept: Sequence[bool] | None = None
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches, of the ``kept`` sequences where that is given."""
        return micro_batches(
            sequences,
            rank=self.world.rank,
            ranks=self.world.size,
            max_tokens=self.micro_batch_tokens,
            device=self.world.device,
            kept=kept,
        )

    def forward(
        self, micro: MicroBatch, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the micro-batch's targets, N each."""
        with self._autocast():
            return self.scorer(
                micro.ids_B_L,
                micro.sources_N,
                micro.targets_N,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
            )

    def log_probs(
        self, sequences: Sequence[TokenSequence], temperature: float
    ) -> dict[int, Tensor]:
        """Log-probs (float32, CPU) of the targets of this rank's share, by sequence index."""
        found: dict[int, Tensor] = {}
        self.scorer.eval()
        with torch.no_grad():
            for micro in self.micro_batches(sequences):
                logp_N, _ = self.forward(micro, temperature)
                rows = micro.rows(micro.spread(logp_N).cpu())
                found.update(zip(micro.indices, rows, strict=False))
        return found

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        """FSDP2 casts by itself; an unsharded model computes in bfloat16 by autocast."""
        if self.world.mesh is None and self.dtype != torch.float32:
            return torch.autocast(self.world.device.type, self.dtype)
        return contextlib.nullcontext()


class Policy:
    """Weights, optimizer and the passes over token sequences.

    Sequences of a call are the same on every rank; each rank works on its share of them. Gradients
    of a `backward` call are those of the whole batch, whatever the micro-batches and ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stage: SftStage | GrpoStage,
        world: World,
        *,
        fused: bool = True,
    ) -> None:
        self.world = world
        self.model = model
        self.lora = stage.lora
        self.parameters = model.num_parameters()
        """Weights of the model, without an adapter's."""
        if stage.lora is not None:
            seed_everything(stage.seed, "adapter")  # the same factors on every rank and attempt
            add_adapter(model, stage.lora)
        if stage.recomputes(on_gpu=world.device.type == "cuda"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # Frozen embeddings would otherwise cut the graph before the first recomputed layer.
            model.enable_input_require_grads()
        self.scorer = LogProbScorer(model)
        self.scorer.eval()
        if world.is_leader:
            self.scorer.verify()  # the only one that has its weights already
        dtype = compute_dtype(stage.precision, world.device)
        if stage.lora is not None:
            # Without updates there are none that 16 bits could lose.
            cast_weights(model, dtype, trained=False)
        if world.mesh is not None:
            shard(self.scorer, world, dtype, trained=True)
        self.passes = Passes(self.scorer, world, dtype, stage.micro_batch_tokens)
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _adamw(self.trainable, stage.optimizer, fused=fused)

    @property
    def module(self) -> nn.Module:
        """What a checkpoint names weights after: the bare model, not the scorer around it."""
        return self.model

    def log_probs(
        self, sequences: Sequence[TokenSequence], *, temperature: float = 1.0
    ) -> dict[int, Tensor]:
        """Log-probs (float32, CPU) of the targets of this rank's share, by sequence index."""
        return self.passes.log_probs(sequences, temperature)

    def backward(
        self,
        sequences: Sequence[TokenSequence],
        loss: Loss,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        silent: Sequence[bool] = (),
    ) -> float:
        """Add the gradients of the batch; the loss of this rank's share.

        ``loss(micro, logp_B_T, entropy_B_T)`` is the micro-batch's contribution to the loss of the
        whole batch: contributions add up. A micro-batch without indices must contribute 0.
        ``silent`` marks sequences whose gradient is known to be 0: only their loss is computed, a
        third of the work. The first of a batch that is silent throughout is treated as if it were
        not, because an update without any gradient would skip momentum and weight decay.

        Raises:
            NonFiniteError: before any gradient of the offending micro-batch is taken.
        """
        heard = [not one for one in silent] or [True] * len(sequences)
        if not any(heard):
            heard[0] = True
        total = 0.0
        self.scorer.train()
        if not all(heard):
            with torch.no_grad():
                for micro in self.passes.micro_batches(sequences, [not one for one in heard]):
                    total += self._loss(micro, loss, temperature)[1]
        for micro in self.passes.micro_batches(sequences, heard):
            part, value = self._loss(micro, loss, temperature, entropy_gradient)
            part.backward()
            total += value
        return total

    def _loss(
        self, micro: MicroBatch, loss: Loss, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, float]:
        """(the micro-batch's loss, its value, for which the host waits on the device once)."""
        logp_N, entropy_N = self.passes.forward(micro, temperature, entropy_gradient)
        part = loss(micro, micro.spread(logp_N), micro.spread(entropy_N))
        value = part.item()
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss is {value}")
        return part, value

    def update(self, learning_rate: float, max_grad_norm: float) -> float:
        """One optimizer step from the gradients gathered so far; their norm before clipping.

        Raises:
            NonFiniteError: instead of stepping on a NaN or infinite gradient.
        """
        clipped = nn.utils.clip_grad_norm_(self.trainable, max_grad_norm)
        norm = float(clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole and one after another, adapters merged, under Hugging Face names;
        of tied weights the first name only, as in a model file.

        Gathering a sharded weight is a collective: every rank must consume the iterator.
        """
        named = {name for name, _ in self.model.named_parameters()}
        named |= {name for name, _ in self.model.named_buffers()}
        state = {n: weight for n, weight in self.model.state_dict().items() if n in named}
        with torch.no_grad():
            yield from merged_weights(state, self.model, self.lora)


def _adamw(trainable: Sequence[nn.Parameter], spec: OptimizerSpec, *, fused: bool) -> AdamW:
    """AdamW with the state it has before its first update, which torch makes only then: saving or
    restoring a checkpoint would make it by an update of its own, and count that."""
    optimizer = AdamW(
        trainable, lr=0.0, betas=spec.betas, weight_decay=spec.weight_decay, fused=fused
    )
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # at a rate of 0
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer
