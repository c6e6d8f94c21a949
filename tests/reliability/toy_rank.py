"""A rank that trains a toy model through the real checkpointer: seconds where a real stage takes
minutes.

Dropout, momentum and a validation metric make it as sensitive to a wrong resume as a real stage is.
Runs in place of `training_container.rank`; settings come from the run file's `tags`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from contracts.model_manifest import ManifestFile, ModelManifest
from contracts.run_spec import RunSpec, parse_run_spec
from training_container.checkpoints.stop import StopSignal
from training_container.engine.distributed import World, init_distributed
from training_container.engine.errors import DataError, ExportError, NonFiniteError
from training_container.engine.seeds import seed_everything
from training_container.engine.state import Decision, PolicyWeights, Progress, TrainState
from training_container.failure import write_atomically
from training_container.rank import RankConfig, main, make_checkpointer
from training_container.rewards.interface import RewardError

ROWS = 8


class Policy:
    """Two layers and AdamW; sharded when there are several ranks."""

    def __init__(self, world: World, dropout: float) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 16)
        )
        if world.size > 1:
            fully_shard(self.module, mesh=world.mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)


def train_step(policy: Policy, world: World, step: int) -> float:
    """One step on rows that depend on the step alone; the mean loss over all ranks."""
    seed_everything(1, "step", step, world.rank)
    rows = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 16, generator=rows)[list(world.share(ROWS))]
    loss = ((policy.module(x) - x.roll(1, dims=1)) ** 2).sum() / ROWS
    policy.optimizer.zero_grad()
    (loss * world.size).backward()  # FSDP averages the ranks' gradients; their sum is wanted
    policy.optimizer.step()
    return float(world.total_tensor(loss.detach().clone()))


def trouble(name: str, step: int, world: World) -> None:
    """Fail the way that the run file asks for: `trouble: <what>@<step>[@<rank>]`."""
    what, _, place = name.partition("@")
    at, _, rank = place.partition("@")
    if not what or int(at) != step or int(rank or 0) != world.rank:
        return
    if what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
    if what == "exit":
        os._exit(77)
    if what == "kill":
        os.kill(os.getpid(), 9)
    raise {
        "nan": NonFiniteError("loss is nan"),
        "export": ExportError("logits differ by 3.0"),
        "reward": RewardError("source grid: 90% of samples failed"),
        "data": DataError("no row is left"),
        "bug": KeyError("nobody foresaw this"),
    }[what]


def work(config: RankConfig, stop: StopSignal) -> bool:
    torch.set_num_threads(1)
    spec: RunSpec = parse_run_spec(json.loads(Path(config.spec).read_text()))
    stage = spec.stages[config.stage_index]
    world = init_distributed(timeout_minutes=1)
    checkpointer = make_checkpointer(config, world, stop)
    policy = Policy(world, float(spec.tags.get("dropout", 0.1)))
    continued = checkpointer.load_weights(PolicyWeights(policy.module))
    state = TrainState(policy, Progress("data", stage.name))
    resumed = checkpointer.restore(state)
    Path(config.output).mkdir(exist_ok=True)
    pause = float(spec.tags.get("pause", 0.03))
    for step in range(state.progress.step + 1, stage.max_steps + 1):
        started = time.monotonic()
        trouble(spec.tags.get("trouble", ""), step, world)
        loss = train_step(policy, world, step)
        time.sleep(pause)
        state.progress.step = step
        metrics = {"loss": loss, "validation/reward": -loss, **checkpointer.take_metrics()}
        if world.is_leader:
            row = {"step": step, "generation": config.generation, "metrics": metrics,
                   "resumed": resumed, "continued": continued}  # fmt: skip
            with (Path(config.output) / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        decision = checkpointer.after_step(
            state, step, metrics, last=step == stage.max_steps,
            step_seconds=time.monotonic() - started,
        )  # fmt: skip
        if decision is Decision.STOP and step < stage.max_steps:
            checkpointer.close()
            return False
    checkpointer.close()
    trouble(spec.tags.get("trouble", ""), 0, world)
    export(config, policy, world, stage.max_steps)
    world.close()
    return True


def export(config: RankConfig, policy: Policy, world: World, step: int) -> None:
    whole = get_model_state_dict(
        policy.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not world.is_leader:
        return
    folder = Path(config.export)
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path)
    body = path.read_bytes()
    file = ManifestFile(path=path.name, size=len(body), sha256=hashlib.sha256(body).hexdigest())
    manifest = ModelManifest(
        run_id=config.run_id, stage=config.stage, step=step, architecture="Toy",
        parameters=sum(tensor.numel() for tensor in whole.values()), dtype="float32",
        base_model="toy", files=(file,),
    )  # fmt: skip
    write_atomically(folder / "model.json", manifest.model_dump_json().encode())


if __name__ == "__main__":
    main(sys.argv[1:], work)
