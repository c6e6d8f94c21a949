"""Writing and reading the tensors of a state: sharded ones by all ranks, replicated ones per host.

torch.distributed.checkpoint stores a replicated tensor once, in some rank's file; a host that
restores would then need files of other hosts. So the two kinds are written as two checkpoints:
`sharded/`, common to all ranks, and `shared/`, a copy on every host. A state without sharded
tensors has no `sharded/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from contracts.failures import ExitCode
from training_container.checkpoints.spool import SHARDED, SHARED
from training_container.failure import StageError

__all__ = ["local_bytes", "read_tensors", "write_tensors"]

Tree = dict[str, Any]
_WRITER_THREADS = 2


def write_tensors(
    tree: Mapping[str, Any], folder: Path, *, group: dist.ProcessGroup | None, first_on_host: bool
) -> list[Future[Any]]:
    """Copy ``tree`` to host memory, then write it in the background; the futures of the writes.

    The caller may change its tensors as soon as this returns. ``group`` (gloo) is used from
    another thread until the futures are done, so it must serve nothing else; None for one rank.
    """
    parts: dict[str, Tree] = {SHARDED: {}, SHARED: {}}
    for path, leaf in _leaves(tree):
        _put(parts[SHARDED if isinstance(leaf, DTensor) else SHARED], path, leaf)
    futures = []
    if parts[SHARDED]:
        futures.append(_write(parts[SHARDED], folder / SHARDED, group))
    if parts[SHARED] and first_on_host:
        futures.append(_write(parts[SHARED], folder / SHARED, None))
    return futures


def read_tensors(tree: Mapping[str, Any], folder: Path) -> Tree:
    """A tree like ``tree`` filled from ``folder``: tensors in place, resharded as needed.

    Raises:
        StageError: CHECKPOINT when the checkpoint lacks something that ``tree`` asks for.
    """
    wanted = dict(_leaves(tree))
    loaded: Tree = {}
    for part in (SHARDED, SHARED):
        if not (folder / part / ".metadata").exists():
            continue
        reader = dcp.FileSystemReader(folder / part)
        names = set(reader.read_metadata().state_dict_metadata)
        here: Tree = {}
        for path in [path for path in wanted if _is_in(path, names)]:
            _put(here, path, wanted.pop(path))
        if here:
            # Each rank reads from its own disk what it needs; nothing has to be agreed on.
            dcp.load(here, storage_reader=reader, no_dist=True)
            for path, leaf in _leaves(here):
                _put(loaded, path, leaf)
    if wanted:
        missing = ", ".join(".".join(path) for path in list(wanted)[:5])
        raise StageError(ExitCode.CHECKPOINT, f"{len(wanted)} entries are not in it: {missing}")
    return loaded


def local_bytes(module: nn.Module) -> int:
    """About what this rank writes of a module trained by Adam: weights and two moments.

    Not counted on the state itself: torch makes an optimizer's state when it is asked for it, by a
    step with zero gradients, which a training that begins must not have behind it.
    """
    total = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            total += 3 * held.numel() * held.element_size()
    return total


def _write(tree: Tree, folder: Path, group: dist.ProcessGroup | None) -> Future[Any]:
    # Without fsync: the files must survive a process, not the machine, whose disk goes with it.
    writer = dcp.FileSystemWriter(folder, thread_count=_WRITER_THREADS, sync_files=False)
    written = dcp.async_save(
        tree, storage_writer=writer, process_group=group, no_dist=group is None
    )
    assert isinstance(written, Future)
    return written


def _leaves(
    tree: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _put(tree: Tree, path: tuple[str, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _is_in(path: tuple[str, ...], names: set[str]) -> bool:
    """Whether a leaf is stored: whole, or (a list with tensors) by parts."""
    name = ".".join(path)
    return name in names or any(stored.startswith(f"{name}.") for stored in names)
