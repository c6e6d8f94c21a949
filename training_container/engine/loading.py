"""Models from Hugging Face folders. Of many ranks only the leader reads the weights; the others
get their shards from it, so that a host holds one whole copy and not one for each GPU.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from training_container.engine.distributed import World
from training_container.engine.errors import DataError

__all__ = ["cast_weights", "deal_weights", "empty_model", "empty_twin", "load_model"]

_FAULTS = (OSError, ValueError, KeyError)


def load_model(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model in float32 from a Hugging Face folder; nothing is fetched.

    Raises:
        DataError: when the folder holds no loadable model.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except _FAULTS as error:
        raise _no_model(folder, error) from error


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The same model without its weights, for a rank that gets its shards by `deal_weights`.

    Costs no memory until it is written to: the kernel backs no page that nobody has touched. What
    it holds is arbitrary.

    Raises:
        DataError: when the folder describes no model.
    """
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        with contextlib.suppress(OSError):  # as `from_pretrained`: not every folder has one
            model.generation_config = GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    except _FAULTS as error:
        raise _no_model(folder, error) from error
    return _untouched(model)


def empty_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As `empty_model`, after a model that is there."""
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    return _untouched(cast_weights(twin, dtype))


def cast_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, trained: bool = True
) -> PreTrainedModel:
    """The model with weights of another type; without ``trained`` only those that are frozen.
    Buffers stay: rotary frequencies of 16 bits would turn late positions by the wrong angle."""
    for parameter in model.parameters():
        if trained or not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def _untouched(model: PreTrainedModel) -> PreTrainedModel:
    model.to_empty(device="cpu")
    model.tie_weights()  # each of the tied got memory of its own
    return model


def deal_weights(module: nn.Module, whole: dict[str, Tensor], world: World) -> None:
    """Fill a sharded module on every rank from the leader's whole state dict, tensor by tensor.

    A collective. ``whole`` counts on the leader only. Buffers that no state dict has (rotary
    frequencies) are sent as well.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, whole if world.is_leader else {}, options=options)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def _no_model(folder: Path, error: Exception) -> DataError:
    return DataError(f"no causal language model can be loaded from {folder}: {error}")
