"""Our mathematics against TRL's own trainers, called on the same tensors: values and gradients.

One GRPOTrainer is built around a two-layer model. Its log-probs, entropies and rewards are replaced
by drawn tensors, so that everything between them and the loss is TRL's code as shipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training_container.engine import algorithms

trl = pytest.importorskip("trl", reason="the live oracle is a development dependency")
pytestmark = pytest.mark.skipif(not trl.__version__.startswith("1.16."), reason="TRL 1.16 only")
torch.set_num_threads(1)

GROUP, PROMPTS, LENGTH = 4, 2, 6
ROWS = GROUP * PROMPTS


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(trl.GRPOTrainer, trl.GRPOConfig, tmp_path_factory.mktemp("grpo"), beta=0.04)


@pytest.fixture(scope="module")
def rloo_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(trl.RLOOTrainer, trl.RLOOConfig, tmp_path_factory.mktemp("rloo"), beta=0.0)


def build(trainer_class: Any, config_class: Any, folder: Path, *, beta: float) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": 3 + i for i in range(13)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    arguments = config_class(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        beta=beta,
        reward_weights=[0.5, 2.0],
    )

    def first(completions: list, **_: Any) -> list[float]:
        return [0.0] * len(completions)

    def second(completions: list, **_: Any) -> list[float]:
        return [0.0] * len(completions)

    return trainer_class(
        model=str(folder / "model"),
        processing_class=tokenizer,
        args=arguments,
        reward_funcs=[first, second],
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 4}),
    )


class Batch:
    """A drawn mini-batch of ragged completions; the last one is masked out as truncated."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.new = (-normal(ROWS, LENGTH).abs() - 0.05).requires_grad_()
        self.old = (self.new + 0.5 * normal(ROWS, LENGTH)).detach()
        self.ref = (self.new + 0.5 * normal(ROWS, LENGTH)).detach()
        self.entropy = normal(ROWS, LENGTH).abs().requires_grad_()
        self.adv = normal(ROWS)
        lengths = torch.tensor([6, 1, 3, 5, 2, 6, 4, 0])
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()


def trl_loss(trainer: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What TRL's `_compute_loss` makes of a batch."""
    outputs = (batch.new, batch.entropy, None)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: outputs)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": batch.mask,
            "advantages": batch.adv,
            "old_per_token_logps": batch.old,
            "ref_per_token_logps": batch.ref,
            "num_items_in_batch": batch.mask.sum(),
        },
    )


def our_loss(
    batch: Batch, name: str, aggregation: str, *, beta: float = 0, entropy: float = 0, **clips: Any
) -> Tensor:
    loss_B_T, _ = algorithms.policy_loss(name, batch.new, batch.old, batch.adv, batch.mask, **clips)
    kl_B_T = algorithms.kl_per_token("k3", batch.new, batch.ref, batch.mask)
    tokens = batch.mask.sum()
    loss = algorithms.aggregate(
        loss_B_T + beta * kl_B_T,
        batch.mask,
        aggregation,
        total_tokens=tokens,
        total_sequences=ROWS,
        max_length=LENGTH,
    )
    return loss + algorithms.entropy_bonus(
        batch.entropy, batch.mask, coefficient=entropy, total_tokens=tokens
    )


# TRL's loss_type, its level of importance sampling, our loss, our aggregation
PAIRS = [
    ("grpo", "token", "ppo_clip", "sequence_mean_token_mean"),
    ("bnpo", "token", "ppo_clip", "token_mean"),
    ("dapo", "token", "ppo_clip", "token_mean"),
    ("dr_grpo", "token", "ppo_clip", "sequence_mean_token_sum_norm"),
    ("grpo", "sequence", "gspo", "sequence_mean_token_mean"),
    ("dapo", "sequence", "gspo", "token_mean"),
    ("luspo", "sequence", "gspo", "sequence_mean_token_sum"),
    ("cispo", "token", "cispo", "token_mean"),
    ("sapo", "token", "sapo", "sequence_mean_token_mean"),
]


