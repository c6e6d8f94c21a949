"""Overlong punishment and truncation masking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from training_container.engine import algorithms

VECTORS = json.loads((Path(__file__).parents[1] / "data/grpo_vectors.json").read_text())
MEASURED = VECTORS["builtin"]["soft_overlong_L100_cache20_swift"]


@pytest.mark.parametrize(("length", "swift"), [(int(k), v) for k, v in MEASURED.items()])
def test_overlong_penalty_equals_the_measured_one_down_to_its_floor(
    length: int, swift: float
) -> None:
    """FACTS D.2.3: ms-swift goes on below -1 past the limit, TRL and ours do not."""
    got = algorithms.overlong_penalty(torch.tensor([length]), max_length=100, buffer=20)
    assert got.item() == pytest.approx(max(swift, -1.0))


def test_overlong_penalty_scales() -> None:
    lengths = torch.tensor([0, 79, 80, 90, 100])
    got = algorithms.overlong_penalty(lengths, max_length=100, buffer=20, penalty=0.5)
    assert got.tolist() == pytest.approx([0, 0, 0, -0.25, -0.5])


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_buffer_must_fit(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer must be from 1 to 100"):
        algorithms.overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_truncated_sequences_lose_their_mask_and_nothing_else_changes(dtype: torch.dtype) -> None:
    """huggingface/trl#6369: the denominator is counted after masking."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=dtype)
    got = algorithms.mask_truncated(mask, torch.tensor([False, True, True]))
    assert got.dtype == dtype
    assert got.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask.sum() == 8, "the argument is left alone"
    assert got.sum() == 5
