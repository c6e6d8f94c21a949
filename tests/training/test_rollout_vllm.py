"""The GRPO loop with vLLM on CPU: weights in the engine are the policy's, tied embeddings too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contracts.failures import ExitCode
from contracts.run_spec import parse_run_spec
from contracts.stages import GrpoStage, RolloutSpec
from tests.training import tiny
from training_container.engine.batches import TokenSequence
from training_container.engine.distributed import single_process
from training_container.engine.errors import WeightSyncError
from training_container.engine.policy import Policy
from training_container.engine.rollout import Sampling
from training_container.engine.rollout_vllm import VllmRollout, WeightsExtension
from training_container.failure import StageError
from training_container.trainer import run_stage

pytestmark = pytest.mark.vllm
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7]]


def policy_of(*, tied: bool, family: str = "qwen2") -> Policy:
    torch.set_num_threads(1)
    stage = GrpoStage.model_validate(tiny.grpo_stage(), strict=False)
    return Policy(tiny.model(tied=tied, family=family), stage, single_process())


def engine(policy: Policy, **settings: object) -> VllmRollout:
    return VllmRollout(
        policy,
        tiny.tokenizer(),
        RolloutSpec.model_validate({"max_response_length": 32, **settings}, strict=False),
        stop_ids=frozenset([tiny.EOS_ID]),
        max_prompt_length=64,
    )


@pytest.mark.parametrize(("tied", "family"), [(True, "qwen2"), (False, "qwen3")])
def test_the_engine_follows_the_policy_through_updates(tied: bool, family: str) -> None:
    """vLLM's reload keeps a tied output layer's old weights on CPU, and says nothing."""
    policy = policy_of(tied=tied, family=family)
    rollout = engine(policy)
    for version in range(3):
        rollout.sync(policy, version)
        assert rollout.version == version
        rollout._prove(policy)
        sequence = TokenSequence.of([5, 6], [7, 8, 9, 10])
        policy.backward([sequence], lambda _micro, logp, _entropy: -logp.sum())
        policy.update(5e-2, 1.0)
    with pytest.raises(WeightSyncError, match="not the policy"):
        rollout._prove(policy)  # the policy has moved on since the last sync
    rollout.close()


def test_answers_are_seeded_one_by_one_and_greedy_ones_are_the_models() -> None:
    policy = policy_of(tied=True)
    rollout = engine(policy)
    rollout.sync(policy, 0)
    first = rollout.generate(PROMPTS, [1, 2, 3], Sampling(1.0, 16))
    again = rollout.generate(PROMPTS[::-1], [3, 2, 1], Sampling(1.0, 16))[::-1]
    assert first == again
    assert first[0] != first[2]
    (greedy,) = rollout.generate([[5, 6, 7]], [0], Sampling(0.0, 8))
    ids = torch.tensor([[5, 6, 7]])
    expected = policy.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert list(greedy.ids) == expected[0, 3:].tolist()
    rollout.close()


def test_a_push_that_does_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tied=True)
    monkeypatch.setattr(WeightsExtension, "push_weights", lambda _self, _weights: None)
    rollout = engine(policy)
    with pytest.raises(WeightSyncError):
        rollout.sync(policy, 0)
    rollout.close()


def test_settings_that_vllm_refuses_are_not_tried_again() -> None:
    """The next attempt would pay for GPUs and fail alike."""
    policy = policy_of(tied=True)
    policy.model.config.max_position_embeddings = 40
    with pytest.raises(StageError, match="max_response_length = 96") as caught:
        engine(policy)
    assert caught.value.code is ExitCode.BAD_INPUT


def test_a_stage_trains_with_vllm(tmp_path: Path) -> None:
    base = tiny.warm_model(tmp_path / "warm", hidden=128)
    stage = tiny.grpo_stage(
        rollout={"engine": "vllm", "max_response_length": 72},
        rewards=[
            {
                "name": "short",
                "function": "length",
                "weight": 1.0,
                "parameters": {"maximum": 20, "slack": 20},
            }
        ],
        max_steps=2,
    )
    checkpointer = tiny.FolderCheckpointer()
    train, held_out = tiny.split_pairs()
    result = run_stage(
        parse_run_spec(tiny.run_document(stage)),
        0,
        tiny.inputs(tmp_path, tiny.grpo_rows(train), tiny.grpo_rows(held_out[:4]), base=base),
        world=single_process(),
        checkpointer=checkpointer,
        run_id="tiny-1",
        attempt=1,
        generation="g1",
    )
    assert result.completed
    assert checkpointer.rows[2]["grad_norm"] > 0
    assert abs(checkpointer.rows[1]["ratio/mean"] - 1) < 1e-6
