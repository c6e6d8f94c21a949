"""The timeline of a run. An entry is keyed by its time and kind, so writing it twice leaves one."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from lambdas.logic.records import AttemptRecord, TimelineRecord

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["note", "note_attempt"]


def note(
    hub: Hub,
    run_id: str,
    kind: str,
    text: str,
    *,
    time: dt.datetime,
    key: str = "",
    stage_index: int | None = None,
    attempt: int | None = None,
    step: int | None = None,
) -> bool:
    """Add an entry; ``time`` is the fact's own where it has one. False: it was there."""
    return hub.table.add_timeline(
        TimelineRecord(
            run_id=run_id,
            time=time,
            kind=kind,
            text=text,
            key=key,
            stage_index=stage_index,
            attempt=attempt,
            step=step,
        )
    )


def note_attempt(
    hub: Hub, attempt: AttemptRecord, kind: str, text: str, *, time: dt.datetime
) -> bool:
    """Add an entry about an attempt."""
    return note(
        hub,
        attempt.run_id,
        kind,
        text,
        time=time,
        key=f"{attempt.stage_index}-{attempt.number}",
        stage_index=attempt.stage_index,
        attempt=attempt.number,
    )
