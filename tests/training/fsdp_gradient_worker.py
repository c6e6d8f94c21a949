"""One rank of the FSDP gradient test in test_losses.py: arguments rank, world, store file.

Prints, from rank 0, JSON of the largest difference between the gradient of FSDP2 over all ranks and
that of a plain model over the whole mini-batch, for each loss and aggregation.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from training_container.engine import algorithms

ROWS, LENGTH, WIDTH = 8, 5, 6
# Rows of each rank's micro-batches: unequal numbers of rows and tokens, order mixed.
DEAL = [[[0], [3, 4]], [[6], [7, 1, 2, 5]]]


def mini_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([5, 1, 3, 2, 4, 5, 1, 2])
    return {
        "features": normal(ROWS, LENGTH, WIDTH),
        "old": -normal(ROWS, LENGTH).abs(),
        "ref": -normal(ROWS, LENGTH).abs(),
        "adv": normal(ROWS),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).float(),
    }


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model: nn.Module, rows: list[int], name: str, aggregation: str) -> None:
    whole = mini_batch()
    batch = {key: value[rows] for key, value in whole.items()}
    logprobs = -nn.functional.softplus(model(batch["features"]).squeeze(-1))
    loss_B_T, _ = algorithms.policy_loss(name, logprobs, batch["old"], batch["adv"], batch["mask"])
    kl_B_T = algorithms.kl_per_token("k3", logprobs, batch["ref"], batch["mask"])
    algorithms.aggregate(
        loss_B_T + 0.1 * kl_B_T,
        batch["mask"],
        aggregation,
        total_tokens=whole["mask"].sum(),
        total_sequences=ROWS,
        max_length=LENGTH,
    ).backward()


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    differences = {}
    for name in algorithms.LOSSES:
        for aggregation in algorithms.AGGREGATIONS:
            sharded, plain = build_model(), build_model()
            fully_shard(sharded, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            for rows in DEAL[rank]:
                backward(sharded, rows, name, aggregation)
            backward(plain, list(range(ROWS)), name, aggregation)
            differences[f"{name}/{aggregation}"] = max(
                (ours.grad.full_tensor() - theirs.grad).abs().max().item()
                for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True)
            )
    if rank == 0:
        print(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
