"""An outcome reward model in this process: `logits[:, 0]` of a sequence classifier.

Loaded by the leader alone and outside of the policy's sharding (huggingface/trl#3202: loaded inside
ZeRO-3 its weights were empty). B conversations, L tokens of the longest one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from contracts.rewards import ModelReward, RewardSpec
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    RewardRequest,
    Sample,
    Scores,
)

__all__ = ["ModelSource", "chosen_device", "load_template", "messages_of", "positions_of"]

_log = logging.getLogger(__name__)


class ModelSource:
    """Scores conversations with a classifier, in micro-batches."""

    def __init__(self, spec: RewardSpec, weights: str, files: Path) -> None:
        """`weights` is what `from_pretrained` takes; `files` is where `template_file` lies."""
        assert spec.model is not None
        self.name = spec.name
        self._settings: ModelReward = spec.model
        self._timeout_seconds = spec.timeout_seconds
        self._weights, self._files = weights, files
        self._device = chosen_device(spec.model.device)
        self._model: Any = None
        self._tokenizer: Any = None
        self._max_length = spec.model.max_length

    def prepare(self) -> None:
        """Load the classifier. Raises RewardConfigError when it is none, or has no template."""
        # Missing heads and adapters are initialised at random before their weights are read.
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            self._load()

    def _load(self) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        revision = self._settings.revision
        try:
            config = AutoConfig.from_pretrained(self._weights, revision=revision)
            if not any("SequenceClassification" in one for one in config.architectures or ()):
                config.num_labels = 1  # the head comes with an adapter; transformers assumes two
            self._tokenizer = AutoTokenizer.from_pretrained(self._weights, revision=revision)
            self._model, info = AutoModelForSequenceClassification.from_pretrained(
                self._weights,
                revision=revision,
                config=config,
                dtype=torch.float32 if self._device.type == "cpu" else torch.bfloat16,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise RewardConfigError(f"reward {self.name!r}: {error}") from error
        if self._settings.adapter is None and info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise RewardConfigError(
                f"reward {self.name!r}: {self._settings.source} is no trained classifier, it has "
                f"no weights for {missing}; give `adapter`, or use a judge for a causal model"
            )
        if self._settings.adapter is not None:
            self._add_adapter(self._settings.adapter)
        if self._settings.template_file is not None:
            self._tokenizer.chat_template = load_template(self._files, self._settings.template_file)
        if self._tokenizer.chat_template is None:
            raise RewardConfigError(
                f"reward {self.name!r}: its tokenizer has no chat template; give `template_file`"
            )
        self._tokenizer.padding_side = "right"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.to(self._device).eval()
        positions = positions_of(self._model)
        if self._max_length > positions:
            _log.warning(
                "reward %s: max_length is %d, the classifier has %d positions; longer conversations"
                " are not scored",
                self.name,
                self._max_length,
                positions,
            )
            self._max_length = int(positions)

    def _add_adapter(self, adapter: str) -> None:
        from peft import PeftModel

        from training_container.rewards.assets import fetch_weights

        try:
            wrapped = PeftModel.from_pretrained(self._model, fetch_weights(adapter))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: shapes differ
            raise RewardConfigError(f"reward {self.name!r}: adapter {adapter}: {error}") from error
        self._model = wrapped.merge_and_unload()

    def confinement(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        self._model = None

    def score(self, request: RewardRequest) -> Scores:
        """One number per conversation; one that is too long is unscored, never cut."""
        deadline = time.monotonic() + self._timeout_seconds
        scores = Scores([None] * len(request))
        tokens: dict[int, list[int]] = {}
        for index, sample in enumerate(request.samples):
            try:
                ids = self._encode(sample)
            except Exception as error:  # noqa: BLE001 - a template may do anything with a row
                detail = f"template: {type(error).__name__}: {error}"
                scores.failures[index] = Failure(FailureKind.EXCEPTION, detail)
                continue
            if not ids:
                detail = "the template makes no tokens of this conversation"
                scores.failures[index] = Failure(FailureKind.EXCEPTION, detail)
                continue
            if len(ids) > self._max_length:
                detail = f"{len(ids)} tokens, at most {self._max_length} are scored"
                scores.failures[index] = Failure(FailureKind.TOO_LONG, detail)
                continue
            tokens[index] = ids
        for batch in self._micro_batches(tokens):
            if time.monotonic() > deadline:
                late = Failure(FailureKind.TIMEOUT, f"not within {self._timeout_seconds:g} s")
                scores.failures |= dict.fromkeys(batch, late)
                continue
            for index, value in zip(batch, self._forward([tokens[i] for i in batch]), strict=True):
                if math.isfinite(value):
                    scores.values[index] = value
                else:
                    detail = f"a logit of {value}"
                    scores.failures[index] = Failure(FailureKind.NOT_FINITE, detail)
        return scores

    def _encode(self, sample: Sample) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages_of(sample), tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _micro_batches(self, tokens: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
        """Conversations of like length together, for little padding, within both bounds."""
        batch: list[int] = []
        for index in sorted(tokens, key=lambda index: (len(tokens[index]), index)):
            padded = (len(batch) + 1) * len(tokens[index])
            full = len(batch) == self._settings.micro_batch_size
            if batch and (full or padded > self._settings.micro_batch_tokens):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(map(len, rows))
        ids_B_L = torch.full((len(rows), width), self._tokenizer.pad_token_id or 0)
        mask_B_L = torch.zeros((len(rows), width), dtype=torch.long)
        for row, ids in enumerate(rows):
            ids_B_L[row, : len(ids)] = torch.tensor(ids)
            mask_B_L[row, : len(ids)] = 1
        output = self._model(
            input_ids=ids_B_L.to(self._device), attention_mask=mask_B_L.to(self._device)
        )
        return [float(value) for value in output.logits[:, 0].float().tolist()]


def chosen_device(wanted: str) -> torch.device:
    """`auto` is the policy's: the GPU when there is one. Raises RewardConfigError."""
    count = torch.cuda.device_count()
    if wanted == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise RewardConfigError(f"a reward model is to be on {wanted}; this host has {count} GPUs")
    return device


def positions_of(model: torch.nn.Module) -> float:
    """Tokens of the longest sequence that a transformers model takes; inf when it sets no bound."""
    config: Any = model.config
    stated = getattr(config.get_text_config(), "max_position_embeddings", None)
    bounds = [float(stated)] if stated is not None and stated > 0 else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa's positions begin after the padding's row.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            bounds.append(float(module.num_embeddings - first))
    return min(bounds, default=math.inf)


def load_template(files: Path, name: str) -> str:
    """A chat template of the run. Raises RewardConfigError."""
    try:
        return (files / name).read_text("utf-8")
    except OSError as error:
        raise RewardConfigError(f"template_file {name}: {error.strerror}") from error


def messages_of(sample: Sample) -> list[dict[str, Any]]:
    """The whole conversation, the completion last."""
    said = [dict(message) for message in sample.prompt]
    return [*said, {"role": "assistant", "content": sample.completion}]
