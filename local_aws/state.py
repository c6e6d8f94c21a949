"""What outlives the process: S3 objects, DynamoDB items, and how executions ended, as files under
the state folder.

Objects are mirrored as they are written, under their own names as far as a file system takes them,
so that a checkpoint is a file one can look at. Running executions live in threads and cannot be
kept: a restart finds their names, reports them, and lets the control plane hear of them as aborted.
"""

import base64
import contextlib
import datetime
import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from local_aws.site import ACCOUNT, REGION, Report, Site

FLUSH_SECONDS = 1.0
MAX_OLD_VERSION = 1024 * 1024
MAX_PART = 200  # file systems take names of 255 bytes
LOST = "LocalCloud.Restarted"


class ObjectMirror:
    """Objects of all buckets but the deployment's assets. A journal names the file of each key."""

    def __init__(self, folder: Path, skip: str) -> None:
        self._folder, self._skip = folder, skip
        self._dirty: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._known: dict[tuple[str, str], Path] = {}

    def changed(self, bucket: str, key: str) -> None:
        """An object was written or deleted; cheap, for it runs inside the request."""
        if bucket != self._skip:
            with self._lock:
                self._dirty.add((bucket, key))

    def flush(self) -> None:
        """Bring the files up to date with what has changed."""
        with self._flushing:
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            if not dirty:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "journal.jsonl").open("a", encoding="utf-8", buffering=1) as log:
                for bucket, key in sorted(dirty):
                    log.write(json.dumps(self._mirror(bucket, key)) + "\n")

    def restore(self) -> int:
        """Put the mirrored objects back into their buckets; returns how many."""
        journal = self._folder / "journal.jsonl"
        entries = {(entry["bucket"], entry["key"]): entry for entry in _read_lines(journal)}
        kept = [entry for entry in entries.values() if entry.get("file")]
        kept = [entry for entry in kept if _restore_object(self._folder / entry["file"], entry)]
        self._known = {(e["bucket"], e["key"]): self._folder / e["file"] for e in kept}
        _write_lines(journal, kept)
        self._dirty.clear()
        return len(kept)

    def _mirror(self, bucket: str, key: str) -> dict[str, Any]:
        _drop_old_versions(bucket, key)
        stored = _stored(bucket, key)
        if stored is None:
            file = self._known.pop((bucket, key), None)
            if file:
                file.unlink(missing_ok=True)
            return {"bucket": bucket, "key": key}
        file = self._file(bucket, key)
        part = self._folder / "%part"  # no key's file: quoting leaves no bare % in a name
        part.write_bytes(stored.value)
        written = part.stat().st_mtime_ns
        part.replace(file)
        self._known[bucket, key] = file
        return {
            "bucket": bucket,
            "key": key,
            "file": str(file.relative_to(self._folder)),
            "written": written,
            "etag": stored.etag.strip('"'),
            "metadata": dict(stored.metadata),
            "modified": stored.last_modified.isoformat(),
            "checksum": [stored.checksum_algorithm, stored.checksum_value],
        }

    def _file(self, bucket: str, key: str) -> Path:
        parts = [quote(part, safe=" =+,@~()[]{}!$&'") for part in key.split("/")]
        file = self._folder / bucket / Path(*(part or "%" for part in parts))
        plain = all(part not in (".", "..") and len(part) <= MAX_PART for part in parts)
        if plain and not file.is_dir():
            # A key can be both an object and a "folder"; a file cannot.
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                file.parent.mkdir(parents=True, exist_ok=True)
                return file
        file = self._folder / bucket / "%hashed" / hashlib.sha256(key.encode()).hexdigest()
        file.parent.mkdir(parents=True, exist_ok=True)
        return file


class TableMirror:
    """All DynamoDB tables, one JSON file each, rewritten when anything was written."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._dirty = threading.Event()

    def changed(self) -> None:
        """Some table was written to."""
        self._dirty.set()

    def flush(self) -> None:
        """Write what has changed."""
        if not self._dirty.is_set():
            return
        self._dirty.clear()
        self._folder.mkdir(parents=True, exist_ok=True)
        client = self._site.client("dynamodb")
        for name in client.list_tables()["TableNames"]:
            pages = client.get_paginator("scan").paginate(TableName=name)
            items = [item for page in pages for item in page["Items"]]
            part = self._folder / f"{name}.part"
            part.write_text(json.dumps(items, default=_encode_bytes), encoding="utf-8")
            part.replace(self._folder / f"{name}.json")

    def restore(self) -> int:
        """Put the items back into the tables that still exist; returns how many."""
        client = self._site.client("dynamodb")
        count = 0
        for name in client.list_tables()["TableNames"]:
            file = self._folder / f"{name}.json"
            if not file.is_file():
                continue
            items = read_json(file, self._site.report, object_hook=_decode_bytes)
            for item in items or ():
                client.put_item(TableName=name, Item=item)
                count += 1
        self._dirty.clear()
        return count


class ExecutionLog:
    """How executions started and ended, one line per change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()

    def changed(self, execution: Any) -> None:
        """An execution started or ended."""
        ended = execution.stop_date
        entry = {
            "arn": execution.exec_arn,
            "machine": execution.state_machine_arn,
            "name": execution.name,
            "status": execution.status,
            "input": execution.execution_input,
            "output": execution.output,
            "error": execution.error,
            "cause": execution.cause,
            "started": execution.start_date.isoformat(),
            "stopped": ended.isoformat() if ended else None,
        }
        with self._lock:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")

    def restore(self) -> list[Any]:
        """Let DescribeExecution know the executions again. Those that were running come back
        ABORTED and are returned."""
        last = {entry["arn"]: entry for entry in _read_lines(self._file)}
        _write_lines(self._file, last.values())
        lost = []
        for entry in last.values():
            execution = _restore_execution(entry)
            if execution is not None and entry["status"] == "RUNNING":
                self.changed(execution)
                lost.append(execution)
        return lost


