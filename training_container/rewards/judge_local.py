"""A judge in the job: any causal language model, run by the rollout engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from contracts.rewards import JudgeReward
from training_container.engine.policy import Policy
from training_container.engine.rollout import HfRollout, Sampling
from training_container.rewards.interface import Failure, FailureKind, RewardConfigError
from training_container.rewards.judge import Conversation, seed_of
from training_container.rewards.model_source import chosen_device

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
        self._tokens = 0

    def prepare(self) -> None:
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

    def ask(
        self, conversations: Sequence[Conversation], timeout_seconds: float
    ) -> list[list[str] | Failure]:
        """In batches, and no further batch once the deadline has passed."""
        assert self._rollout is not None
        deadline = time.monotonic() + timeout_seconds
        sampling = Sampling(self._judge.temperature, self._judge.max_tokens)
        answers: list[list[str] | Failure] = []
        self._tokens = 0
        size = max(1, _BATCH // self._judge.choices)
        for start in range(0, len(conversations), size):
            batch = conversations[start : start + size]
            if time.monotonic() > deadline:
                late = Failure(FailureKind.TIMEOUT, f"not within {timeout_seconds:g} s")
                answers += [late] * len(batch)
                continue
            answers += self._generate(batch, sampling)
        return answers

    def _generate(self, batch: Sequence[Conversation], sampling: Sampling) -> list[list[str]]:
        assert self._rollout is not None
        choices = self._judge.choices
        prompts, seeds = [], []
        for conversation in batch:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tokenize=False,
                add_generation_prompt=True,
            )
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts += [ids] * choices
            seeds += [seed_of(conversation, choice) for choice in range(choices)]
        found = self._rollout.generate(prompts, seeds, sampling)
        self._tokens += sum(len(one.ids) for one in found)
        texts = self._tokenizer.batch_decode(
            [list(one.ids) for one in found], skip_special_tokens=True
        )
        return [texts[at : at + choices] for at in range(0, len(texts), choices)]

    def metrics(self) -> dict[str, float]:
        return {"judge_tokens": float(self._tokens)}

    def close(self) -> None:
        self._rollout = None
