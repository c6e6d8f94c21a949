"""Ranks: how a process learns which one it is, and the few exchanges that the loops need.

One process per rank with the environment that torchrun sets. A single CPU process needs no process
group; on GPU there always is one, because FSDP2 wants a mesh.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["World", "init_distributed", "single_process"]

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """One dimension over all ranks; None in a single CPU process."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's part of ``count`` items: contiguous, sizes differing by at most one."""
        base, extra = divmod(count, self.size)
        start = self.rank * base + min(self.rank, extra)
        return range(start, start + base + (self.rank < extra))

    def gather(self, items: list[T]) -> list[T]:
        """All ranks' items in rank order, on every rank."""
        if self.size == 1:
            return items
        parts: list[list[T] | None] = [None] * self.size
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part or []]

    def lead(self, work: Callable[[], T]) -> T:
        """``work()`` done by the leader; its result on every rank, or a failure on every rank.

        Otherwise the others would wait for a leader that has already failed.
        """
        if self.size == 1:
            return work()
        box: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_leader:
            try:
                box[0] = work()
            except Exception as error:  # noqa: BLE001 - raised below, here and on every rank
                failure = error
                # Not the exception itself: not every one survives pickling.
                code = error.code if isinstance(error, StageError) else ExitCode.INTERNAL
                box[1] = (code, f"the leader failed: {type(error).__name__}: {error}")
        dist.broadcast_object_list(box, src=0)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise StageError(*box[1])
        return box[0]

    def total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks; all ranks pass the same keys."""
        names = sorted(numbers)
        values = self.total_tensor(torch.tensor([numbers[n] for n in names], dtype=torch.float64))
        return dict(zip(names, values.tolist(), strict=True))

    def total_tensor(self, values: Tensor) -> Tensor:
        """Elementwise sum of a CPU tensor over ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def single_process() -> World:
    """The world of one CPU process."""
    return World(0, 1, torch.device("cpu"), None)


def init_distributed(*, timeout_minutes: float = 30.0) -> World:
    """Join the process group that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT describe.

    A collective that waits longer than ``timeout_minutes`` raises on every rank.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    on_gpu = torch.cuda.is_available()
    if size == 1 and not on_gpu:
        return single_process()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        init = {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore()}
        dist.init_process_group(
            # Objects and checkpoints travel over gloo even where tensors travel over NCCL.
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            rank=rank,
            world_size=size,
            timeout=dt.timedelta(minutes=timeout_minutes),
            **init,
        )
    return World(rank, size, device, init_device_mesh(device.type, (size,)))
