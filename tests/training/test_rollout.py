"""Sampling with the Hugging Face engine."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from contracts.stages import GrpoStage
from tests.training import tiny
from training_container.engine.distributed import single_process
from training_container.engine.policy import Policy
from training_container.engine.rollout import HfRollout, Sampling, draw, uniforms
from training_container.engine.seeds import derive_seed

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [20, 21, 22, 23, 24], [8, 9]]
SEEDS = [derive_seed("test", n) for n in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    model = tiny.model(hidden=32)
    return Policy(
        model, GrpoStage.model_validate(tiny.grpo_stage(), strict=False), single_process()
    )


def engine(policy: Policy, stop_ids: frozenset[int], batch_size: int = 64) -> HfRollout:
    return HfRollout(policy, stop_ids=stop_ids, batch_size=batch_size, dtype=torch.float32)


STOPS = frozenset(range(100, 120))
"""Many tokens end an answer here, so that answers of a random model differ in length."""


def test_an_answer_does_not_depend_on_its_batch(policy: Policy) -> None:
    """Same seed, same answer: alone, in another order, in small batches, next to other prompts."""
    sampling = Sampling(1.0, 20)
    whole = engine(policy, STOPS).generate(PROMPTS, SEEDS, sampling)
    assert len({answer.ids for answer in whole}) == len(PROMPTS)
    assert {answer.finished for answer in whole} == {True, False}
    small = engine(policy, STOPS, batch_size=2).generate(PROMPTS, SEEDS, sampling)
    turned = engine(policy, STOPS).generate(PROMPTS[::-1], SEEDS[::-1], sampling)[::-1]
    alone = [
        engine(policy, STOPS).generate([prompt], [seed], sampling)[0]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert whole == small == turned == alone


def test_greedy_answers_are_those_of_transformers(policy: Policy) -> None:
    found = engine(policy, STOPS).generate(PROMPTS, SEEDS, Sampling(0.0, 12))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        config = GenerationConfig(
            do_sample=False, max_new_tokens=12, eos_token_id=sorted(STOPS), pad_token_id=0
        )
        expected = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        assert list(answer.ids) == expected[0, len(prompt) :].tolist()


def test_an_answer_ends_with_its_stop_token(policy: Policy) -> None:
    for answer in engine(policy, STOPS).generate(PROMPTS * 6, list(range(30)), Sampling(1.0, 20)):
        inside = [token for token in answer.ids if token in STOPS]
        assert answer.finished == bool(inside)
        assert not inside or (len(inside) == 1 and answer.ids[-1] == inside[0])
        assert answer.finished or len(answer.ids) == 20


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1.0, 1), [0, 1, 2, 3]),
        (Sampling(0.5, 1), [0, 1, 2, 3]),
        (Sampling(1.0, 1, top_k=2), [0, 1]),
        (Sampling(1.0, 1, top_p=0.8), [0, 1]),
        (Sampling(1.0, 1, top_p=0.6), [0]),
        (Sampling(1.0, 1, top_p=0.95, top_k=3), [0, 1, 2]),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling, allowed: list[int]) -> None:
    count = 20_000
    noise_B = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens_B = draw(LOGITS.expand(count, 4), noise_B, sampling)
    expected = (LOGITS[0] / sampling.temperature).softmax(-1)
    kept = torch.zeros(4)
    kept[allowed] = expected[allowed]
    kept /= kept.sum()
    frequencies = torch.bincount(tokens_B, minlength=4) / count
    torch.testing.assert_close(frequencies, kept, atol=2e-4, rtol=0)


def test_the_largest_random_number_never_draws_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    almost_one = torch.tensor([1.0 - 2**-53], dtype=torch.float64)
    assert draw(logits, almost_one, Sampling(1.0, 1)).item() == 1


def test_random_numbers_depend_on_the_seed_of_their_row_alone() -> None:
    rows = uniforms([3, 4, 3], 5)
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[1], uniforms([4], 5)[0])


def test_seeds_are_stable_and_distinct() -> None:
    assert derive_seed(1, "answer", 2, 3, 4) == 8300586871530289643
    assert derive_seed(1, "a") != derive_seed("1", "a")
    assert derive_seed(1, 23) != derive_seed(12, 3)
