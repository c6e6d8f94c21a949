"""Rounding is no disagreement, another layer's weights are one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from training_container.engine.batches import TokenSequence
from training_container.engine.probe import disagreement, probe


def peaked_model(seed: int) -> PreTrainedModel:
    """16 layers whose logits have a standard deviation of 4, as those of trained models."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=4000, hidden_size=256, intermediate_size=700, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        initializer_range=0.04,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        logits_1_L_V = model(input_ids=probe(config).ids[None]).logits
        model.lm_head.weight.mul_(4 / logits_1_L_V.std())
    return model


@torch.no_grad()
def log_probs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    logits_L_V = model(input_ids=sequence.ids[None]).logits[0, :-1].float()
    return logits_L_V.log_softmax(-1).gather(1, sequence.ids[1:, None]).squeeze(1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounding_passes_and_a_wrong_layer_does_not(seed: int) -> None:
    torch.set_num_threads(1)
    model = peaked_model(seed)
    sequence = probe(model.config)
    assert len(sequence.ids) == 64
    expected_T = log_probs(model, sequence)
    assert disagreement(log_probs(model, sequence), expected_T, torch.float32) is None
    rounded_T = log_probs(model.to(torch.bfloat16), sequence)
    assert disagreement(rounded_T, expected_T, torch.bfloat16) is None
    assert "on average" in str(disagreement(rounded_T, expected_T, torch.float32))
    layers = model.model.layers
    layers[8].mlp.down_proj.weight.data = layers[7].mlp.down_proj.weight.data
    wrong_T = log_probs(model, sequence)
    assert "on average" in str(disagreement(wrong_T, expected_T, torch.bfloat16))


def test_a_log_prob_that_is_no_number_is_a_disagreement() -> None:
    nan_T = torch.tensor([0.0, float("nan")])
    assert disagreement(nan_T, torch.zeros(2), torch.bfloat16) is not None


def test_a_short_engine_gets_a_short_probe() -> None:
    config = Qwen2Config(vocab_size=100, max_position_embeddings=32)
    assert len(probe(config).ids) == 32
    assert len(probe(config, 9).ids) == 9
