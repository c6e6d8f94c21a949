"""Values as people read them."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum

from rich.text import Text

__all__ = ["duration_text", "last_writing", "moment", "size_text", "state_text"]

_STYLES = {
    "SUCCEEDED": "green",
    "IN_SERVICE": "green",
    "FAILED": "red",
    "ENDPOINT_FAILED": "red",
    "CANCELLED": "red",
    "RUNNING": "cyan",
    "TRAINING": "cyan",
    "DEPLOYING": "cyan",
    "INTERRUPTED": "yellow",
    "WAITING_CAPACITY": "yellow",
    "WAITING_QUOTA": "yellow",
}


SHORT = 10.0


def state_text(state: StrEnum) -> Text:
    """A state in its colour."""
    return Text(state.value, _STYLES.get(state.value, ""))


def moment(time: dt.datetime | None) -> str:
    """Local time to the second."""
    return "-" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def duration_text(seconds: float | None) -> str:
    """`1 d 2 h`, `3 h 4 min`, `5 min 6 s`, `17 s`, `0.8 s`."""
    if seconds is None:
        return "-"
    if seconds < SHORT:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for name, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 s"


def last_writing(line: str) -> str:
    """What a terminal would show of a line: progress bars return the carriage and write again."""
    return line.rstrip("\r").rpartition("\r")[2]


def size_text(count: int) -> str:
    """Bytes in the largest fitting unit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
