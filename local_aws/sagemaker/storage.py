"""What SageMaker moves between S3 and a container: input channels, checkpoints, model artefacts."""

import contextlib
import io
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class InputNotFoundError(Exception):
    """A channel's prefix holds no objects; the text is SageMaker's."""


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key (or prefix) of an s3:// address."""
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


def list_objects(s3: Any, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Key and size of every object under a prefix."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            yield item["Key"], item["Size"]


def download_prefix(s3: Any, uri: str, folder: Path, *, shard: int = 0, shards: int = 1) -> int:
    """Copy a prefix as File mode does: names keep what follows the prefix's last slash. Returns the
    bytes.

    With `shards` above one, only every `shards`-th object is taken, as ShardedByS3Key does.
    """
    bucket, prefix = split_uri(uri)
    parent = prefix.rpartition("/")[0]
    copied = 0
    for index, (key, size) in enumerate(list_objects(s3, bucket, prefix)):
        if key.endswith("/") or index % shards != shard:
            continue
        target = folder / key[len(parent) :].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, key, str(target))
        copied += size
    return copied


def download_channel(
    s3: Any, channel: dict[str, Any], folder: Path, *, shard: int, shards: int, role: str
) -> None:
    """Fill one channel's folder.

    Raises:
        InputNotFoundError: nothing lies under the prefix.
    """
    source = channel["DataSource"]["S3DataSource"]
    uri = source["S3Uri"]
    folder.mkdir(parents=True, exist_ok=True)
    bucket, prefix = split_uri(uri)
    if next(list_objects(s3, bucket, prefix), None) is None:
        raise InputNotFoundError(
            f'Data download failed:No S3 objects found under S3 URL "{uri}" given in input data '
            f"source. Please ensure that the bucket exists in the selected region (us-east-1), "
            f'that objects exist under that S3 prefix, and that the role "{role}" has '
            f'"s3:ListBucket" permissions on bucket "{bucket}".'
        )
    sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
    kept = {"shard": shard, "shards": shards} if sharded else {}
    download_prefix(s3, uri, folder, **kept)


def upload_folder(s3: Any, folder: Path, uri: str) -> None:
    """Copy a folder's files under a prefix."""
    bucket, prefix = split_uri(uri)
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        key = f"{prefix.rstrip('/')}/{file.relative_to(folder).as_posix()}"
        s3.upload_file(str(file), bucket, key)


def upload_artefacts(s3: Any, folder: Path, output: dict[str, Any], job: str, name: str) -> str:
    """Upload /opt/ml/model or /opt/ml/output/data as SageMaker does at a job's end; returns the
    address.
    """
    base = f"{output['S3OutputPath'].rstrip('/')}/{job}/output"
    if output.get("CompressionType") == "NONE":
        uri = f"{base}/{name}/"
        upload_folder(s3, folder, uri)
        return uri
    uri = f"{base}/{name}.tar.gz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, entry.name)
    bucket, key = split_uri(uri)
    packed.seek(0)
    s3.upload_fileobj(packed, bucket, key)
    return uri


class CheckpointMirror:
    """SageMaker's copy of /opt/ml/checkpoints: per file, without order, deletions included."""

    PERIOD_SECONDS = 5.0

    def __init__(self, s3: Any, folder: Path, uri: str) -> None:
        self._s3, self._folder, self._uri = s3, folder, uri
        self._seen: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="checkpoint-mirror", daemon=True)

    def restore(self) -> None:
        """Bring what S3 holds to the local path, before the container starts."""
        download_prefix(self._s3, self._uri.rstrip("/") + "/", self._folder)
        self._seen = dict(self._files())

    def start(self) -> None:
        """Begin to copy in the background."""
        self._thread.start()

    def stop(self, *, final_copy: bool) -> None:
        """End the copying; with `final_copy`, what is left is copied once more first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if final_copy:
            self._copy()

    def _loop(self) -> None:
        while not self._stop.wait(self.PERIOD_SECONDS):
            self._copy()

    def _copy(self) -> None:
        bucket, prefix = split_uri(self._uri)
        present = dict(self._files())
        for file, stamp in present.items():
            if self._seen.get(file) != stamp:
                with contextlib.suppress(FileNotFoundError):  # gone again meanwhile
                    self._s3.upload_file(str(file), bucket, self._key(prefix, file))
        for file in self._seen.keys() - present.keys():
            self._s3.delete_object(Bucket=bucket, Key=self._key(prefix, file))
        self._seen = present

    def _files(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        # Folders vanish while they are walked: os.walk passes over those, Path.rglob raises.
        for folder, _, names in os.walk(self._folder):
            for file in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield file, (status.st_mtime_ns, status.st_size)

    def _key(self, prefix: str, file: Path) -> str:
        return f"{prefix.rstrip('/')}/{file.relative_to(self._folder).as_posix()}"
