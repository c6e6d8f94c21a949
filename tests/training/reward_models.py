"""Reward models small enough to make in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.training import tiny


def config(**more: Any) -> Qwen2Config:
    """Of the tokenizer's vocabulary, two layers of 32."""
    return Qwen2Config(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=tiny.PAD_ID,
        eos_token_id=tiny.EOS_ID,
        **more,
    )


def save_classifier(folder: Path) -> Path:
    """A sequence classifier with one output and random weights."""
    torch.manual_seed(1)
    Qwen2ForSequenceClassification(config(num_labels=1)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def save_judge(folder: Path) -> Path:
    """A judge that has learnt one thing: RIGHT is worth 0.9, anything else 0.1."""
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(config())
    tokenizer = tiny.tokenizer()
    examples = []
    for text in ("RIGHT", "LEFT", "UP", "DOWN"):
        verdict = f"Reward: {0.9 if text == 'RIGHT' else 0.1}<|im_end|>"
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        before = tokenizer(asked, add_special_tokens=False)["input_ids"]
        after = tokenizer(verdict, add_special_tokens=False)["input_ids"]
        examples.append((before, after))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = torch.zeros(())
        for before, after in examples:
            ids = torch.tensor([before + after])
            labels = torch.tensor([[-100] * len(before) + after])
            loss = loss + model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
