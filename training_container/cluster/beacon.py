"""Looking at a rank's main thread from beside it, and the files by which its host learns of it.

    <notes>/beacon-00003.json   written every second by a thread of rank 3
    <notes>/step-00003.json     written by rank 3 after each step

A process that is stopped, or that holds the interpreter's lock for ever, writes neither: silence
counts as not moving.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from training_container.cluster.table import RankProgress
from training_container.failure import write_atomically

__all__ = ["Beacon", "ProgressReader", "note_step"]

_EVERY_SECONDS = 1.0
_SILENT_SECONDS = 10.0
"""Without a look, a beacon counts as silent: what it said last no longer holds."""
_ROOT = Path(__file__).resolve().parents[2]
_COLLECTIVES = ("torch/distributed/", "torch\\distributed\\")


class Beacon:
    """A daemon thread that notes whether the main thread moves, and where it is."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"beacon-{rank:05d}.json"
        self._beat = self._looks = 0
        self._seen: tuple[object, ...] = ()
        self._main = threading.main_thread().ident

    def start(self) -> None:
        threading.Thread(target=self._run, name="beacon", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(_EVERY_SECONDS)

    def look(self) -> None:
        """One look at the main thread; a new beat is written when it has moved."""
        frame = sys._current_frames().get(self._main or 0)  # the documented way to see a thread
        frames = _stack(frame)
        seen = tuple((id(f), f.f_lasti) for f in frames)
        if seen != self._seen:
            self._beat, self._seen = self._beat + 1, seen
        self._looks += 1
        body = {
            "beat": self._beat,
            "looks": self._looks,
            "waiting": _waits(frames),
            "where": _where(frames),
        }
        write_atomically(self._path, json.dumps(body).encode())


def note_step(folder: Path, rank: int, step: int, last: bool) -> None:
    """Rank ``rank`` has finished ``step``."""
    body = {"step": step, "last": last}
    write_atomically(folder / f"step-{rank:05d}.json", json.dumps(body).encode())


class ProgressReader:
    """The host's view of its ranks, from their files; measures how long each has been unmoved."""

    def __init__(self, folder: Path, ranks: range) -> None:
        self._folder, self._ranks = folder, ranks
        self._moved: dict[int, tuple[object, float]] = {}
        self._heard: dict[int, tuple[object, float]] = {}

    def read(self, now: float) -> list[RankProgress]:
        """All ranks of this host at the monotonic time ``now``."""
        found = []
        for rank in self._ranks:
            beacon = _load(self._folder / f"beacon-{rank:05d}.json")
            step = _load(self._folder / f"step-{rank:05d}.json")
            beat = (beacon.get("beat"), step.get("step"))
            idle = _unchanged(self._moved, rank, beat, now)
            silent = _unchanged(self._heard, rank, beacon.get("looks"), now) > _SILENT_SECONDS
            where = str(beacon.get("where", "its start"))
            found.append(
                RankProgress(
                    rank=rank,
                    step=int(step.get("step", -1)),
                    idle=idle,
                    waiting=bool(beacon.get("waiting", False)) and not silent,
                    where=f"{where}, silent" if silent else where,
                    last=bool(step.get("last", False)),
                )
            )
        return found


def _unchanged(
    known: dict[int, tuple[object, float]], rank: int, value: object, now: float
) -> float:
    """Seconds since ``value`` of ``rank`` was first seen."""
    if rank not in known or known[rank][0] != value:
        known[rank] = (value, now)
    return now - known[rank][1]


def _load(path: Path) -> dict[str, object]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _waits(frames: list[FrameType]) -> bool:
    return any(mark in f.f_code.co_filename for f in frames for mark in _COLLECTIVES)


def _where(frames: list[FrameType]) -> str:
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
            return f"{path.stem}.{frame.f_code.co_name}:{frame.f_lineno}"
    return "library code" if frames else "nowhere"
