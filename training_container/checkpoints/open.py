"""`open_checkpoint`: the single door to a checkpoint in S3, for resuming, for continuing and for
export.

Nothing reads checkpoint objects around it, so nothing can take an incomplete or damaged one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contracts.attempt import CheckpointRef
from contracts.checkpoints import (
    CheckpointId,
    CheckpointReport,
    FlagFile,
    complete_checkpoints,
    parse_flag,
)
from contracts.failures import ExitCode
from contracts.layout import StageLayout
from training_container.checkpoints.spool import SHARDED, SHARED
from training_container.checkpoints.store import DamagedFileError, Download, Store
from training_container.failure import StageError

__all__ = ["Agreement", "Alone", "HostShape", "OpenedCheckpoint", "files_for", "open_checkpoint"]

log = logging.getLogger("grpohub.checkpoints")


@dataclass(frozen=True, slots=True)
class HostShape:
    """Today's cluster as one host sees it."""

    host_rank: int = 0
    num_hosts: int = 1
    world_size: int = 1


class Agreement(Protocol):
    """How hosts settle on one checkpoint. Every host calls both methods in the same order."""

    def from_leader(self, choice: CheckpointId | None) -> CheckpointId | None:
        """The leader's choice, on every host."""

    def problems(self, problem: str | None) -> list[str]:
        """What any host found wrong; empty when all are content."""


class Alone:
    """The agreement of a single host with itself."""

    def from_leader(self, choice: CheckpointId | None) -> CheckpointId | None:
        return choice

    def problems(self, problem: str | None) -> list[str]:
        return [problem] if problem else []


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A verified checkpoint on the local disk."""

    id: CheckpointId
    folder: Path
    downloaded_bytes: int
    resharded: bool
    skipped: tuple[str, ...] = ()
    """Newer checkpoints passed over, and why."""


def open_checkpoint(
    store: Store,
    layout: StageLayout,
    folder: Path,
    *,
    shape: HostShape = HostShape(),
    floor: CheckpointRef | None = None,
    exact: CheckpointRef | None = None,
    whole: bool = False,
    agreement: Agreement | None = None,
) -> OpenedCheckpoint | None:
    """Choose, download and verify a checkpoint of a stage; None when the stage has none.

    Without ``exact``: the newest complete one, not older than ``floor`` (what the control plane saw
    when it submitted the attempt). One that turns out damaged is reported and the next older
    complete one is taken, below the floor if it must be. With ``exact``: that one or an error.

    ``whole``: everything goes to the first host and nothing to the others, for a model that its
    leader loads before it is sharded.

    Raises:
        StageError: STORAGE on any S3 failure, AccessDenied included; CHECKPOINT when a checkpoint
            that must be there is not, or when every complete one is damaged.
    """
    agreement = agreement or Alone()
    leads = shape.host_rank == 0
    reports = _choices(store, layout, floor, exact) if leads else iter(())
    skipped: list[str] = []
    while True:
        report = next(reports, None)
        choice = agreement.from_leader(report.id if report else None)
        if choice is None and skipped:
            raise StageError(ExitCode.CHECKPOINT, f"no usable checkpoint: {'; '.join(skipped)}")
        if choice is None:
            return None
        report = report or _read_report(store, layout, choice)
        files = files_for(layout, report, shape, whole=whole)
        shutil.rmtree(folder, ignore_errors=True)
        problem = None
        try:
            store.download(
                Download(file.key, folder / name, file.size, file.sha256)
                for name, file in files.items()
            )
        except DamagedFileError as error:
            problem = f"{choice}: {error}"
        problems = agreement.problems(problem)
        if not problems:
            return OpenedCheckpoint(
                id=choice,
                folder=folder,
                downloaded_bytes=sum(file.size for file in files.values()),
                resharded=not _same_shape(report, shape),
                skipped=tuple(skipped),
            )
        log.error("damaged checkpoint passed over: %s", "; ".join(problems))
        skipped += problems


def files_for(
    layout: StageLayout, report: CheckpointReport, shape: HostShape, *, whole: bool = False
) -> dict[str, FlagFile]:
    """What one host needs, by local name: of its old shape, its own files and the shard index.

    Every host keeps its own copy of the replicated state, so a host of the old shape reads the
    files of no other host but `sharded/.metadata`, which the leader's host wrote. When the shape
    changed, torch.distributed.checkpoint reshards and may read any shard. ``whole`` is a change of
    shape too, to one that has the first host alone.
    """
    chosen: dict[str, FlagFile] = {}
    if whole and shape.host_rank != 0:
        return chosen
    same = _same_shape(report, shape) and not whole
    for flag in report.flags:
        prefix = layout.host_prefix(report.id.step, report.id.generation, flag.host_rank)
        for file in flag.files:
            name = file.key.removeprefix(prefix)
            own = flag.host_rank == (shape.host_rank if same else 0)
            index = name == f"{SHARDED}/.metadata"
            if own or index or (not same and not name.startswith(f"{SHARED}/")):
                chosen[name] = file
    return chosen


def _same_shape(report: CheckpointReport, shape: HostShape) -> bool:
    flag = report.flags[0]
    return (flag.num_hosts, flag.world_size) == (shape.num_hosts, shape.world_size)


def _choices(
    store: Store, layout: StageLayout, floor: CheckpointRef | None, exact: CheckpointRef | None
) -> Iterator[CheckpointReport]:
    """Complete checkpoints in the order in which they are to be tried."""
    listing = store.listing(layout.checkpoints_prefix)
    if exact is not None:
        wanted = CheckpointId(exact.step, exact.generation)
        reports = complete_checkpoints(layout, _only(layout, listing, wanted), store.read)
        report = next(iter(reports), None)
        if report is None or not report.complete:
            why = "; ".join(report.reasons) if report else "no flag exists"
            raise StageError(
                ExitCode.CHECKPOINT, f"{wanted} of stage {layout.name} is not usable: {why}"
            )
        yield report
        return
    found = None
    for report in complete_checkpoints(layout, listing, store.read):
        if not report.complete:
            log.warning("%s is not complete: %s", report.id, "; ".join(report.reasons))
            continue
        if found is None:
            found = report.id
            _check_floor(found, floor)
        yield report
    if found is None:
        _check_floor(None, floor)


def _check_floor(found: CheckpointId | None, floor: CheckpointRef | None) -> None:
    if floor is None:
        return
    least = CheckpointId(floor.step, floor.generation)
    if found is None or found < least:
        raise StageError(
            ExitCode.CHECKPOINT,
            f"newest complete checkpoint is {found or 'none'}, but {least} was complete when "
            "this attempt was submitted; refusing to train those steps again",
        )


def _only(layout: StageLayout, listing: dict[str, int], wanted: CheckpointId) -> dict[str, int]:
    prefix = layout.checkpoint_prefix(wanted.step, wanted.generation)
    return {key: size for key, size in listing.items() if key.startswith(prefix)}


def _read_report(store: Store, layout: StageLayout, choice: CheckpointId) -> CheckpointReport:
    """The leader's choice as its flags describe it: the leader has judged them already."""
    flags = [parse_flag(store.read(layout.flag(choice.step, choice.generation, 0)))]
    for host in range(1, flags[0].num_hosts):
        flags.append(parse_flag(store.read(layout.flag(choice.step, choice.generation, host))))
    return CheckpointReport(choice, (), tuple(flags))
