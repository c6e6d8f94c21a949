"""Records to DynamoDB items and back, and keys to page tokens."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

from pydantic import TypeAdapter

from contracts.states import AttemptState, EndpointState, is_terminal
from lambdas.logic.records import (
    AttemptRecord,
    EndpointRecord,
    RunRecord,
    StageRecord,
    TimelineRecord,
)
from lambdas.schema import PARTITION_KEY, SORT_KEY

__all__ = ["Item", "Record", "attempt_key", "encode", "endpoint_key", "key_of", "open_mark",
           "read_record", "read_token", "run_key", "stage_key", "stamp", "write_record",
           "write_token"]  # fmt: skip

Item = dict[str, Any]
Record = RunRecord | StageRecord | AttemptRecord | EndpointRecord | TimelineRecord
RecordT = TypeVar("RecordT", bound=Record)


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind)
    for kind in (RunRecord, StageRecord, AttemptRecord, EndpointRecord, TimelineRecord)
}


def run_key(run_id: str) -> Item:
    return {PARTITION_KEY: f"RUN#{run_id}", SORT_KEY: "RUN"}


def stage_key(run_id: str, index: int) -> Item:
    return {PARTITION_KEY: f"RUN#{run_id}", SORT_KEY: f"STAGE#{index}"}


def attempt_key(run_id: str, index: int, number: int) -> Item:
    return {PARTITION_KEY: f"RUN#{run_id}", SORT_KEY: f"ATTEMPT#{index}#{number:04d}"}


def endpoint_key(name: str) -> Item:
    return {PARTITION_KEY: f"ENDPOINT#{name}", SORT_KEY: "ENDPOINT"}


def key_of(record: Record) -> Item:
    """The item key of a record."""
    match record:
        case RunRecord():
            return run_key(record.run_id)
        case StageRecord():
            return stage_key(record.run_id, record.index)
        case AttemptRecord():
            return attempt_key(record.run_id, record.stage_index, record.number)
        case EndpointRecord():
            return endpoint_key(record.name)
        case TimelineRecord():
            sort = f"TIMELINE#{stamp(record.time)}#{record.kind}#{record.key}"
            return {PARTITION_KEY: f"RUN#{record.run_id}", SORT_KEY: sort}


def open_mark(record: Record) -> str | None:
    """Its partition in the index of what the reconciler looks at; None: it need not look."""
    match record:
        case RunRecord():
            return None if is_terminal(record.state) else "RUN"
        case AttemptRecord():
            done = record.state is AttemptState.ENDED and record.settled
            return None if done else "ATTEMPT"
        case EndpointRecord():
            return None if record.state is EndpointState.DELETED else "ENDPOINT"
        case _:
            return None


def write_record(record: Record) -> Item:
    """The whole item of a record. Absent attributes stand for None."""
    item = {**key_of(record), **_fields(record)}
    mark = open_mark(record)
    if mark is not None:
        item |= {"open": mark, "open_since": _since(record)}
    if isinstance(record, RunRecord | EndpointRecord):
        kind = "RUN" if isinstance(record, RunRecord) else "ENDPOINT"
        item |= {"listed": kind, "listed_at": stamp(record.created_at)}
    return item


def read_record(kind: type[RecordT], item: Mapping[str, Any]) -> RecordT:
    """The record of an item; attributes of the table's own (keys, indexes) are passed over."""
    text = json.dumps(dict(item), default=_number)
    return _ADAPTERS[kind].validate_json(text)  # type: ignore[no-any-return]


def encode(value: Any) -> Any:
    """A field's value as DynamoDB keeps it."""
    return _decimals(TypeAdapter(type(value)).dump_python(value, mode="json", exclude_none=True))


def stamp(time: dt.datetime) -> str:
    """UTC with microseconds always there, so that text order is time order."""
    return f"{time.astimezone(dt.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def write_token(key: Item | None) -> str | None:
    """The page token that stands for the key after which the next page begins."""
    if key is None:
        return None
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def read_token(token: str | None) -> Item | None:
    """A page token's key.

    Raises:
        ValueError: when it is not one of ours.
    """
    if token is None:
        return None
    key = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    if not isinstance(key, dict) or not all(isinstance(value, str) for value in key.values()):
        raise ValueError("not a page token")
    return key


def _since(record: Record) -> str:
    match record:
        case AttemptRecord():
            return stamp(record.planned_at)
        case RunRecord() | EndpointRecord():
            return stamp(record.created_at)
        case _:
            raise AssertionError(record)


def _fields(record: Record) -> Item:
    dumped = _ADAPTERS[type(record)].dump_python(record, mode="json", exclude_none=True)
    return {key: _decimals(value) for key, value in dumped.items() if value is not None}


def _decimals(value: Any) -> Any:
    if isinstance(value, float):
        return Decimal(str(value))
    if isinstance(value, Mapping):
        return {key: _decimals(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_decimals(item) for item in value]
    return value


def _number(value: Any) -> int | float:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"{value!r} is no value of the table")