def read_json(file: Path, report: Report, **options: Any) -> Any:
    """What a file holds; None for one that a crash of the machine left empty or cut off.

    Such a file is kept under another name, and said, so that it never stands in the way again.
    """
    try:
        return json.loads(file.read_bytes(), **options)
    except ValueError:  # bad JSON and bad UTF-8
        damaged = file.with_name(f"{file.name}.damaged")
        file.replace(damaged)
        report(f"not kept: {file} was cut off; what is left of it is {damaged.name}")
        return None


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, without the half line that a killed process leaves."""
    entries = []
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):
                    entries.append(json.loads(line))
    return entries


def _write_lines(file: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Replace a JSON Lines file, so that what is appended does not follow half a line."""
    if not file.is_file():
        return
    part = file.with_name(f"{file.name}.part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    part.replace(file)


def _stored(bucket: str, key: str) -> Any:
    from moto.s3.models import FakeKey, s3_backends

    buckets = s3_backends[ACCOUNT]["aws"].buckets
    found = buckets[bucket].keys.get(key) if bucket in buckets else None
    return found if isinstance(found, FakeKey) else None


def _drop_old_versions(bucket: str, key: str) -> None:
    """Forget large versions that are no longer current, as the bucket's lifecycle rule would after
    a week.

    moto keeps an open temporary file for each, and a long run prunes hundreds of checkpoints.
    """
    from moto.s3.models import FakeKey, s3_backends

    buckets = s3_backends[ACCOUNT]["aws"].buckets
    versions = buckets[bucket].keys.getlist(key, []) if bucket in buckets else []
    kept = [
        version
        for version in versions
        if version is versions[-1]
        or not isinstance(version, FakeKey)
        or version.contentsize <= MAX_OLD_VERSION
    ]
    if len(kept) < len(versions):
        buckets[bucket].keys.setlist(key, kept)


def _restore_object(file: Path, entry: dict[str, Any]) -> bool:
    from moto.s3.models import s3_backends

    backend = s3_backends[ACCOUNT]["aws"]
    if entry["bucket"] not in backend.buckets or not file.is_file():
        return False
    # A process that was killed between the two has written a newer object than its journal says.
    as_written = file.stat().st_mtime_ns == entry.get("written")
    stored = backend.put_object(
        entry["bucket"],
        entry["key"],
        file.read_bytes(),
        etag=entry["etag"] if as_written else None,
        disable_notification=True,
    )
    stored.set_metadata(entry["metadata"])
    if as_written:
        stored.last_modified = datetime.datetime.fromisoformat(entry["modified"])
        stored.checksum_algorithm, stored.checksum_value = entry["checksum"]
    return True


def _restore_execution(entry: dict[str, Any]) -> Any:
    from moto.stepfunctions.parser.api import ExecutionStatus, StateMachineType
    from moto.stepfunctions.parser.backend.execution import Execution
    from moto.stepfunctions.parser.models import stepfunctions_parser_backends

    backend = stepfunctions_parser_backends[ACCOUNT][REGION]
    machine = next((m for m in backend.state_machines if m.arn == entry["machine"]), None)
    if machine is None:
        return None
    execution = Execution(
        name=entry["name"],
        sm_type=StateMachineType.STANDARD,
        role_arn=machine.roleArn,
        exec_arn=entry["arn"],
        account_id=ACCOUNT,
        region_name=REGION,
        state_machine=machine,
        start_date=datetime.datetime.fromisoformat(entry["started"]),
        cloud_watch_logging_session=None,
        activity_store={},
        input_data=entry["input"],
    )
    stopped = entry["stopped"] or datetime.datetime.now(datetime.UTC).isoformat()
    execution.stop_date = datetime.datetime.fromisoformat(stopped)
    execution.output = entry["output"]
    execution.error, execution.cause = entry["error"], entry["cause"]
    execution.exec_status = ExecutionStatus(entry["status"])
    if entry["status"] == "RUNNING":
        execution.exec_status = ExecutionStatus.ABORTED
        execution.error = LOST
        execution.cause = "The embedded cloud ended while this execution ran."
    machine.executions.append(execution)
    return execution


def _encode_bytes(value: Any) -> dict[str, str]:
    return {"__bytes__": base64.b64encode(bytes(value)).decode()}


def _decode_bytes(node: dict[str, Any]) -> Any:
    return base64.b64decode(node["__bytes__"]) if node.keys() == {"__bytes__"} else node
