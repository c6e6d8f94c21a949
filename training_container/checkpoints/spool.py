"""The folder between the ranks of a host and its uploader process.

    <root>/step-00000020/shared/…      replicated state, written by the host's first rank
                         sharded/…     this host's shards (torch.distributed.checkpoint files)
                         done-00000    rank 0 of this host has finished; JSON
    <root>/status.json                 what the uploader reports back

A step is visible to the uploader only when every local rank is done. Files and renames carry
everything: either side may be killed and started again at any moment without a handshake.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from training_container.failure import write_atomically

__all__ = ["SHARDED", "SHARED", "Spool", "SpooledStep", "UploadStatus"]

SHARED, SHARDED = "shared", "sharded"


@dataclass(slots=True)
class UploadStatus:
    """The uploader's report; counters run since it was first started in this container."""

    uploaded_bytes: int = 0
    """Bytes of checkpoint files sent, retries included."""
    failures: int = 0
    """Tries of a step that failed."""
    committed_step: int = -1
    """Newest step whose flag this host wrote."""
    committed_seconds: float = 0.0
    """From a step's visibility to its flag."""
    committed_bytes: int = 0
    abandoned: list[int] = field(default_factory=list)
    """Steps given up after all tries."""
    fenced_by: int = 0
    """The newer attempt that control.json names; 0 when there is none."""
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class SpooledStep:
    """A step that all local ranks have written."""

    step: int
    folder: Path
    metrics: Mapping[str, float]

    def files(self) -> dict[str, Path]:
        """Path relative to the step's folder, and file, of everything that must go up."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = {path.relative_to(self.folder).as_posix(): path for path in found}
        return {name: path for name, path in names.items() if not name.startswith("done-")}


class Spool:
    """One host's spool; ``local_ranks`` is the number of ranks that must finish a step."""

    def __init__(self, root: Path, local_ranks: int) -> None:
        self.root = root
        self.local_ranks = local_ranks
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """Where the ranks write ``step``."""
        return self.root / f"step-{step:08d}"

    def finish(self, step: int, local_rank: int, metrics: Mapping[str, float]) -> None:
        """Rank ``local_rank`` has written everything of ``step``."""
        path = self.folder(step) / f"done-{local_rank:05d}"
        write_atomically(path, json.dumps({"metrics": dict(metrics)}).encode())

    def ready(self) -> list[SpooledStep]:
        """Steps that all local ranks have finished, oldest first."""
        steps = []
        for folder in filter(self._is_finished, self._folders()):
            metrics = json.loads((folder / "done-00000").read_text())["metrics"]
            steps.append(SpooledStep(_step(folder), folder, metrics))
        return steps

    def backlog(self) -> int:
        """Finished steps that wait for their upload or are in it."""
        return sum(self._is_finished(folder) for folder in self._folders())

    def remove(self, step: int) -> None:
        """Forget a step: markers first, so that a half-removed one is never taken for finished."""
        folder = self.folder(step)
        for marker in _markers(folder):
            marker.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def drop_unfinished(self, *, before: int) -> None:
        """Remove what failed saves of older steps left; called while no rank is writing."""
        for folder in self._folders():
            # A step that the uploader is removing looks unfinished too; removing twice is harmless.
            if _step(folder) < before and not self._is_finished(folder):
                self.remove(_step(folder))

    def status(self) -> UploadStatus:
        """The uploader's last report; a fresh one when it has not written any."""
        try:
            return UploadStatus(**json.loads((self.root / "status.json").read_text()))
        except FileNotFoundError:
            return UploadStatus()

    def report(self, status: UploadStatus) -> None:
        write_atomically(self.root / "status.json", json.dumps(asdict(status)).encode())

    def _is_finished(self, folder: Path) -> bool:
        return len(_markers(folder)) >= self.local_ranks

    def _folders(self) -> list[Path]:
        return sorted(self.root.glob("step-????????"))


def _markers(folder: Path) -> list[Path]:
    """Of the ranks that have finished a step; none when the other side has removed it meanwhile."""
    try:
        return list(folder.glob("done-*"))
    except FileNotFoundError:  # Path.glob raises it before Python 3.13.
        return []


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
