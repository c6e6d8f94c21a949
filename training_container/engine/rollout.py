"""Sampling answers. One protocol; here the Hugging Face engine, in `rollout_vllm` the other.

Every answer has its own seed, a pure function of (seed, step, prompt, sample): what is drawn does
not depend on which other answers are generated with it.

Shapes: B answers under way, P distinct prompts, L prompt tokens, T new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from training_container.engine.loading import cast_weights
from training_container.engine.policy import Policy

__all__ = ["Completion", "HfRollout", "RolloutEngine", "Sampling", "draw", "uniforms"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer; its end-of-sequence token is part of it."""

    ids: tuple[int, ...]
    finished: bool
    """False: cut off at `max_tokens`."""


class RolloutEngine(Protocol):
    """Generates with the weights of the last `sync`. Each rank has its own."""

    version: int
    """Step whose weights the engine holds; -1 before the first sync."""

    def sync(self, policy: Policy, version: int) -> None:
        """Take over the policy's weights. Called by every rank at the same time."""

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One answer per prompt, in order."""

    def close(self) -> None:
        """Free devices and processes."""


class HfRollout:
    """Generates with a transformers model in this process: the policy's own where it is whole, a
    copy where the policy is sharded (then ranks need not take equally many steps)."""

    def __init__(
        self, policy: Policy, *, stop_ids: frozenset[int], batch_size: int, dtype: torch.dtype
    ) -> None:
        self.version = -1
        self._shared = policy.world.mesh is None
        self._dtype = dtype
        self._device = policy.world.device
        self._stop_ids = torch.tensor(sorted(stop_ids), device=self._device)
        self._batch_size = batch_size
        self.model: PreTrainedModel = policy.model if self._shared else self._empty_copy(policy)

    def _empty_copy(self, policy: Policy) -> PreTrainedModel:
        config = copy.deepcopy(policy.model.config)
        return cast_weights(type(policy.model)(config), self._dtype).to(self._device).eval()

    def sync(self, policy: Policy, version: int) -> None:
        if not self._shared:
            targets = self.model.state_dict()
            for name, weight in policy.full_weights():
                targets[name].copy_(weight)
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        self.model.eval()
        # Prompts of like length together: little padding, and none at all where they are equal.
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        found: dict[int, Completion] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            answers = self._generate_batch(
                [tuple(prompts[i]) for i in chosen], [seeds[i] for i in chosen], sampling
            )
            found.update(zip(chosen, answers, strict=True))
        return [found[index] for index in range(len(prompts))]

    @torch.no_grad()
    def _generate_batch(
        self, prompts: list[tuple[int, ...]], seeds: list[int], sampling: Sampling
    ) -> list[Completion]:
        device, count, limit = self._device, len(prompts), sampling.max_tokens
        distinct = list(dict.fromkeys(prompts))
        place = {prompt: index for index, prompt in enumerate(distinct)}
        ids_P_L, mask_P_L = _left_pad(distinct, device)
        padded = not bool(mask_P_L.all())
        expand_B = torch.tensor([place[prompt] for prompt in prompts], device=device)
        mask_B_LT = torch.cat([mask_P_L[expand_B], mask_P_L.new_ones(count, limit)], dim=1)
        position_B = mask_P_L.sum(dim=1)[expand_B]
        noise_B_T = uniforms(seeds, limit).to(device) if sampling.temperature else None

        cache = DynamicCache(config=self.model.config)
        output = self._forward(ids_P_L, mask_P_L if padded else None, _positions(mask_P_L), cache)
        cache.batch_select_indices(expand_B)  # answers to one prompt share its prefill
        logits_B_V = output[expand_B]

        tokens_B_T = torch.zeros(count, limit, dtype=torch.long, device=device)
        lengths_B = torch.full((count,), limit, device=device)
        finished_B = torch.zeros(count, dtype=torch.bool, device=device)
        rows = torch.arange(count, device=device)  # rows of the batch that are still computed
        for step in range(limit):
            noise_B = None if noise_B_T is None else noise_B_T[rows, step]
            token_B = draw(logits_B_V, noise_B, sampling)
            tokens_B_T[rows, step] = token_B
            ended_B = torch.isin(token_B, self._stop_ids) & ~finished_B[rows]
            lengths_B[rows[ended_B]] = step + 1
            finished_B[rows[ended_B]] = True
            going_B = ~finished_B[rows]
            left = int(going_B.sum())
            if left == 0 or step + 1 == limit:
                break
            if left <= 0.75 * len(rows):  # copying the cache pays once enough rows are done
                keep = going_B.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                rows, token_B = rows[keep], token_B[keep]
            width = ids_P_L.shape[1] + step + 1
            logits_B_V = self._forward(
                token_B.unsqueeze(1),
                mask_B_LT[rows, :width] if padded else None,
                (position_B[rows] + step).unsqueeze(1),
                cache,
            )
        tokens, lengths, finished = tokens_B_T.tolist(), lengths_B.tolist(), finished_B.tolist()
        return [
            Completion(tuple(row[:length]), done)
            for row, length, done in zip(tokens, lengths, finished, strict=True)
        ]

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits of the next token, B x V float32."""
        with torch.autocast(
            self._device.type, self._dtype, enabled=self._shared and self._dtype != torch.float32
        ):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].float()

    def close(self) -> None:
        del self.model


def draw(logits_B_V: Tensor, noise_B: Tensor | None, sampling: Sampling) -> Tensor:
    """The next token of each row: the arg max without noise, else the inverse of the cumulative
    distribution at ``noise_B`` (uniform on [0, 1)): one random number per token, whatever V is."""
    if noise_B is None:
        return logits_B_V.argmax(dim=-1)
    logits_B_V = logits_B_V / sampling.temperature
    order_B_V = None
    if sampling.top_k or sampling.top_p < 1.0:
        logits_B_V, order_B_V = logits_B_V.sort(dim=-1, descending=True, stable=True)
        if sampling.top_k:
            logits_B_V = logits_B_V[:, : sampling.top_k]
    probabilities_B_V = logits_B_V.softmax(dim=-1)
    # float32 sums over a large vocabulary would shift the tail.
    cumulative_B_V = probabilities_B_V.cumsum(dim=-1, dtype=torch.float64)
    if sampling.top_p < 1.0:
        # Keep a token while the mass before it is below top_p; the first always stays.
        before_B_V = cumulative_B_V - probabilities_B_V
        kept_B = (before_B_V < sampling.top_p).sum(dim=-1, keepdim=True)
        limit_B = cumulative_B_V.gather(1, kept_B - 1)
        cumulative_B_V = cumulative_B_V.minimum(limit_B)
    target_B_1 = noise_B.unsqueeze(1) * cumulative_B_V[:, -1:]
    token_B_1 = torch.searchsorted(cumulative_B_V, target_B_1, right=True)
    # Rounding may carry the target to the end of the sum: take the last token of any mass.
    last_B_1 = torch.searchsorted(cumulative_B_V, cumulative_B_V[:, -1:].contiguous())
    token_B_1 = token_B_1.minimum(last_B_1)
    return (token_B_1 if order_B_V is None else order_B_V.gather(1, token_B_1)).squeeze(1)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """``count`` numbers on [0, 1) for each seed, float64: row i depends on seeds[i] alone."""
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    for row, seed in zip(rows, seeds, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return rows


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _positions(mask_P_L: Tensor) -> Tensor:
    return (mask_P_L.cumsum(dim=1) - 1).clamp(min=0)
