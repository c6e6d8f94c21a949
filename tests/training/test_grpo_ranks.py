"""The GRPO loop on two gloo ranks: the same training as on one, exactly resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from contracts.run_spec import RunSpec, parse_run_spec
from contracts.stages import GrpoStage
from tests.training import tiny
from tests.training.ranks import run_on_ranks
from training_container.engine.batches import TokenSequence
from training_container.engine.distributed import World, init_distributed, single_process
from training_container.engine.loading import empty_model, load_model
from training_container.engine.reference import FrozenReference
from training_container.trainer import run_stage

TRAIN, HELD_OUT = tiny.split_pairs()
STEPS = 3
GRPO = {"group_size": 4, "prompts_per_step": 3, "mini_batch_prompts": 1}


def spec_of(**changes: Any) -> RunSpec:
    """Three prompts a step over two ranks: unequal shares, and ranks without work at times."""
    settings = {
        "max_steps": STEPS,
        "rewards": [short(slack=20)],
        "grpo": {**GRPO, "kl": {"coefficient": 0.05}},
        "rollout": {"max_response_length": 40},
        "optimizer": {"learning_rate": 1e-3},
        "micro_batch_tokens": 160,
    }
    return parse_run_spec(tiny.run_document(tiny.grpo_stage(**{**settings, **changes})))


def short(slack: int) -> dict[str, Any]:
    """A reward of answers of at most 20 tokens, falling to 0 over ``slack`` more."""
    parameters = {"maximum": 20, "slack": slack}
    return {"name": "short", "function": "length", "weight": 1.0, "parameters": parameters}


def train(
    root: Path, base: Path, world: World, stop_after: int | None = None, **changes: Any
) -> Any:
    """One run in this process; its rows without times."""
    checkpointer = tiny.FolderCheckpointer(root / "checkpoints", every=99, stop_after=stop_after)
    run_stage(
        spec_of(**changes),
        0,
        tiny.inputs(root, tiny.grpo_rows(TRAIN[:10]), tiny.grpo_rows(HELD_OUT[:3]), base=base),
        world=world,
        checkpointer=checkpointer,
        run_id="tiny-1",
        attempt=1,
        generation="g1",
    )
    return tiny.comparable(checkpointer.rows)


def two_ranks(root: str, base: str) -> None:
    """A rank's process: a whole run, one cut after step 1 and resumed, one with an adapter.

    Only the leader's folder holds the model's weights: the other rank gets its shards from there.
    """
    torch.set_num_threads(1)
    world = init_distributed(timeout_minutes=3)
    folder, model = Path(root), Path(base)
    if not world.is_leader:
        ignore = shutil.ignore_patterns("*.safetensors")
        model = Path(shutil.copytree(model, folder / "weightless", ignore=ignore))
    rows = {"whole": train(folder / "whole", model, world)}
    rows["first"] = train(folder / "cut", model, world, stop_after=1)
    if world.is_leader:
        shutil.copytree(folder / "cut", folder / "fewer")
    world.barrier()
    rows["rest"] = train(folder / "cut", model, world)
    rows["lora"] = train(folder / "lora", model, world, **LORA)
    nothing_stays_gathered(model, world)
    rows["equal"] = train(folder / "equal", model, world, **EQUAL)
    rows["halved"] = train(folder / "halved", model, world, **HALVED)
    rows["halved_lora"] = train(folder / "halved-lora", model, world, **HALVED, **LORA)
    (folder / f"rows-{world.rank}.json").write_text(json.dumps(rows))
    world.close()


def nothing_stays_gathered(base: Path, world: World) -> None:
    """A reference model is never trained: between passes each rank holds its shards alone."""
    (stage,) = spec_of().stages
    assert isinstance(stage, GrpoStage)
    load = load_model if world.is_leader else empty_model
    reference = FrozenReference(load(base), stage, world)
    reference.log_probs([TokenSequence.of([5, 6], [7, 8])] * world.size)
    assert all(isinstance(weight, DTensor) for weight in reference._passes.scorer.parameters())


LORA = {"lora": {"rank": 4, "alpha": 8}}
EQUAL = {"rewards": [short(slack=1)], "grpo": {**GRPO, "kl": None, "mini_batch_prompts": 3}}
"""Rewards of 0 or 1: some groups are equal, and a rank may have nothing but such."""
HALVED = {
    "precision": "bfloat16",
    "max_steps": 1,
    "grpo": {**GRPO, "kl": {"coefficient": 0.05}, "mini_batch_prompts": 3},
}
"""One update: the policy that its KL is measured of is still the reference."""


def close(left: Any, right: Any) -> None:
    """Equal steps, and metrics within 1e-5."""
    assert left.keys() == right.keys()
    for step, row in left.items():
        for name, value in row.items():
            number = isinstance(value, int | float)
            expected = pytest.approx(value, abs=1e-5, rel=1e-5) if number else value
            assert right[step][name] == expected, (step, name)


def numbered(rows: dict[str, Any]) -> dict[int, Any]:
    return {int(step): row for step, row in rows.items()}


@pytest.mark.timeout(600)
def test_ranks_change_nothing_and_resume_is_exact(tmp_path: Path) -> None:
    """verl-project/verl#5625: loss not invariant to data-parallel size; #2265: other node count.

    Two ranks resume bit-identically; one rank, and a resume on another number of ranks, agree
    within 1e-5.
    """
    torch.set_num_threads(1)
    base = tiny.warm_model(tmp_path / "warm")
    run_on_ranks("tests.training.test_grpo_ranks:two_ranks", 2, str(tmp_path), str(base))
    rows, other = (json.loads((tmp_path / f"rows-{r}.json").read_text()) for r in (0, 1))
    assert rows == other, "ranks disagree on the metrics"

    assert {**rows["first"], **rows["rest"]} == rows["whole"]
    whole, cut = (load_file(tmp_path / n / "model/model.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)

    world = single_process()
    two = numbered(rows["whole"])
    close(two, train(tmp_path / "one", base, world))
    resharded = train(tmp_path / "fewer", base, world)
    assert list(resharded) == [2, 3]
    close({step: two[step] for step in resharded}, resharded)
    close(numbered(rows["lora"]), train(tmp_path / "lora-one", base, world, **LORA))

    # Half precision rounds both alike, or the penalty would be for rounding.
    assert rows["halved"]["1"]["kl/k3"] == 0.0
    assert rows["halved_lora"]["1"]["kl/k3"] == 0.0

    equal = train(tmp_path / "equal-one", base, world, **EQUAL)
    assert any(0 < row.get("advantage/zero_variance_fraction", 0) < 1 for row in equal.values())
    close(numbered(rows["equal"]), equal)
