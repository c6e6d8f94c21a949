"""Sampling answers and having them scored: the first half of a GRPO step.

Ranks sample their share of prompts; then every rank holds every answer (token ids are small), so
that group statistics, mini-batches and their cut over ranks need no further exchange. The leader
scores: one set of reward workers, one failure count, the same result on any number of ranks.

Shapes: N prompts, G answers per prompt, B = N * G answers (those of a prompt adjacent), K sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from contracts.failures import ExitCode
from training_container.engine.algorithms import scores_tensor
from training_container.engine.distributed import World
from training_container.engine.prompts import Prompt
from training_container.engine.rollout import Completion, RolloutEngine, Sampling
from training_container.failure import StageError
from training_container.rewards.interface import RewardError, RewardRequest, Sample
from training_container.rewards.plane import RewardPlane

__all__ = ["Experience", "Scored", "Scorer", "sample_answers"]


@dataclass(frozen=True)
class Scored:
    """Scores of a batch of answers."""

    scores_B_K: Tensor
    """float64, NaN where a source gave none."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Experience:
    """Scored answers of a step, N groups of G."""

    prompts: list[Prompt]
    completions: list[Completion]
    scores_B_K: Tensor

    def keep(self, keep_N: Tensor, group_size: int) -> Experience:
        """Only the groups where ``keep_N``."""
        groups = [index for index, kept in enumerate(keep_N.tolist()) if kept]
        rows = [group * group_size + g for group in groups for g in range(group_size)]
        return Experience(
            [self.prompts[group] for group in groups],
            [self.completions[row] for row in rows],
            self.scores_B_K[rows],
        )

    def first(self, groups: int, group_size: int) -> Experience:
        """The first ``groups`` groups."""
        keep_N = torch.arange(len(self.prompts)) < groups
        return self.keep(keep_N, group_size)

    def extend(self, other: Experience) -> Experience:
        """These groups and then the others."""
        return Experience(
            self.prompts + other.prompts,
            self.completions + other.completions,
            torch.cat([self.scores_B_K, other.scores_B_K]),
        )


def sample_answers(
    rollout: RolloutEngine,
    world: World,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[Completion]:
    """One answer per seed of each prompt, all ranks' on every rank, in order."""
    mine = world.share(len(prompts))
    asked = [prompts[i].ids for i in mine for _ in seeds[i]]
    drawn = [seed for i in mine for seed in seeds[i]]
    return world.gather(rollout.generate(asked, drawn, sampling))


class Scorer:
    """Decodes answers and asks the reward plane, on the leader."""

    def __init__(
        self,
        plane: RewardPlane | None,
        world: World,
        tokenizer: PreTrainedTokenizerBase,
        answer_column: str | None,
    ) -> None:
        self._plane = plane
        self._world = world
        self._tokenizer = tokenizer
        self._answer = answer_column

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """The answers without special tokens."""
        if not completions:
            return []  # batch_decode reads an empty list as one empty text
        return self._tokenizer.batch_decode(
            [list(completion.ids) for completion in completions], skip_special_tokens=True
        )

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int, phase: str
    ) -> Scored:
        """Scores of the answers; ``prompts`` are repeated as often as each has answers.

        Raises:
            StageError: REWARD on the leader, when a source's policy ends the run; with the same
                code on the other ranks.
        """

        def work() -> Scored:
            assert self._plane is not None
            samples = tuple(self._samples(prompts, completions))
            try:
                result = self._plane.score(RewardRequest(samples, step=step, phase=phase))
            except RewardError as error:
                raise StageError(ExitCode.REWARD, str(error)) from error
            return Scored(_scores(result.scores_B_K), result.metrics)

        return self._world.lead(work)

    def _samples(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[Sample]:
        return [
            Sample(
                completion=text,
                prompt=prompt.messages,
                response_length=len(completion.ids),
                truncated=not completion.finished,
                ground_truth=None if self._answer is None else prompt.row.get(self._answer),
                columns=prompt.row,
            )
            for prompt, completion, text in zip(
                prompts, completions, self.texts(completions), strict=True
            )
        ]


def _scores(rows: Sequence[Sequence[float]]) -> Tensor:
    return scores_tensor([[None if math.isnan(s) else s for s in row] for row in rows])
