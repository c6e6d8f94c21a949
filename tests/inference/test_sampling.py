"""Sampling of the small server against the definitions, over many draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference_container.small.generation import Sampling, sample

PLAIN = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)
PROBABILITIES_V = torch.tensor([0.5, 0.3, 0.15, 0.05])


def drawn(
    sampling: Sampling, *, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = ()
) -> torch.Tensor:
    """Frequency of each token over 2000 draws."""
    rng = torch.Generator().manual_seed(0)
    tokens = [
        sample(PROBABILITIES_V.log(), sampling, prompt=list(prompt), answer=list(answer), rng=rng)
        for _ in range(2000)
    ]
    return torch.bincount(torch.tensor(tokens), minlength=4) / 2000


def close(found: torch.Tensor, expected: list[float]) -> bool:
    return bool(((found - torch.tensor(expected)).abs() < 0.04).all())


def test_plain_sampling_follows_the_model() -> None:
    assert close(drawn(PLAIN), PROBABILITIES_V.tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    assert close(drawn(replace(PLAIN, temperature=0.0)), [1, 0, 0, 0])


def test_temperature_sharpens() -> None:
    sharp_V = PROBABILITIES_V**2 / (PROBABILITIES_V**2).sum()
    assert close(drawn(replace(PLAIN, temperature=0.5)), sharp_V.tolist())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"min_p": 0.2}, [0.526, 0.316, 0.158, 0]),
    ],
)
def test_unlikely_tokens_are_cut(changes: dict[str, float], expected: list[float]) -> None:
    assert close(drawn(replace(PLAIN, **changes)), expected)


def test_penalties_lower_what_was_said() -> None:
    said_twice = drawn(replace(PLAIN, frequency_penalty=1.0), answer=(0, 0))
    weights_V = PROBABILITIES_V * torch.tensor([torch.e**-2, 1, 1, 1])
    assert close(said_twice, (weights_V / weights_V.sum()).tolist())
    present = drawn(replace(PLAIN, presence_penalty=1.0), answer=(0, 0))
    weights_V = PROBABILITIES_V * torch.tensor([torch.e**-1, 1, 1, 1])
    assert close(present, (weights_V / weights_V.sum()).tolist())
    repeated = drawn(replace(PLAIN, repetition_penalty=2.0), prompt=(0,))
    weights_V = (PROBABILITIES_V.log() * torch.tensor([2.0, 1, 1, 1])).exp()
    assert close(repeated, (weights_V / weights_V.sum()).tolist())


def test_a_penalty_near_zero_leaves_a_distribution() -> None:
    sampling = replace(PLAIN, temperature=0.01, repetition_penalty=1e-40)
    logits_V = torch.tensor([3.0, 1.0, 2.0])
    assert sample(logits_V, sampling, prompt=[1], answer=[], rng=None) == 1
