"""A judge in the job: any causal language model, run by the rollout engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from contracts.rewards import JudgeReward
from training_container.engine.policy import Policy
from training_container.engine.rollout import HfRollout, Sampling
from training_container.rewards.interface import Failure, FailureKind, RewardConfigError
from training_container.rewards.judge import Conversation, Judgement, seed_of
from training_container.rewards.model_source import chosen_device, positions_of

__all__ = ["LocalAsker"]

_BATCH = 16


@dataclass(frozen=True, slots=True)
class _World:
    """One process that holds the whole model, as the rollout engine asks for it."""

    device: torch.device
    mesh: None = None


@dataclass(frozen=True, slots=True)
class _Whole:
    """The part of a policy that generating needs."""

    model: Any
    world: _World


class LocalAsker:
    """Generates judgements. Seeds depend on what is asked alone, never on the job's generators, so
    that a judge disturbs neither the policy's sampling nor an exact resume."""

    def __init__(self, name: str, judge: JudgeReward, weights: str) -> None:
        self._name, self._judge, self._weights = name, judge, weights
        self._device = chosen_device("auto")
        self._tokenizer: Any = None
        self._rollout: HfRollout | None = None
        self._positions = math.inf
        self._tokens = 0

    def prepare(self) -> str | None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        revision = self._judge.revision
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._weights, revision=revision)
            model, info = AutoModelForCausalLM.from_pretrained(
                self._weights, revision=revision, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise RewardConfigError(f"reward {self._name!r}: {error}") from error
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise RewardConfigError(
                f"reward {self._name!r}: {self._judge.source} cannot write, it has no weights for "
                f"{missing}; a classifier goes under `model`"
            )
        if self._tokenizer.chat_template is None:
            raise RewardConfigError(
                f"reward {self._name!r}: the judge's tokenizer has no chat template"
            )
        stops = model.generation_config.eos_token_id
        stop_ids = frozenset([stops] if isinstance(stops, int) else stops or [])
        whole = _Whole(model.to(self._device).eval(), _World(self._device))
        self._rollout = HfRollout(
            cast(Policy, whole),
            stop_ids=stop_ids | {self._tokenizer.eos_token_id},
            batch_size=_BATCH,
            dtype=dtype,
        )
        self._positions = positions_of(model)
        return self._judge.source

    def ask(
        self, conversations: Sequence[Conversation], timeout_seconds: float
    ) -> list[list[Judgement] | Failure]:
        """In batches, and no further batch once the deadline has passed."""
        deadline = time.monotonic() + timeout_seconds
        self._tokens = 0
        answers: dict[int, list[Judgement] | Failure] = {}
        prompts: dict[int, list[int]] = {}
        for index, conversation in enumerate(conversations):
            encoded = self._encoded(conversation)
            if isinstance(encoded, Failure):
                answers[index] = encoded
            else:
                prompts[index] = encoded
        size = max(1, _BATCH // self._judge.choices)
        left = list(prompts)
        for batch in (left[at : at + size] for at in range(0, len(left), size)):
            if time.monotonic() > deadline:
                late = Failure(FailureKind.TIMEOUT, f"not within {timeout_seconds:g} s")
                answers |= dict.fromkeys(batch, late)
                continue
            asked = [conversations[index] for index in batch]
            said = self._generate(asked, [prompts[index] for index in batch])
            answers |= zip(batch, said, strict=True)
        return [answers[index] for index in range(len(conversations))]

    def _encoded(self, conversation: Conversation) -> list[int] | Failure:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tokenize=False,
                add_generation_prompt=True,
            )
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # noqa: BLE001 - tokenizers tell in many ways what is no text
            return Failure(FailureKind.EXCEPTION, f"{type(error).__name__}: {error}")
        if len(ids) + self._judge.max_tokens > self._positions:
            detail = (
                f"{len(ids)} tokens and max_tokens, the judge has {self._positions:.0f} positions"
            )
            return Failure(FailureKind.TOO_LONG, detail)
        return ids

    def _generate(
        self, batch: Sequence[Conversation], prompts: Sequence[list[int]]
    ) -> list[list[Judgement]]:
        assert self._rollout is not None
        choices = self._judge.choices
        repeated = [ids for ids in prompts for _ in range(choices)]
        seeds = [seed_of(one, choice) for one in batch for choice in range(choices)]
        sampling = Sampling(self._judge.temperature, self._judge.max_tokens)
        found = self._rollout.generate(repeated, seeds, sampling)
        self._tokens += sum(len(one.ids) for one in found)
        texts = self._tokenizer.batch_decode(
            [list(one.ids) for one in found], skip_special_tokens=True
        )
        said = [Judgement(text, one.finished) for text, one in zip(texts, found, strict=True)]
        return [said[at : at + choices] for at in range(0, len(said), choices)]

    def metrics(self) -> dict[str, float]:
        return {"judge_tokens": float(self._tokens)}

    def close(self) -> None:
        self._rollout = None
