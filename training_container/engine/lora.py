"""LoRA adapters by peft: put on in place, merged only in copies.

The base weights are never merged into and unmerged from: in low precision that drifts. peft is
imported only where there is an adapter: the rest of the engine runs without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from contracts.failures import ExitCode
from contracts.stages import LoraSpec
from training_container.failure import StageError

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

__all__ = [
    "adapter_off",
    "adapter_weights",
    "add_adapter",
    "lora_config",
    "merged_weights",
    "whole",
]

ADAPTER = "default"
_BASE = ".base_layer."
_FACTOR = re.compile(rf"(?P<layer>.+)\.lora_(?P<side>[AB])\.{ADAPTER}\.weight")


def lora_config(spec: LoraSpec) -> LoraConfig:
    """peft's own configuration of an adapter."""
    from peft import LoraConfig

    targets = spec.target_modules
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=spec.exclude_modules,
        task_type="CAUSAL_LM",
    )


def add_adapter(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Freeze the model and put trainable low-rank factors beside its layers (B starts at 0).

    Raises:
        StageError: BAD_INPUT, when the settings name no layer, or one that takes no adapter here.
    """
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        inject_adapter_in_model(lora_config(spec), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise _no_adapter(spec, str(error)) from error
    embeddings = model.get_input_embeddings().weight
    for name, layer in _lora_layers(model).items():
        if ADAPTER not in layer.lora_A:
            raise _no_adapter(spec, f"{name} is no linear layer")
        if layer.weight is embeddings:
            raise _no_adapter(spec, f"{name} shares its weights with the input embeddings")


def _no_adapter(spec: LoraSpec, reason: str) -> StageError:
    return StageError(
        ExitCode.BAD_INPUT,
        f"lora.target_modules {spec.target_modules!r}, exclude_modules {spec.exclude_modules!r}: "
        f"{reason}",
    )


class adapter_off:  # noqa: N801 - reads as a statement: `with adapter_off(model):`
    """The model as it was before the adapter, for the reference policy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = list(_lora_layers(model).values())

    def __enter__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for layer in self.layers:
            layer.enable_adapters(enabled=False)
        # peft freezes the factors too. FSDP2 asks in its first forward pass which weights have
        # gradients, and would never again reduce and keep them in float32.
        for parameter in trained:
            parameter.requires_grad_(True)

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.enable_adapters(enabled=True)


def _lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merged_weights(
    state: Mapping[str, Tensor], model: nn.Module, spec: LoraSpec | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights under their original names, with W + scaling * B A in place of W.

    ``state`` may hold shards (DTensor); ``model`` tells each layer's scaling and orientation.
    Merging happens in float32.
    """
    if spec is None:
        yield from ((name, whole(weight)) for name, weight in state.items())
        return
    layers = _lora_layers(model)
    for name, shard in state.items():
        if _FACTOR.fullmatch(name):
            continue
        owner, based, rest = name.partition(_BASE)
        weight = whole(shard)
        if based and rest == "weight":
            layer = layers[owner]
            a_R_I = whole(state[f"{owner}.lora_A.{ADAPTER}.weight"]).float()
            b_O_R = whole(state[f"{owner}.lora_B.{ADAPTER}.weight"]).float()
            delta_O_I = layer.scaling[ADAPTER] * (b_O_R @ a_R_I)
            if getattr(layer, "fan_in_fan_out", False):
                delta_O_I = delta_O_I.T
            weight = (weight.float() + delta_O_I).to(weight.dtype)
        yield name.replace(_BASE, "."), weight


def adapter_weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The factors alone, whole, under the names that a peft adapter file uses."""
    for name, weight in state.items():
        match = _FACTOR.fullmatch(name)
        if match:
            yield (
                f"base_model.model.{match['layer']}.lora_{match['side']}.weight",
                whole(weight).float(),
            )


def whole(weight: Tensor) -> Tensor:
    """A sharded tensor gathered (a collective); any other as it is. Without gradient history."""
    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()
