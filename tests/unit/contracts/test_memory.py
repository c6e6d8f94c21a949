"""The memory estimate, beside what one computes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.compute import Rung
from contracts.memory import ModelShape, estimate
from contracts.run_spec import parse_run_spec
from tests.unit.contracts.documents import run_document

QWEN_7B = ModelShape(parameters=7_615_616_512, hidden=3584, layers=28, vocabulary=152_064)
LLAMA_8B = ModelShape(parameters=8_030_261_248, hidden=4096, layers=32, vocabulary=128_256)
BY_TRANSFORMERS = {"lora": {"rank": 16}, "rollout": {"engine": "hf"}}
GIB = 2**30


def stage(name: str = "smooth", **changes: Any) -> Any:
    document = run_document()
    found = next(stage for stage in document["stages"] if stage["name"] == name)
    found.update({"grpo": {"kl": None}} if name == "smooth" else {}, **changes)
    return next(stage for stage in parse_run_spec(document).stages if stage.name == name)


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


def test_under_an_adapter_the_base_needs_no_master_copy() -> None:
    rung = Rung(instance_type="ml.g6e.12xlarge")
    parts = estimate(QWEN_7B, stage(**BY_TRANSFORMERS), rung).parts
    assert parts["frozen base"] == pytest.approx(2 * QWEN_7B.parameters / 4 / GIB)
    assert parts["master weights"] < 0.01 * parts["frozen base"] * 4
    whole = estimate(QWEN_7B, stage(**BY_TRANSFORMERS, precision="float32"), rung).parts
    assert whole["frozen base"] == 2 * parts["frozen base"]


@pytest.mark.parametrize(
    ("shape", "instance_type", "changes", "fits"),
    [
        (QWEN_7B, "ml.p5.48xlarge", {}, True),
        (QWEN_7B, "ml.p5.48xlarge", {"gradient_checkpointing": False}, False),
        (QWEN_7B, "ml.g6e.48xlarge", sampling(0.45), False),
        (QWEN_7B, "ml.g6e.48xlarge", {}, True),
        (QWEN_7B, "ml.g6e.48xlarge", sampling(0.6), False),
        (QWEN_7B, "ml.g6e.48xlarge", sampling(0.3), False),
        (LLAMA_8B, "ml.p5.4xlarge", {"lora": {"rank": 16}}, True),
        (LLAMA_8B, "ml.g6e.xlarge", BY_TRANSFORMERS, False),
        (LLAMA_8B, "ml.g6e.2xlarge", BY_TRANSFORMERS, True),
    ],
    ids=[
        "8 x 80 GiB",
        "52 GiB of activations",
        "gradients of embeddings and head take 6 of 8 x 45 GiB",
        "8 x 45 GiB",
        "vLLM takes 60% of it",
        "vLLM has 30% for 14 GiB of weights",
        "one GPU with an adapter",
        "30 GiB to load on a host of 32",
        "and on one of 64",
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


def test_supervised_training_generates_nothing_and_a_cpu_has_one_memory() -> None:
    found = estimate(QWEN_7B, stage("warm-up"), Rung(instance_type="ml.m5.24xlarge"))
    assert "rollout engine" not in found.parts
    assert found.available == found.host_available == 384
    assert found.parts["activations"] > 100  # a CPU computes in 32 bits and recomputes nothing
    assert found.shortage is None


def test_what_is_too_small_is_said_with_the_largest_part_first() -> None:
    found = estimate(QWEN_7B, stage(**sampling(0.6)), Rung(instance_type="ml.g6e.48xlarge"))
    assert found.shortage == (
        "about 49.3 GiB per rank, of 45 there are: rollout engine 27.0, gradients and optimizer "
        "10.6, gradients of embeddings and head 6.1, master weights 3.5, embeddings and head 2.0"
    )
    found = estimate(QWEN_7B, stage(**sampling(0.3)), Rung(instance_type="ml.g6e.48xlarge"))
    assert found.shortage == (
        "13.5 GiB for vLLM (rollout.gpu_memory_utilization), which needs 14.2 for weights and more "
        "for its cache"
    )
    found = estimate(LLAMA_8B, stage(**BY_TRANSFORMERS), Rung(instance_type="ml.g6e.xlarge"))
    assert found.shortage == "about 29.9 GiB of host memory for loading, of 32"


WEIGHTS = {"a.safetensors": 600, "b.safetensors": 400, "tokenizer.json": 77}
QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151_936, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config",
    [
        QWEN,
        {**QWEN, "dtype": "float16"},
        {"torch_dtype": "bfloat16", "text_config": QWEN},
        {**QWEN, "tie_word_embeddings": False},
    ],
    ids=["bfloat16", "float16", "a decoder within", "untied"],
)
def test_a_folder_tells_the_shape(config: dict[str, Any]) -> None:
    assert ModelShape.of(config, WEIGHTS) == ModelShape(500, 896, 24, 151_936)


def test_tied_embeddings_are_one_matrix() -> None:
    for config in (
        {**QWEN, "tie_word_embeddings": True},
        {"dtype": "bfloat16", "text_config": {**QWEN, "tie_word_embeddings": True}},
    ):
        found = ModelShape.of(config, WEIGHTS)
        assert found == ModelShape(500, 896, 24, 151_936, tied=True)
        assert found.ends == 896 * 151_936
    assert ModelShape(500, 896, 24, 151_936).ends == 2 * 896 * 151_936


def test_without_a_type_weights_have_four_bytes() -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 2}
    assert ModelShape.of(config, WEIGHTS) == ModelShape(250, 8, 2, 0)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, WEIGHTS),
        (QWEN, {"config.json": 1_000}),
        ({**QWEN, "dtype": "float8_e4m3fn"}, WEIGHTS),
        ({**QWEN, "quantization_config": {"bits": 4}}, WEIGHTS),
    ],
    ids=["no shape", "no weights", "another type", "quantised"],
)
def test_a_folder_that_does_not_tell(config: dict[str, Any], sizes: dict[str, int]) -> None:
    assert ModelShape.of(config, sizes) is None