@pytest.fixture
def steady(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The trainer in the middle of a step of one micro-batch; metrics it keeps are not compared."""
    trainer.model.train()
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    return trainer


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("loss_type", "level", "name", "aggregation"), PAIRS)
def test_loss_and_gradient_equal_trl(
    *,
    steady: Any,
    monkeypatch: pytest.MonkeyPatch,
    loss_type: str,
    level: str,
    name: str,
    aggregation: str,
    beta: float,
    seed: int,
) -> None:
    batch = Batch(seed)
    low, high = (0.1, 0.28) if name != "cispo" else (1.0, 0.3)
    monkeypatch.setattr(steady, "loss_type", loss_type)
    monkeypatch.setattr(steady, "importance_sampling_level", level)
    monkeypatch.setattr(steady, "beta", beta)
    monkeypatch.setattr(steady, "epsilon_low", low)
    monkeypatch.setattr(steady, "epsilon_high", 1 + high if name == "cispo" else high)
    # By default TRL weights the KL by the ratio; ours is the plain estimator, as in verl.
    monkeypatch.setattr(steady.args, "use_bias_correction_kl", False)
    monkeypatch.setattr(steady.args, "delta", 1.6 if name == "ppo_clip" else None)

    theirs = trl_loss(steady, batch, monkeypatch)
    ours = our_loss(
        batch, name, aggregation, beta=beta, clip_low=low, clip_high=high, clip_dual=1.6
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-9)
    (want,) = torch.autograd.grad(theirs, batch.new)
    (got,) = torch.autograd.grad(ours, batch.new)
    assert want.abs().max() > 0
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)


def test_entropy_bonus_and_its_gradient_equal_trl(
    steady: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(2)
    monkeypatch.setattr(steady, "loss_type", "dapo")
    monkeypatch.setattr(steady, "beta", 0.0)
    monkeypatch.setattr(steady, "entropy_coef", 0.1)
    monkeypatch.setattr(steady, "_entropy_bonus_enabled", True)
    theirs = trl_loss(steady, batch, monkeypatch)
    ours = our_loss(batch, "ppo_clip", "token_mean", entropy=0.1, clip_dual=None)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    (want,) = torch.autograd.grad(theirs, batch.entropy)
    (got,) = torch.autograd.grad(ours, batch.entropy)
    torch.testing.assert_close(got, want)


def drawn_scores(seed: int) -> Tensor:
    """Scores of two sources, some missing, some rows without any, with seed 1 a whole group."""
    generator = torch.Generator().manual_seed(seed)
    scores_B_K = torch.rand(ROWS, 2, generator=generator).mul(4).round().div(4)
    missing = torch.rand(ROWS, 2, generator=generator) < 0.3
    scores_B_K = scores_B_K.masked_fill(missing, torch.nan)
    if seed == 1:
        scores_B_K[:GROUP] = torch.nan
    return scores_B_K


def trl_advantages(trainer: Any, scores_B_K: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What TRL makes of given scores, the completions being whatever the tiny model says."""
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *_: scores_B_K.clone())
    prompts = [{"prompt": text} for text in ("w1 w2", "w3") for _ in range(GROUP)]
    return trainer._generate_and_score_completions(prompts)["advantages"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fusion", "name", "scale"),
    [
        ("sum_then_normalize", "grpo", "group"),
        ("sum_then_normalize", "grpo", "batch"),
        ("sum_then_normalize", "grpo", "none"),
        ("normalize_then_sum", "gdpo", "batch"),
    ],
)
def test_advantages_equal_trl(
    *,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    fusion: str,
    name: str,
    scale: str,
    seed: int,
) -> None:
    scores_B_K = drawn_scores(seed)
    monkeypatch.setattr(trainer, "beta", 0.0)
    monkeypatch.setattr(trainer, "scale_rewards", scale)
    monkeypatch.setattr(trainer, "multi_objective_aggregation", fusion)
    theirs = trl_advantages(trainer, scores_B_K, monkeypatch)
    ours = algorithms.advantages(name, fused(scores_B_K, fusion), GROUP, scale=scale)
    assert ours.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", ["none", "batch"])
def test_rloo_advantages_equal_trl(
    rloo_trainer: Any, monkeypatch: pytest.MonkeyPatch, scale: str, seed: int
) -> None:
    scores_B_K = drawn_scores(seed)
    monkeypatch.setattr(rloo_trainer, "normalize_advantages", scale == "batch")
    theirs = trl_advantages(rloo_trainer, scores_B_K, monkeypatch)
    ours = algorithms.advantages(
        "rloo", fused(scores_B_K, "sum_then_normalize"), GROUP, scale=scale
    )
    assert ours.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def fused(scores_B_K: Tensor, mode: str) -> Tensor:
    return algorithms.fuse_rewards(
        scores_B_K, torch.tensor([0.5, 2.0]), mode=mode, group_size=GROUP
    )
