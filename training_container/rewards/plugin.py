"""Loading a model inside a worker process, for a plugin class of the user's.

A plugin is a class made with `(model, template)` and called with `inputs`, a list of rows with
`messages` and every column of the data, as ms-swift's reward-model plugins are. What it is given:

- `model`: the sequence classifier or causal model in the folder, in evaluation mode, on the CPU of
  the worker process;
- `template`: `encode(row)` gives `{"input_ids": [...]}` by the model's own chat template,
  `data_collator(rows)` pads them to tensors, `tokenizer` is the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training_container.rewards.interface import RewardConfigError

__all__ = ["Template", "load_model"]


class Template:
    """Conversations to tensors with a tokenizer's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    def encode(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Token ids of a row's `messages`."""
        text = self.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return {"input_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}

    def data_collator(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        """`input_ids` and `attention_mask`, B x L, padded on the right."""
        import torch

        width = max(len(row["input_ids"]) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = [[*row["input_ids"], *[pad] * (width - len(row["input_ids"]))] for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def load_model(folder: Path) -> tuple[Any, Template]:
    """The model in a folder and its template. Raises RewardConfigError when it is neither kind."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        auto = transformers.AutoModelForSequenceClassification
    elif architecture.endswith("ForCausalLM"):
        auto = transformers.AutoModelForCausalLM
    else:
        raise RewardConfigError(f"{folder.name}: {architecture or 'no model'} cannot be loaded")
    model = auto.from_pretrained(folder).eval()
    template = Template(transformers.AutoTokenizer.from_pretrained(folder))
    model.config.pad_token_id = template.tokenizer.pad_token_id
    return model, template
