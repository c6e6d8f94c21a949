"""Output of processes, line by line, into a file under the state folder and into CloudWatch
Logs.
"""

import datetime
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from botocore.exceptions import ClientError

from local_aws.site import Site, now_ms

FLUSH_SECONDS = 0.5
MAX_EVENTS_PER_CALL = 1_000  # PutLogEvents takes 1 MB
MAX_RESTORED_LINES = 20_000
Line = tuple[int, str]


class LogShipper:
    """Collects lines of all streams and ships them twice a second; files are written at once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lines: queue.SimpleQueue[tuple[str, str, Line]] = queue.SimpleQueue()
        self._known: set[tuple[str, str]] = set()
        self._flushing = threading.Lock()
        site.every(FLUSH_SECONDS, self.flush, "log-shipper")

    def file(self, group: str, stream: str) -> Path:
        """Where a stream's text lies on disk."""
        return (
            self._site.state_dir / "logs" / group.strip("/") / (stream.replace("/", "_") + ".log")
        )

    def follow(
        self,
        pipe: IO[bytes],
        group: str,
        stream: str,
        on_line: Callable[[str], None] | None = None,
    ) -> threading.Thread:
        """Copy `pipe` until it closes; `on_line` sees each line too."""
        file = self.file(group, stream)
        file.parent.mkdir(parents=True, exist_ok=True)
        _end_line(file)

        def copy() -> None:
            with file.open("a", encoding="utf-8", newline="\n") as out, pipe:
                for raw in pipe:
                    text = raw.decode("utf-8", "replace").rstrip("\n")
                    line = (now_ms(), text)
                    out.write(_format(line))
                    out.flush()
                    self._lines.put((group, stream, line))
                    if on_line:
                        on_line(text)

        thread = threading.Thread(target=copy, name=f"log:{stream}", daemon=True)
        thread.start()
        return thread

    def flush(self) -> None:
        """Ship what has been collected."""
        with self._flushing:
            batches: dict[tuple[str, str], list[Line]] = defaultdict(list)
            while not self._lines.empty():
                group, stream, line = self._lines.get()
                batches[group, stream].append(line)
            for (group, stream), lines in batches.items():
                self._put(group, stream, lines)

    def restore(self, group: str) -> None:
        """Put a group's streams, as far as files are left of them, back into CloudWatch Logs."""
        folder = self._site.state_dir / "logs" / group.strip("/")
        for file in sorted(folder.glob("*.log")):
            # Progress bars return the carriage within a line: only \n ends one.
            with file.open(encoding="utf-8", errors="replace", newline="\n") as text:
                lines = [line for line in map(_parse, text) if line is not None]
            # Stream names of jobs and endpoints hold exactly one slash.
            self._put(group, file.stem.replace("_", "/", 1), lines[-MAX_RESTORED_LINES:])

    def _put(self, group: str, stream: str, lines: list[Line]) -> None:
        logs = self._site.client("logs")
        self._ensure(logs, group, stream)
        # CloudWatch refuses lines out of order, and a machine's clock may be set back.
        lines = sorted(lines, key=itemgetter(0))
        for start in range(0, len(lines), MAX_EVENTS_PER_CALL):
            # CloudWatch refuses empty messages.
            events = [
                {"timestamp": at, "message": text or " "}
                for at, text in lines[start : start + MAX_EVENTS_PER_CALL]
            ]
            logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    def _ensure(self, logs: Any, group: str, stream: str) -> None:
        if (group, stream) in self._known:
            return
        for create, names in (
            (logs.create_log_group, {"logGroupName": group}),
            (logs.create_log_stream, {"logGroupName": group, "logStreamName": stream}),
        ):
            try:
                create(**names)
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceAlreadyExistsException":
                    raise
        self._known.add((group, stream))


def _end_line(file: Path) -> None:
    """End the half line that a killed process leaves, so that the next does not follow it."""
    if file.is_file() and file.stat().st_size:
        with file.open("rb+") as written:
            written.seek(-1, os.SEEK_END)
            if written.read(1) != b"\n":
                written.write(b"\n")


def _format(line: Line) -> str:
    at = datetime.datetime.fromtimestamp(line[0] / 1000, datetime.UTC)
    return f"{at.isoformat(timespec='milliseconds')} {line[1]}\n"


def _parse(text: str) -> Line | None:
    """A line of a stream's file; None for the half line that a killed process leaves."""
    at, _, message = text.rstrip("\n").partition(" ")
    try:
        return int(datetime.datetime.fromisoformat(at).timestamp() * 1000), message
    except ValueError:
        return None
