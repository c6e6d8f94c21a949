"""Metrics rows, sampled completions and TensorBoard files: mirrored to S3 by the leader's uploader.

<root>/metrics.jsonl        appended by the trainer, never rewritten
<root>/rollouts/*.parquet   appear whole, by rename
<root>/tensorboard/…        appended by the writer
<root>/sample_prompt.json   written once, before the first step
"""

from __future__ import annotations

import threading
from pathlib import Path

from contracts.layout import StageLayout
from training_container.checkpoints.store import Store

__all__ = ["OutputsMirror"]


class OutputsMirror:
    """Puts what changed since the last `sync`. Every incarnation has files of its own in S3."""

    def __init__(
        self, store: Store, layout: StageLayout, root: Path, attempt: int, generation: str
    ) -> None:
        self._store, self._layout, self._root = store, layout, root
        self._attempt, self._generation = attempt, generation
        self._sent: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Upload every file whose size or time of change is new.

        Raises:
            StoreError: when S3 failed; the next call tries the same files again.
        """
        with self._lock:
            for path, key in self._files():
                stat = path.stat()
                state = (stat.st_size, stat.st_mtime_ns)
                if self._sent.get(path) == state or not stat.st_size:
                    continue
                if path.name == "metrics.jsonl":
                    # A row half written by the trainer is left for the next time.
                    body = path.read_bytes()
                    self._store.put(key, body[: body.rfind(b"\n") + 1], "application/jsonl")
                else:
                    self._store.upload({path: key})
                self._sent[path] = state

    def _files(self) -> list[tuple[Path, str]]:
        layout, root = self._layout, self._root
        files = [
            (root / "metrics.jsonl", layout.metrics(self._attempt, self._generation)),
            (root / "sample_prompt.json", layout.sample_prompt),
        ]
        files += [
            (path, layout.rollouts_prefix + path.name)
            for path in sorted((root / "rollouts").glob("step-*.parquet"))
        ]
        board = root / "tensorboard"
        prefix = f"{layout.tensorboard_prefix}{self._attempt:03d}-{self._generation}/"
        files += [
            (path, prefix + path.relative_to(board).as_posix())
            for path in sorted(board.rglob("*"))
            if path.is_file()
        ]
        return [(path, key) for path, key in files if path.exists()]
