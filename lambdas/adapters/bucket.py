"""The run bucket, and the data that users keep elsewhere in S3."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from contracts.checkpoints import (
    CheckpointId,
    CheckpointReport,
    Listing,
    complete_checkpoints,
    newest_complete,
)
from contracts.control import Control
from contracts.layout import StageLayout, parse_flag_key, parse_s3_uri
from lambdas.adapters.aws import client, error_code
from lambdas.errors import InputMissingError, ObjectChangedError, ObjectMissingError

__all__ = ["Bucket"]

_MISSING = {"NoSuchKey", "NoSuchVersion", "404", "NotFound", "NoSuchBucket"}
_CHANGED = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


class Bucket:
    """The run bucket. AccessDenied is always an error, never "nothing found"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._s3 = client("s3")

    # Objects -------------------------------------------------------------------------------------

    def read(self, key: str, version: str | None = None) -> bytes:
        """An object's body: its newest, or that of one version.

        Raises:
            ObjectMissingError: when there is none.
        """
        return self._get(self.name, key, version)[0]

    def read_json(self, key: str) -> Any:
        """An object's body as JSON; raises as `read` does."""
        return json.loads(self.read(key))

    def write(self, key: str, body: str | bytes) -> None:
        """Put an object."""
        data = body.encode() if isinstance(body, str) else body
        self._s3.put_object(Bucket=self.name, Key=key, Body=data)

    def write_json(self, key: str, value: Mapping[str, Any]) -> None:
        """Put an object with JSON that people may read."""
        self.write(key, json.dumps(value, indent=1, ensure_ascii=False))

    def delete(self, key: str) -> None:
        """Delete an object, or nothing."""
        self._s3.delete_object(Bucket=self.name, Key=key)

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """Key to bytes of everything under ``prefix``: one paginated LIST."""
        return {item["Key"]: item["Size"] for item in self._list(self.name, prefix)}

    def list_times(self, prefix: str) -> dict[str, dt.datetime]:
        """Key to modification time of everything under ``prefix``."""
        return {item["Key"]: item["LastModified"] for item in self._list(self.name, prefix)}

    # Users' data ---------------------------------------------------------------------------------

    def input_sizes(self, uri: str) -> dict[str, int]:
        """Bytes of every object under an `s3://` address, of any bucket that the hub may read, by
        what its key says beyond the address.

        Raises:
            InputMissingError: when nothing is there, or it may not be listed.
        """
        bucket, key = parse_s3_uri(uri)
        try:
            sizes = {
                item["Key"].removeprefix(key): item["Size"] for item in self._list(bucket, key)
            }
        except ClientError as error:
            if error_code(error) in ("AccessDenied", "NoSuchBucket", "AllAccessDisabled"):
                raise InputMissingError(f"{uri}: {error_code(error)}") from error
            raise
        if not sizes:
            raise InputMissingError(f"{uri}: nothing is there")
        return sizes

    def first_bytes(self, uri: str, count: int) -> bytes:
        """The first bytes of the first object under an `s3://` address.

        Raises:
            ObjectMissingError: when there is none.
        """
        bucket, key = parse_s3_uri(uri)
        first = next(iter(self._list(bucket, key)), None)
        if first is None or not first["Size"]:
            raise ObjectMissingError(uri)
        answer = self._s3.get_object(Bucket=bucket, Key=first["Key"], Range=f"bytes=0-{count - 1}")
        body: bytes = answer["Body"].read()
        return body

    def first_key(self, uri: str) -> str | None:
        """Key of the first object under an `s3://` address."""
        bucket, key = parse_s3_uri(uri)
        first = next(iter(self._list(bucket, key)), None)
        return None if first is None else str(first["Key"])

    # Checkpoints ---------------------------------------------------------------------------------

    def newest_checkpoint(self, layout: StageLayout) -> CheckpointReport | None:
        """Newest complete checkpoint of a stage: one LIST, then the flags of the candidates looked
        at."""
        return newest_complete(layout, self._checkpoints(layout), self._read_flag)

    def checkpoints(self, layout: StageLayout) -> list[CheckpointReport]:
        """All checkpoints of a stage, newest first."""
        return list(complete_checkpoints(layout, self._checkpoints(layout), self._read_flag))

    def checkpoint(
        self, layout: StageLayout, wanted: CheckpointId
    ) -> tuple[CheckpointReport, dt.datetime] | None:
        """(one checkpoint judged from its own prefix, time of its last flag); None without a
        flag."""
        prefix = layout.checkpoint_prefix(wanted.step, wanted.generation)
        objects = list(self._list(self.name, prefix))
        times = [o["LastModified"] for o in objects if parse_flag_key(o["Key"]) is not None]
        listing = {o["Key"]: o["Size"] for o in objects}
        reports = complete_checkpoints(layout, listing, self._read_flag)
        found = next((report for report in reports if report.id == wanted), None)
        return None if found is None else (found, max(times))

    def _checkpoints(self, layout: StageLayout) -> Listing:
        return self.list_sizes(layout.checkpoints_prefix)

    def _read_flag(self, key: str) -> bytes:
        try:
            return self.read(key)
        except ObjectMissingError as error:  # Pruned since the listing.
            raise KeyError(key) from error

    # Control -------------------------------------------------------------------------------------

    def read_control(self, layout: StageLayout) -> tuple[Control, str] | None:
        """(control.json, its ETag), or None before the first attempt."""
        try:
            body, etag = self._get(self.name, layout.control)
        except ObjectMissingError:
            return None
        return Control.model_validate_json(body), etag

    def write_control(self, layout: StageLayout, control: Control, etag: str | None) -> None:
        """Replace the control.json that has ``etag``; None: there must be none yet.

        Raises:
            ObjectChangedError: when somebody else wrote it meanwhile.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            self._s3.put_object(
                Bucket=self.name,
                Key=layout.control,
                Body=control.model_dump_json().encode(),
                **condition,
            )
        except ClientError as error:
            if error_code(error) in _CHANGED:
                raise ObjectChangedError(layout.control) from error
            raise

    # -- private ----------------------------------------------------------------------------------

    def _get(self, bucket: str, key: str, version: str | None = None) -> tuple[bytes, str]:
        wanted = {} if version is None else {"VersionId": version}
        try:
            answer = self._s3.get_object(Bucket=bucket, Key=key, **wanted)
        except ClientError as error:
            if error_code(error) in _MISSING:
                raise ObjectMissingError(f"s3://{bucket}/{key}") from error
            raise
        return answer["Body"].read(), answer["ETag"]

    def _list(self, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            yield from page.get("Contents", ())
