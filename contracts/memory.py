"""How much memory a stage will need on each GPU and host, from shapes alone, before anything loads.

An estimate of the big parts, in GiB; what it leaves out (allocator slack, NCCL buffers, kernels'
workspace) is covered by `HEADROOM`. Not counted are reward models and judges that a stage loads
beside the policy: their shapes are not known before the job fetches them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from contracts.compute import Rung
from contracts.instances import INSTANCES, Instance
from contracts.stages import GrpoStage, SftStage

__all__ = ["Estimate", "ModelShape", "estimate"]

GIB = 1024**3
ENGINE = "rollout engine"
HEADROOM = 0.9
"""Share that may be planned for of a host, and of what vLLM leaves of a GPU."""
_ENGINE_ROOM = 1.1
"""What vLLM needs at least, in weights: they, and a cache that is worth the name."""
_MASTER, _GRADIENT, _ADAM = 4, 4, 8
"""Bytes per weight: float32 master copy, float32 gradient, two float32 moments."""
_ACTIVATION = 34
"""Bytes per token, hidden unit and layer that a transformer block keeps for its backward pass in 16
bits with fused attention (Korthikanti et al. 2022, "Reducing Activation Recomputation", eq. 2
without the attention term)."""
_KEPT = 2
"""The same with gradient checkpointing: only the block's input."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight by `config.json`'s `dtype`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a model."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    tied: bool = False
    """Whether input embeddings and output layer are one matrix."""

    @property
    def ends(self) -> int:
        """Weights of embeddings and output layer, which FSDP2 gathers as one group."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: Mapping[str, int]) -> Self | None:
        """From a model folder's `config.json` and the bytes of its files by name; None where they
        do not tell, as with quantised weights."""
        weight_bytes = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
        text = config.get("text_config", config)  # vision-language models nest the decoder's shape
        width = _WIDTHS.get(config.get("dtype", config.get("torch_dtype", "float32")))
        known = "hidden_size" in text and "num_hidden_layers" in text and weight_bytes > 0
        if width is None or not known or "quantization_config" in config:
            return None
        return cls(
            parameters=weight_bytes // width,
            hidden=int(text["hidden_size"]),
            layers=int(text["num_hidden_layers"]),
            vocabulary=int(text.get("vocab_size", 0)),
            tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """One rung of the ladder: GiB per GPU by part, and what a GPU has."""

    instance_type: str
    ranks: int
    parts: Mapping[str, float]
    available: float
    """GiB of one GPU; of the host on a CPU type."""
    engine_weights: float
    """GiB of the model in vLLM."""
    host_parts: Mapping[str, float]
    """GiB of host memory, at different times, on the host that needs most."""
    host_available: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.shortage is None

    @property
    def shortage(self) -> str | None:
        """What is too small, in words."""
        engine = self.parts.get(ENGINE, 0.0)
        if self.total - engine > HEADROOM * (self.available - engine):
            sizes = sorted(self.parts.items(), key=lambda part: -part[1])
            parts = ", ".join(f"{name} {size:.1f}" for name, size in sizes)
            return f"about {self.total:.1f} GiB per rank, of {self.available:g} there are: {parts}"
        if engine and engine < _ENGINE_ROOM * self.engine_weights:
            return (
                f"{engine:.1f} GiB for vLLM (rollout.gpu_memory_utilization), which needs "
                f"{self.engine_weights:.1f} for weights and more for its cache"
            )
        what, size = max(self.host_parts.items(), key=lambda part: part[1])
        if size > HEADROOM * self.host_available:
            return f"about {size:.1f} GiB of host memory for {what}, of {self.host_available:g}"
        return None

    def lines(self) -> list[str]:
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = (
            f"{self.instance_type}, {self.ranks} ranks: {self.total:.2f} of "
            f"{self.available:.0f} GiB per rank: {verdict}"
        )
        parts = [f"  {name}: {size:.2f} GiB" for name, size in self.parts.items()]
        host = ", ".join(f"{name} {size:.2f} GiB" for name, size in self.host_parts.items())
        return [head, *parts, f"  host memory of {self.host_available:.0f} GiB: {host}"]


def estimate(shape: ModelShape, stage: SftStage | GrpoStage, rung: Rung) -> Estimate:
    """Memory of one rank of ``rung``: state sharded over all ranks, activations of one
    micro-batch.
    """
    machine = INSTANCES[rung.instance_type]
    ranks = machine.ranks * rung.count
    width = 4 if stage.precision == "float32" or not machine.gpus else 2
    trained = _trained(shape, stage)
    base = width * shape.parameters if stage.lora else 0.0  # frozen: needs no master copy
    frozen_copy = isinstance(stage, GrpoStage) and stage.grpo.kl is not None and not stage.lora
    parts = {
        "frozen base": base / ranks,
        "master weights": _MASTER * trained / ranks,
        "gradients and optimizer": (_GRADIENT + _ADAM) * trained / ranks,
        "reference model": width * shape.parameters / ranks if frozen_copy else 0.0,
        "embeddings and head": width * shape.ends,
        **_fullest(shape, stage, width, on_gpu=machine.gpus > 0),
        ENGINE: _rollout(stage, machine),
    }
    return Estimate(
        instance_type=rung.instance_type,
        ranks=ranks,
        parts={name: size / GIB for name, size in parts.items() if size},
        available=machine.gpu_memory_gib if machine.gpus else machine.memory_gib,
        engine_weights=width * shape.parameters / GIB,
        host_parts={
            # The leader's whole copy, from which all ranks get their shards, and one for reference.
            "loading": _MASTER * shape.parameters * (2 if frozen_copy else 1) / GIB,
            "one save": (_MASTER + _ADAM) * trained / rung.count / GIB,
        },
        host_available=machine.memory_gib,
    )


def _fullest(
    shape: ModelShape, stage: SftStage | GrpoStage, width: int, *, on_gpu: bool
) -> dict[str, float]:
    """What comes and goes in a backward pass, when there is most of it: amid the layers; or at the
    end, when embeddings and output layer have gradients and the float32 copy that ranks sum."""
    layers = {
        "gathered layers": 2 * width * (shape.parameters - shape.ends) / max(1, shape.layers),
        "activations": _activations(shape, stage, width, on_gpu=on_gpu),
    }
    trained_ends = 0 if stage.lora else shape.ends
    end = {"gradients of embeddings and head": float((width + _GRADIENT) * trained_ends)}
    return max(layers, end, key=lambda parts: sum(parts.values()))


def _activations(
    shape: ModelShape, stage: SftStage | GrpoStage, width: int, *, on_gpu: bool
) -> float:
    token_layer = stage.micro_batch_tokens * shape.hidden * width / 2
    if stage.recomputes(on_gpu=on_gpu):
        return token_layer * (_KEPT * shape.layers + _ACTIVATION)
    return token_layer * _ACTIVATION * shape.layers


def _trained(shape: ModelShape, stage: SftStage | GrpoStage) -> float:
    """Weights with gradients: all, or about two factors of the adapter's rank per linear layer."""
    if stage.lora is None:
        return shape.parameters
    linear_layers = 7 * shape.layers  # q, k, v, o, gate, up, down of today's decoders
    body = max(1, shape.parameters - 2 * shape.vocabulary * shape.hidden)
    side = math.sqrt(body / linear_layers)
    return min(shape.parameters, 2 * stage.lora.rank * side * linear_layers)


def _rollout(stage: SftStage | GrpoStage, machine: Instance) -> float:
    """What vLLM takes; generation with transformers (CPU) reuses the policy's weights."""
    if not isinstance(stage, GrpoStage) or not machine.gpus or stage.rollout.engine == "hf":
        return 0.0
    return stage.rollout.gpu_memory_utilization * machine.gpu_memory_gib * GIB
