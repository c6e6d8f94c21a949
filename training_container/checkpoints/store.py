"""The container's one door to S3: every failure has a name, nothing missing is mistaken for a
failure.

Retries of single requests are botocore's (`AWS_RETRY_MODE`, `AWS_MAX_ATTEMPTS`); what is retried
here is what botocore cannot: a body that breaks off in the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["DamagedFileError", "Download", "Store", "StoreError", "s3_client"]

_CHUNK = 1 << 20
_MIB = 1 << 20
_BODY_TRIES = 5
_REFUSALS = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "NoSuchBucket"}
Progress = Callable[[int], None]


class StoreError(StageError):
    """S3 refused or failed: never to be read as "nothing there"."""

    def __init__(self, action: str, error: Exception) -> None:
        self.aws_code = _aws_code(error)
        self.refused = self.aws_code in _REFUSALS
        """Asking again will not help."""
        super().__init__(ExitCode.STORAGE, f"{action}: {self.aws_code}: {error}")


class DamagedFileError(Exception):
    """An object whose bytes are not those its flag names."""


@dataclass(frozen=True, slots=True)
class Download:
    """One object to fetch, with what it must be."""

    key: str
    path: Path
    size: int
    sha256: str


def s3_client(connections: int = 16) -> Any:
    """A client with bounded connections and finite timeouts."""
    config = Config(
        max_pool_connections=connections, connect_timeout=10, read_timeout=60, tcp_keepalive=True
    )
    return boto3.client("s3", config=config)


class Store:
    """One bucket.

    ``concurrency`` bounds parallel requests, and with ``part_mib`` the memory that transfers hold.
    """

    def __init__(
        self, bucket: str, client: Any = None, *, concurrency: int = 8, part_mib: int = 16
    ) -> None:
        self.bucket = bucket
        self.concurrency = concurrency
        self._client = client or s3_client(2 * concurrency)
        self._transfer = TransferConfig(
            multipart_threshold=2 * part_mib * _MIB,
            multipart_chunksize=part_mib * _MIB,
            max_request_concurrency=concurrency,
            max_submission_concurrency=2,
            max_in_memory_upload_chunks=concurrency,
        )

    def listing(self, prefix: str) -> dict[str, int]:
        """Key to size of every object under ``prefix``: one paginated LIST.

        Raises:
            StoreError: on any failure; an empty dictionary means that there is nothing.
        """
        with _named(f"list s3://{self.bucket}/{prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            return {
                item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())
            }

    def read(self, key: str) -> bytes:
        """Body of a small object.

        Raises:
            KeyError: when it does not exist.
            StoreError: on every other failure.
        """
        return self.read_if_changed(key, None)[0] or b""

    def read_if_changed(self, key: str, etag: str | None) -> tuple[bytes | None, str | None]:
        """(body, etag), or (None, etag) when the object still has ``etag`` (conditional GET)."""
        condition = {"IfNoneMatch": etag} if etag else {}
        with _named(f"read s3://{self.bucket}/{key}"):
            try:
                answer = self._client.get_object(Bucket=self.bucket, Key=key, **condition)
                return answer["Body"].read(), answer["ETag"]
            except ClientError as error:
                code = _aws_code(error)
                if code in {"304", "NotModified"}:
                    return None, etag
                if code == "NoSuchKey":
                    raise KeyError(key) from error
                raise

    def put(self, key: str, body: bytes, content_type: str = "application/json") -> None:
        """Write one small object (atomic in S3)."""
        with _named(f"write s3://{self.bucket}/{key}"):
            self._client.put_object(
                Bucket=self.bucket, Key=key, Body=body, ContentType=content_type
            )

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, 1000 a request (S3's limit); an object already gone is no error."""
        keys = list(keys)
        with _named(f"delete {len(keys)} objects of s3://{self.bucket}"):
            for start in range(0, len(keys), 1000):
                chunk = [{"Key": key} for key in keys[start : start + 1000]]
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": chunk, "Quiet": True}
                )
                for error in answer.get("Errors", ()):
                    raise ClientError({"Error": error}, "DeleteObjects")

    def upload(self, files: dict[Path, str], progress: Progress = lambda _: None) -> None:
        """Upload files to their keys, in parallel, multipart where large, with CRC32 per part.

        Raises:
            StoreError: when any file failed; the others may be there.
        """
        with (
            _named(f"upload {len(files)} files to s3://{self.bucket}"),
            TransferManager(self._client, self._transfer) as manager,
        ):
            futures = [
                manager.upload(
                    str(path),
                    self.bucket,
                    key,
                    extra_args={"ChecksumAlgorithm": "CRC32"},
                    subscribers=[_Subscriber(progress)],
                )
                for path, key in files.items()
            ]
            for future in futures:
                future.result()

    def download(self, files: Iterable[Download]) -> None:
        """Fetch files in parallel, hashing while the bytes arrive.

        Raises:
            DamagedFileError: when an object is gone or differs from its size or sha256.
            StoreError: when S3 failed.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            for future in [pool.submit(self._download_one, file) for file in files]:
                future.result()

    def _download_one(self, file: Download) -> None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        digest, received = hashlib.sha256(), 0
        with _named(f"read s3://{self.bucket}/{file.key}"), file.path.open("wb") as target:
            for attempt in range(1, _BODY_TRIES + 1):
                try:
                    for chunk in self._body(file, received):
                        target.write(chunk)
                        digest.update(chunk)
                        received += len(chunk)
                    break
                except BotoCoreError:
                    # A broken body is not retried by botocore; go on where it broke.
                    if attempt == _BODY_TRIES:
                        raise
        if received != file.size:
            raise DamagedFileError(f"{file.key} has {received} bytes, not {file.size}")
        if digest.hexdigest() != file.sha256:
            raise DamagedFileError(f"{file.key} differs from its sha256")

    def _body(self, file: Download, start: int) -> Iterable[bytes]:
        if start >= file.size > 0:
            return ()
        place = {"Range": f"bytes={start}-"} if start else {}
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=file.key, **place)
        except ClientError as error:
            if _aws_code(error) == "NoSuchKey":
                raise DamagedFileError(f"{file.key} is gone") from error
            raise
        return answer["Body"].iter_chunks(_CHUNK)


class _Subscriber(BaseSubscriber):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self._progress(bytes_transferred)


class _named:  # noqa: N801 - reads as a statement
    """Give what botocore and s3transfer raise our name."""

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ClientError | BotoCoreError | Boto3Error):
            raise StoreError(self._action, error) from error


def _aws_code(error: Exception) -> str:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    return type(error).__name__
