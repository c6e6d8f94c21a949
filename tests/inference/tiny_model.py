"""A model folder as the hub exports it, small enough to serve in a test, and an adapter for it.

Made without the trainer, because the environment that has vLLM lacks what the trainer needs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from contracts.model_manifest import ManifestFile, ModelManifest

CONTEXT = 256
HIDDEN, LAYERS, HEADS, KV_HEADS = 128, 2, 4, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Weights, tokenizer and manifest."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_manifest(folder)
    return folder


def write_manifest(folder: Path) -> ModelManifest:
    """`model.json` over what the folder holds."""
    path = folder / "model.json"
    path.unlink(missing_ok=True)
    manifest = ModelManifest(
        run_id="tiny-20260101-abcdef",
        stage="strict",
        step=7,
        architecture="Qwen2ForCausalLM",
        parameters=1,
        dtype="float32",
        base_model="tiny",
        files=tuple(
            ManifestFile(
                path=file.relative_to(folder).as_posix(),
                size=file.stat().st_size,
                sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            )
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ),
    )
    path.write_text(manifest.model_dump_json())
    return manifest


def write_adapter(folder: Path, *, rank: int = 4, seed: int = 1) -> Path:
    """A LoRA adapter on the query and value projections, strong enough to change every answer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    widths = {"q_proj": HIDDEN, "v_proj": HIDDEN // HEADS * KV_HEADS}
    for layer in range(LAYERS):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            weights[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["How to move from (0,0) to (4,4)? RIGHT DOWN LEFT UP"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )
