"""What the API reads out of S3 and CloudWatch: metrics, checkpoints, logs."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contracts.api import CheckpointView, LogLine, LogsPage, MetricsPage
from contracts.states import AttemptState
from lambdas.errors import NotFoundError
from lambdas.logic.folder import RunFolder
from lambdas.logic.records import AttemptRecord, StageRecord
from lambdas.logic.views import checkpoint_view

if TYPE_CHECKING:
    from lambdas.adapters.telemetry import LoggedLine
    from lambdas.hub import Hub

__all__ = ["begun_stage", "merge_rows", "read_checkpoints", "read_logs", "read_metrics"]


def begun_stage(folder: RunFolder, index: int | None) -> StageRecord:
    """Stage ``index``, or the latest one with an attempt.

    Raises:
        NotFoundError: the run has no such stage.
    """
    if index is None:
        begun = [stage for stage in folder.stages if stage.attempts]
        return begun[-1] if begun else folder.stages[0]
    if not 0 <= index < len(folder.stages):
        raise NotFoundError(f"run {folder.run.run_id} has no stage {index}")
    return folder.stages[index]


def read_checkpoints(hub: Hub, stage: StageRecord) -> list[CheckpointView]:
    """Checkpoints of a stage, newest first."""
    return [checkpoint_view(stage, report) for report in hub.bucket.checkpoints(stage.layout)]


def read_metrics(hub: Hub, stage: StageRecord, from_step: int, limit: int) -> MetricsPage:
    """Rows from ``from_step`` on, at most ``limit`` of them."""
    keys = hub.bucket.list_sizes(stage.layout.metrics_prefix)
    files = (_rows(hub.bucket.read(key)) for key in sorted(keys) if key.endswith(".jsonl"))
    rows = [row for row in merge_rows(files) if row["step"] >= from_step]
    rest = rows[limit:]
    return MetricsPage(
        stage_index=stage.index,
        rows=rows[:limit],
        next_step=rest[0]["step"] if rest else None,
    )


def merge_rows(files: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per step out of the files of all incarnations, given oldest first.

    An incarnation that resumed at step n has trained n and later steps anew: rows of older files
    from its first step on are of a past that did not happen. Rows of one step in one file
    (training, validation) are joined.
    """
    merged: dict[int, dict[str, Any]] = {}
    for rows in files:
        if not rows:
            continue
        first = min(row["step"] for row in rows)
        merged = {step: row for step, row in merged.items() if step < first}
        for row in rows:
            before = merged.get(row["step"])
            metrics = {**(before["metrics"] if before else {}), **row.get("metrics", {})}
            merged[row["step"]] = {**row, "metrics": metrics}
    return [merged[step] for step in sorted(merged)]


def read_logs(hub: Hub, attempt: AttemptRecord | None, token: str | None) -> LogsPage:
    """A page of an attempt's log; the token goes on even after the last line so far.

    Raises:
        ValueError: ``token`` is not one of ours.
    """
    if attempt is None:
        return LogsPage(job_name=None, lines=[], next_token=token, complete=False)
    place = _LogPlace() if token is None else _LogPlace.read(token)
    lines, page = hub.telemetry.job_lines(attempt.job_name, place.page, place.since)
    new, after = place.advance(lines, page)
    return LogsPage(
        job_name=attempt.job_name,
        lines=[
            LogLine(time=line.time, host=_host(line.stream), message=line.message) for line in new
        ],
        next_token=after.token(),
        complete=attempt.state is AttemptState.ENDED and page is None and not new,
    )


@dataclass(frozen=True, slots=True)
class _LogPlace:
    """Where reading goes on. CloudWatch has a token between pages, but none after the last line so
    far: then the place is a time, and how many lines of that very millisecond were given
    already."""

    page: str | None = None
    since: dt.datetime | None = None
    seen: int = 0
    last: dt.datetime | None = None
    """Newest line of the pages so far."""
    at_last: int = 0
    """Lines of that time."""

    @classmethod
    def read(cls, token: str) -> _LogPlace:
        value = json.loads(base64.urlsafe_b64decode(token))
        if not isinstance(value, list) or len(value) != 5:
            raise ValueError("not a log token")
        page, since, seen, last, at_last = value
        texts, counts = (page, since, last), (seen, at_last)
        if not all(text is None or isinstance(text, str) for text in texts) or not all(
            isinstance(count, int) for count in counts
        ):
            raise ValueError("not a log token")
        return cls(page, _time(since), seen, _time(last), at_last)

    def token(self) -> str:
        since, last = (time.isoformat() if time else None for time in (self.since, self.last))
        value = [self.page, since, self.seen, last, self.at_last]
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()

    def advance(
        self, lines: list[LoggedLine], page: str | None
    ) -> tuple[list[LoggedLine], _LogPlace]:
        """(the lines that are new, the place after them)."""
        skip = self.seen if self.page is None else 0
        old = [line for line in lines if line.time == self.since][:skip]
        new = [line for line in lines if line not in old]
        times = [line.time for line in lines]
        last = max([*times, *([self.last] if self.last else [])], default=None)
        at_last = sum(time == last for time in times) + (self.at_last if last == self.last else 0)
        if page is not None:
            return new, _LogPlace(page, self.since, self.seen, last, at_last)
        since = last or self.since
        return new, _LogPlace(None, since, at_last if last else self.seen)


def _time(text: str | None) -> dt.datetime | None:
    time = dt.datetime.fromisoformat(text) if text else None
    if time is not None and time.tzinfo is None:
        raise ValueError("not a log token")
    return time


def _rows(body: bytes) -> list[dict[str, Any]]:
    """Rows of a metrics file; a last line cut short by an interruption is left out."""
    rows = []
    for line in body.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _host(stream: str) -> str:
    """`<job>/algo-1-1700000000` -> `algo-1`."""
    name = stream.rsplit("/", 1)[-1]
    return "-".join(name.split("-")[:2])
