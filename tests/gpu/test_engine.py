"""The engine on real GPUs: sharded, bfloat16, sampled from, checkpointed.

Needs torch, transformers and pydantic only. With pytest (`-m gpu`) on one GPU, or on several, with
numbers printed:

    torchrun --nproc-per-node 2 -m tests.gpu.test_engine
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from contracts.stages import GrpoStage
from training_container.engine.algorithms import aggregate, policy_loss
from training_container.engine.batches import MicroBatch, TokenSequence
from training_container.engine.distributed import World, init_distributed
from training_container.engine.policy import Policy
from training_container.engine.rollout import HfRollout, Sampling
from training_container.engine.state import Progress, TrainState

pytestmark = pytest.mark.gpu
PROMPTS, GROUP, LENGTH = 8, 8, 128


def model(hidden: int = 1024, layers: int = 12) -> PreTrainedModel:
    """About 0.3G weights, random, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).float()


def stage(precision: str) -> GrpoStage:
    return GrpoStage.model_validate(
        {
            "name": "gpu",
            "method": "grpo",
            "data": {"train": "s3://bucket/train.jsonl"},
            "rewards": [{"name": "any", "function": "exact_match", "weight": 1.0}],
            "optimizer": {"learning_rate": 1e-4},
            "precision": precision,
            "gradient_checkpointing": True,
            "max_steps": 3,
        },
        strict=False,
    )


def step(policy: Policy, sequences: list[TokenSequence], adv_B: Tensor) -> float:
    """One clipped update; the gradient norm."""
    total = sum(int(sequence.target.sum()) for sequence in sequences)

    def loss(micro: MicroBatch, logp_B_T: Tensor, _: Tensor) -> Tensor:
        chosen_B = adv_B[list(micro.indices)] if micro.indices else torch.zeros(1)
        loss_B_T, _ = policy_loss(
            "ppo_clip",
            logp_B_T,
            logp_B_T.detach(),
            chosen_B.to(logp_B_T.device),
            micro.mask_B_T,
        )
        return aggregate(
            loss_B_T,
            micro.mask_B_T,
            "token_mean",
            total_tokens=total,
            total_sequences=len(sequences),
            max_length=LENGTH,
        )

    policy.backward(sequences, loss)
    return policy.update(1e-4, 1.0)


def check(world: World, folder: Path) -> dict[str, float]:
    """Everything, once; numbers for a report.

    Raises:
        AssertionError: where the GPU computes something else than it should.
    """
    plain = model().to(world.device)
    exact = Policy(model().to(world.device), stage("float32"), world)
    generator = torch.Generator().manual_seed(1)
    probe_ids = torch.randint(3, 32_000, (64,), generator=generator)
    probe = TokenSequence.of(probe_ids[:8].tolist(), probe_ids[8:].tolist())
    (found_T,) = exact.log_probs([probe] * world.size).values()
    with torch.no_grad():
        logits_L_V = plain(input_ids=probe.ids[None].to(world.device)).logits[0].float()
    expected_T = logits_L_V.log_softmax(-1)[:-1].gather(1, probe.ids[1:, None].to(world.device))
    difference = (found_T - expected_T[7:, 0].cpu()).abs().max().item()
    assert difference < 1e-3, f"sharded log-probs differ by {difference}"
    del plain, exact

    policy = Policy(model().to(world.device), stage("auto"), world)
    rollout = HfRollout(policy, stop_ids=frozenset([2]), batch_size=64, dtype=torch.bfloat16)
    rollout.sync(policy, 0)
    prompts = torch.randint(3, 32_000, (PROMPTS, 32), generator=generator).tolist()
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    started = time.perf_counter()
    answers = rollout.generate(asked, list(range(len(asked))), Sampling(1.0, LENGTH))
    rollout_seconds = time.perf_counter() - started
    # Every rank sampled the same prompts with the same seeds; the leader's answers are trained on.
    answers = world.lead(lambda: answers)
    sequences = [
        TokenSequence.of(prompt, answer.ids) for prompt, answer in zip(asked, answers, strict=True)
    ]
    adv_B = torch.randn(len(sequences), generator=generator)

    norms = [step(policy, sequences, adv_B)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    norms.append(step(policy, sequences, adv_B))
    torch.cuda.synchronize()
    update_seconds = time.perf_counter() - started

    state = TrainState(policy, Progress("data", "config", step=2))
    dcp.save({"app": state}, checkpoint_id=folder)
    expected = step(policy, sequences, adv_B)
    resumed = Policy(model().to(world.device), stage("auto"), world)
    dcp.load({"app": TrainState(resumed, Progress("data", "config"))}, checkpoint_id=folder)
    again = step(resumed, sequences, adv_B)
    assert again == pytest.approx(expected, rel=1e-5), "resume computes another gradient"

    generated = sum(len(answer.ids) for answer in answers)
    return {
        "ranks": world.size,
        "log_prob_difference": difference,
        "grad_norm": norms[0],
        "rollout_tokens_per_second": generated / rollout_seconds,
        "update_tokens_per_second": sum(len(s.ids) for s in sequences) / update_seconds,
        "resume_grad_norm_difference": abs(again - expected),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_engine_computes_on_a_gpu_what_it_computes_on_a_cpu(tmp_path: Path) -> None:
    """hiyouga/EasyR1#94: memory after a resume is that of a fresh run."""
    world = init_distributed()
    try:
        numbers = check(world, tmp_path / "checkpoint")
    finally:
        world.close()
    print(json.dumps(numbers))


if __name__ == "__main__":
    everyone = init_distributed()
    shared = everyone.lead(tempfile.mkdtemp)
    report = check(everyone, Path(shared) / "checkpoint")
    if everyone.is_leader:
        print(json.dumps(report, indent=1))
    everyone.close()
