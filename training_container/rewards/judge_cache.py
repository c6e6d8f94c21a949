"""What judges have said, by what they were asked: in memory, or in a file of the host.

A judgement costs money or seconds, and a resumed step asks what was asked before the interruption.
The file outlives the trainer's process; it is SQLite's, which a SIGKILL leaves whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["JudgementCache"]

_log = logging.getLogger(__name__)

_REMEMBERED = 100_000
"""A week of training must fill neither memory nor disk; the oldest are forgotten."""
_ASKED_AT_ONCE = 500  # variables of one statement; SQLite of old allows 999


class JudgementCache:
    """Scores by the sha256 of everything they depend on. One call at a time, from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """``path`` None: in memory. A file that is no cache is replaced; where none can be kept,
        memory serves, because a cache is a saving and no need."""
        self._database = _open(":memory:") if path is None else _kept(path)

    @staticmethod
    def key(settings: str, conversation: Sequence[Mapping[str, str]]) -> str:
        """``settings``: what else the judgement depends on."""
        asked = json.dumps([settings, [dict(message) for message in conversation]], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()

    def find(self, keys: Iterable[str]) -> dict[str, float]:
        """The scores that are known."""
        wanted, found = list(dict.fromkeys(keys)), {}
        for start in range(0, len(wanted), _ASKED_AT_ONCE):
            part = wanted[start : start + _ASKED_AT_ONCE]
            places = ", ".join("?" * len(part))
            query = f"SELECT key, score FROM judgement WHERE key IN ({places})"
            with _warned():
                found.update(self._database.execute(query, part).fetchall())
        return found

    def add(self, scores: Mapping[str, float]) -> None:
        """Remember scores, and forget the oldest above the bound."""
        with _warned(), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO judgement (key, score) VALUES (?, ?)", scores.items()
            )
            self._database.execute(
                "DELETE FROM judgement WHERE age NOT IN"
                " (SELECT age FROM judgement ORDER BY age DESC LIMIT ?)"
                " AND (SELECT COUNT(*) FROM judgement) > ?",
                (_REMEMBERED, _REMEMBERED),
            )

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _kept(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _open(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            _log.warning("judgements in %s are lost: %s", path, error)
            path.unlink()
            return _open(path)
    except (OSError, sqlite3.Error) as error:
        _log.warning("judgements are kept in memory only: %s: %s", path, error)
        return _open(":memory:")


def _open(where: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(where, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS judgement"
            " (age INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, score REAL NOT NULL)"
        )
    except sqlite3.Error:
        database.close()
        raise
    return database


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:  # a full disk, say
        _log.warning("the cache of judgements fails: %s", error)
