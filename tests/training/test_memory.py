"""The memory estimate, beside what one computes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.compute import Rung
from contracts.run_spec import parse_run_spec
from tests.training import tiny
from training_container.memory import ModelShape, estimate

QWEN_7B = ModelShape(parameters=7_615_616_512, hidden=3584, layers=28, vocabulary=152_064)
LLAMA_8B = ModelShape(parameters=8_030_261_248, hidden=4096, layers=32, vocabulary=128_256)
GIB = 2**30


def stage(**changes: Any) -> Any:
    return parse_run_spec(tiny.run_document(tiny.grpo_stage(**changes))).stages[0]


def sampling(share: float) -> dict[str, Any]:
    """vLLM's share of a GPU."""
    return {"rollout": {"gpu_memory_utilization": share}}


def test_state_is_dealt_over_all_ranks_and_a_host_loads_one_copy() -> None:
    found = estimate(QWEN_7B, stage(), Rung(instance_type="ml.g6e.48xlarge", count=2))
    assert found.ranks == 16
    weights = QWEN_7B.parameters / GIB
    assert found.parts["master weights"] == pytest.approx(4 * weights / 16)
    assert found.parts["gradients and optimizer"] == pytest.approx(12 * weights / 16)
    assert found.host_parts == {
        "loading": pytest.approx(4 * weights),
        "one save": pytest.approx(12 * weights / 2),
    }


@pytest.mark.parametrize(
    ("shape", "instance_type", "changes", "fits"),
    [
        (QWEN_7B, "ml.p5.48xlarge", {}, True),
        (QWEN_7B, "ml.p5.48xlarge", {"gradient_checkpointing": False}, False),
        (QWEN_7B, "ml.g6e.48xlarge", {}, False),
        (QWEN_7B, "ml.g6e.48xlarge", sampling(0.45), True),
        (LLAMA_8B, "ml.g6e.2xlarge", {"lora": {"rank": 16}, **sampling(0.1)}, True),
        (LLAMA_8B, "ml.g6e.xlarge", {"lora": {"rank": 16}, **sampling(0.1)}, False),
    ],
    ids=[
        "8 x 80 GiB",
        "52 GiB of activations",
        "vLLM's 60% of 48 GiB leave too little",
        "and 45% enough",
        "one GPU with an adapter",
        "30 GiB to load on a host of 32",
    ],
)
def test_what_fits(
    shape: ModelShape, instance_type: str, changes: dict[str, Any], fits: bool
) -> None:
    found = estimate(shape, stage(**changes), Rung(instance_type=instance_type))
    assert found.fits is fits, "\n".join(found.lines())
    assert ("DOES NOT FIT" in found.lines()[0]) is not fits


def test_a_reference_model_takes_its_share_of_gpus_and_host() -> None:
    rung = Rung(instance_type="ml.g6e.48xlarge")
    without, with_kl = (
        estimate(QWEN_7B, stage(grpo={"kl": kl}), rung) for kl in (None, {"coefficient": 0.01})
    )
    assert with_kl.total - without.total == pytest.approx(2 * QWEN_7B.parameters / 8 / GIB)
    assert with_kl.host_parts["loading"] == 2 * without.host_parts["loading"]
