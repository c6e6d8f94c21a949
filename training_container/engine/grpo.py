"""The GRPO step: sample, score, compare within groups, update by clipped steps, hand over weights.

Shapes as in `algorithms`: N prompts, G answers each, B = N * G, T response tokens, K sources.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from contracts.metrics import NOT_COMPUTED
from contracts.stages import GrpoStage
from training_container.engine.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    advantages,
    fuse_rewards,
    groups_with_signal,
    kl_controller,
    kl_per_token,
    overlong_penalty,
    subtract_kl,
    zero_variance_groups,
)
from training_container.engine.batches import TokenSequence
from training_container.engine.clock import PhaseClock
from training_container.engine.data import DataOrder
from training_container.engine.distributed import World
from training_container.engine.experience import Experience, Scorer, sample_answers
from training_container.engine.grpo_loss import GrpoLoss, MiniBatch
from training_container.engine.loop import Metrics
from training_container.engine.policy import Policy
from training_container.engine.prompts import Prompt
from training_container.engine.reference import Reference
from training_container.engine.rollout import RolloutEngine, Sampling
from training_container.engine.schedule import Plan, learning_rate
from training_container.engine.seeds import derive_seed
from training_container.engine.state import Progress
from training_container.metrics import write_samples

__all__ = ["Grpo"]

log = logging.getLogger(__name__)


@dataclass
class Grpo:
    """A GRPO stage. See `loop.Method`."""

    stage: GrpoStage
    world: World
    policy: Policy
    reference: Reference | None
    rollout: RolloutEngine
    scorer: Scorer
    source_names: tuple[str, ...]
    weights_K: Tensor
    prompts: Sequence[Prompt]
    validation_prompts: Sequence[Prompt]
    plan: Plan
    progress: Progress
    output: Path
    order: DataOrder = field(init=False)
    controller: FixedKLController | AdaptiveKLController | None = field(init=False)

    def __post_init__(self) -> None:
        stage, kl = self.stage, self.stage.grpo.kl
        self.order = DataOrder(len(self.prompts), seed=stage.seed, shuffle=stage.data.shuffle)
        self.controller = None
        if kl is not None:
            self.controller = kl_controller(
                kl.control, kl.coefficient, target=kl.target, horizon=kl.horizon
            )
        limits = stage.rollout
        self.sampling = Sampling(
            limits.temperature, limits.max_response_length, limits.top_p, limits.top_k
        )

    def begin(self, step: int) -> None:
        if self.controller is not None and self.progress.kl_control:
            self.controller.load_state_dict(self.progress.kl_control)
        self.rollout.sync(self.policy, step)

    def step(self, step: int, clock: PhaseClock) -> Metrics:
        experience, metrics = self._collect(step, clock)
        if self.world.is_leader and self.stage.rollout.log_samples:
            self._log_samples(step, experience)
        metrics |= self._train(step, experience, clock)
        with clock.phase("sync"):
            self.rollout.sync(self.policy, step)
        return metrics

    # --- sampling -------------------------------------------------------------------------------

    def _collect(self, step: int, clock: PhaseClock) -> tuple[Experience, Metrics]:
        """The step's groups. With dynamic sampling, groups without signal are replaced, at most
        `max_refills` times; metrics describe everything sampled, not only what was kept."""
        settings = self.stage.grpo
        wanted, dynamic = settings.prompts_per_step, settings.dynamic_sampling
        drawn = kept = self._sample(step, wanted, clock, metrics := {})
        refills = 0
        if dynamic is not None:
            kept = drawn.keep(self._signal(drawn), settings.group_size)
            while len(kept.prompts) < wanted and refills < dynamic.max_refills:
                refills += 1
                more = self._sample(step, wanted - len(kept.prompts), clock, metrics)
                drawn = drawn.extend(more)
                kept = kept.extend(more.keep(self._signal(more), settings.group_size))
            metrics["sampling/refills"] = float(refills)
            metrics["sampling/kept_fraction"] = len(kept.prompts) / len(drawn.prompts)
        return kept, metrics | self._reward_metrics(drawn)

    def _sample(self, step: int, count: int, clock: PhaseClock, metrics: Metrics) -> Experience:
        position, group = self.progress.position, self.stage.grpo.group_size
        rows = self.order.take(position, count)
        self.progress.position += count
        prompts = [self.prompts[row] for row in rows]
        seeds = [
            [derive_seed(self.stage.seed, "answer", step, position + n, g) for g in range(group)]
            for n in range(count)
        ]
        with clock.phase("rollout"):
            completions = sample_answers(self.rollout, self.world, prompts, seeds, self.sampling)
        with clock.phase("rewards"):
            repeated = [prompt for prompt in prompts for _ in range(group)]
            scored = self.scorer.score(repeated, completions, step=step, phase="train")
        # The plane's own numbers are of the newest round; sums over rounds follow in
        # `_reward_metrics`.
        metrics.update(scored.metrics)
        return Experience(prompts, completions, scored.scores_B_K)

    def _signal(self, experience: Experience) -> Tensor:
        """Groups worth training on, keep_N."""
        settings, dynamic = self.stage.grpo, self.stage.grpo.dynamic_sampling
        assert dynamic is not None
        group = settings.group_size
        keep_N = groups_with_signal(self._fused(experience), group)
        mean_N = self._weighted(experience).view(-1, group).nanmean(dim=1)
        if dynamic.low is not None:
            keep_N &= mean_N > dynamic.low
        if dynamic.high is not None:
            keep_N &= mean_N < dynamic.high
        return keep_N

    def _weighted(self, experience: Experience) -> Tensor:
        return fuse_rewards(
            experience.scores_B_K,
            self.weights_K,
            mode="sum_then_normalize",
            group_size=self.stage.grpo.group_size,
        )

    def _fused(self, experience: Experience) -> Tensor:
        """Reward of each answer as the advantage wants it, with length shaping."""
        settings = self.stage.grpo
        gdpo = settings.advantage == "gdpo"
        rewards_B = fuse_rewards(
            experience.scores_B_K,
            self.weights_K,
            mode="normalize_then_sum" if gdpo else settings.reward_fusion,
            group_size=settings.group_size,
        )
        if settings.overlong is not None:
            lengths_B = torch.tensor([len(c.ids) for c in experience.completions])
            rewards_B = rewards_B + overlong_penalty(
                lengths_B,
                max_length=self.stage.rollout.max_response_length,
                buffer=settings.overlong.buffer,
                penalty=settings.overlong.penalty,
            )
        return rewards_B

    def _reward_metrics(self, experience: Experience) -> Metrics:
        rewards_B = self._weighted(experience)
        known_B = rewards_B[~rewards_B.isnan()]
        zero_N = zero_variance_groups(self._fused(experience), self.stage.grpo.group_size)
        lengths = [len(completion.ids) for completion in experience.completions]
        cut = [not completion.finished for completion in experience.completions]
        metrics: Metrics = {
            "reward": known_B.mean().item() if len(known_B) else None,
            "reward_std": known_B.std().item() if len(known_B) > 1 else None,
            "advantage/zero_variance_fraction": zero_N.double().mean().item(),
            "length/response_mean": sum(lengths) / len(lengths),
            "length/truncated_fraction": sum(cut) / len(cut),
        }
        for column, name in enumerate(self.source_names):
            scores_B = experience.scores_B_K[:, column]
            mean = scores_B.nanmean().item()
            metrics[f"reward/{name}"] = None if math.isnan(mean) else mean
        counters = self.progress.counters
        counters["samples"] = counters.get("samples", 0) + len(lengths)
        counters["tokens"] = counters.get("tokens", 0) + sum(lengths)
        metrics["total/samples"], metrics["total/tokens"] = counters["samples"], counters["tokens"]
        return metrics

    def _log_samples(self, step: int, experience: Experience) -> None:
        count = min(self.stage.rollout.log_samples, len(experience.completions))
        group = self.stage.grpo.group_size
        completions = experience.completions[:count]
        rewards_B = self._weighted(experience)[:count]
        columns: dict[str, Sequence[object]] = {
            "step": [step] * count,
            "prompt": [
                experience.prompts[i // group].messages[-1]["content"] for i in range(count)
            ],
            "completion": self.scorer.texts(completions),
            "reward": rewards_B.tolist(),
            "response_length": [len(completion.ids) for completion in completions],
            "truncated": [not completion.finished for completion in completions],
        }
        for column, name in enumerate(self.source_names):
            columns[f"reward/{name}"] = experience.scores_B_K[:count, column].tolist()
        write_samples(self.output / "rollouts", step, columns)

    # --- update ---------------------------------------------------------------------------------

    def _train(self, step: int, experience: Experience, clock: PhaseClock) -> Metrics:
        """Update the policy on the step's groups; metrics of the update."""
        settings = self.stage.grpo
        rate = learning_rate(self.stage.optimizer, step, self.plan.steps)
        if not experience.prompts:
            log.warning("step %d: no group has a signal to train on; no update", step)
            return {"learning_rate": rate, "loss": None, "grad_norm": None}
        batches = self._mini_batches(experience)
        updates = settings.epochs_per_batch * len(batches)
        kl_in_reward = settings.kl is not None and settings.kl.placement == "reward"
        with clock.phase("log_probs"):
            for batch in batches:
                if updates > 1 or kl_in_reward:
                    batch.old = self.policy.log_probs(
                        batch.sequences, temperature=self.sampling.temperature
                    )
                if self.reference is not None:
                    batch.reference = self.reference.log_probs(
                        batch.sequences, temperature=self.sampling.temperature
                    )
        self._assign_advantages(step, experience, batches, clock)
        sums: dict[str, float] = {}
        norms: list[float] = []
        with clock.phase("update"):
            for _ in range(settings.epochs_per_batch):
                for batch in batches:
                    self._accumulate(batch, sums)
                    norms.append(self.policy.update(rate, self.stage.optimizer.max_grad_norm))
        return self._update_metrics(self.world.total(sums), norms, rate, experience, clock)

    def _mini_batches(self, experience: Experience) -> list[MiniBatch]:
        group = self.stage.grpo.group_size
        size = (self.stage.grpo.mini_batch_prompts or len(experience.prompts)) * group
        sequences = [
            TokenSequence.of(experience.prompts[i // group].ids, completion.ids)
            for i, completion in enumerate(experience.completions)
        ]
        finished_B = torch.tensor([completion.finished for completion in experience.completions])
        return [
            MiniBatch(
                sequences[start : start + size],
                torch.zeros(len(sequences[start : start + size])),
                finished_B[start : start + size],
            )
            for start in range(0, len(sequences), size)
        ]

    def _assign_advantages(
        self, step: int, experience: Experience, batches: list[MiniBatch], clock: PhaseClock
    ) -> None:
        settings, kl = self.stage.grpo, self.stage.grpo.kl
        rewards_B = self._fused(experience)
        if kl is not None and kl.placement == "reward":
            assert self.controller is not None
            kl_B_1 = self._sequence_kl(batches).unsqueeze(1)
            rewards_B = subtract_kl(
                rewards_B, kl_B_1, torch.ones_like(kl_B_1), self.controller.coefficient
            )
        adv_B = advantages(
            settings.advantage,
            rewards_B,
            settings.group_size,
            scale=settings.scale_rewards,
            greedy_rewards_N=(
                self._greedy_rewards(step, experience, clock)
                if settings.advantage == "remax"
                else None
            ),
        )
        start = 0
        for batch in batches:
            batch.adv_B = adv_B[start : start + len(batch.sequences)]
            start += len(batch.sequences)

    def _greedy_rewards(self, step: int, experience: Experience, clock: PhaseClock) -> Tensor:
        """ReMax's baseline: the reward of each prompt's greedy answer. Scored as validation, so
        that it does not count in the failure ceilings of training samples."""
        greedy = Sampling(0.0, self.sampling.max_tokens)
        prompts = experience.prompts
        with clock.phase("rollout"):
            completions = sample_answers(
                self.rollout, self.world, prompts, [[0]] * len(prompts), greedy
            )
        with clock.phase("rewards"):
            scored = self.scorer.score(prompts, completions, step=step, phase="validation")
        return fuse_rewards(
            scored.scores_B_K, self.weights_K, mode="sum_then_normalize", group_size=1
        )

    def _sequence_kl(self, batches: list[MiniBatch]) -> Tensor:
        """Sum over tokens of each answer's KL estimate, all ranks', B float64."""
        kl = self.stage.grpo.kl
        assert kl is not None
        parts = []
        for batch in batches:
            assert batch.old is not None
            assert batch.reference is not None
            kl_B = torch.zeros(len(batch.sequences), dtype=torch.float64)
            for index, old_T in batch.old.items():
                reference_T = batch.reference[index]
                every = torch.ones(1, len(old_T))
                kl_B[index] = kl_per_token(
                    kl.estimator, old_T[None], reference_T[None], every
                ).sum()
            parts.append(kl_B)
        return self.world.total_tensor(torch.cat(parts))

    def _accumulate(self, batch: MiniBatch, sums: dict[str, float]) -> None:
        """Add the mini-batch's gradients, and this rank's sums for metrics."""
        settings = self.stage.grpo
        loss = GrpoLoss(
            settings,
            batch,
            kl_coefficient=self.controller.coefficient if self.controller else 0.0,
            max_length=self.sampling.max_tokens,
            sums=sums,
        )
        part = self.policy.backward(
            batch.sequences,
            loss,
            temperature=self.sampling.temperature,
            entropy_gradient=settings.entropy_coefficient > 0,
            silent=loss.silent(),
        )
        loss.add("loss", part)

    def _update_metrics(
        self,
        sums: dict[str, float],
        norms: list[float],
        rate: float,
        experience: Experience,
        clock: PhaseClock,
    ) -> Metrics:
        tokens = max(sums["tokens"], 1.0)
        kl = self.stage.grpo.kl
        metrics: Metrics = {
            "loss": sums["loss"] / len(norms),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "entropy": sums["entropy"] / tokens,
            "clip/low_fraction": sums["clipped_low"] / tokens,
            "clip/high_fraction": sums["clipped_high"] / tokens,
            "clip/dual_fraction": sums["clipped_dual"] / tokens,
            "ratio/mean": sums["ratio"] / tokens,
            "kl/k1": NOT_COMPUTED if self.reference is None else sums["kl/k1"] / tokens,
            "kl/k3": NOT_COMPUTED if self.reference is None else sums["kl/k3"] / tokens,
            "updates": len(norms),
        }
        if kl is not None and self.controller is not None:
            metrics["kl/coefficient"] = self.controller.coefficient
            self.controller.update(sums[f"kl/{kl.estimator}"] / tokens, len(experience.completions))
            self.progress.kl_control = self.controller.state_dict()
        generated = sum(len(completion.ids) for completion in experience.completions)
        metrics["tokens_per_second"] = generated / clock.total
        return metrics

    # --- validation -----------------------------------------------------------------------------

    def validate(self, step: int) -> dict[str, float]:
        prompts = self.validation_prompts
        if not prompts:
            return {}
        temperature = self.stage.validation.temperature
        seeds = [[derive_seed(self.stage.seed, "validation", n)] for n in range(len(prompts))]
        sampling = Sampling(temperature, self.sampling.max_tokens)
        completions = sample_answers(self.rollout, self.world, prompts, seeds, sampling)
        scored = self.scorer.score(prompts, completions, step=step, phase="validation")
        rewards_B = fuse_rewards(
            scored.scores_B_K, self.weights_K, mode="sum_then_normalize", group_size=1
        )
        lengths = [float(len(completion.ids)) for completion in completions]
        found = {
            "validation/reward": rewards_B.nanmean().item(),
            "validation/length/response_mean": sum(lengths) / len(lengths),
        }
        for column, name in enumerate(self.source_names):
            found[f"validation/reward/{name}"] = scored.scores_B_K[:, column].nanmean().item()
        return {name: value for name, value in found.items() if not math.isnan(value)}
