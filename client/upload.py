"""Upload local data and models under `inputs/<sha256>/`, once per content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from client.run_files import LocalSource
from contracts.layout import join_uri

__all__ = ["Progress", "Uploader", "content_sha256", "input_key"]

Progress = Callable[[str, int, int], None]
"""Called with a name, the bytes done and all bytes."""
_CHUNK = 1 << 20


def content_sha256(path: Path) -> str:
    """sha256 of a file's bytes; of a folder, over the relative path and sha256 of each file."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for part in _files(path):
        digest.update(f"{part.relative_to(path).as_posix()}\0{content_sha256(part)}\n".encode())
    return digest.hexdigest()


def input_key(path: Path, sha256: str) -> str:
    """Key of an uploaded file, or prefix (ending in a slash) of an uploaded folder."""
    return f"inputs/{sha256}/{path.name}" + ("" if path.is_file() else "/")


class Uploader:
    """Puts files into the hub's bucket; what is already there is not sent again."""

    def __init__(self, s3: Any, bucket: str, progress: Progress | None = None) -> None:
        self._s3, self._bucket = s3, bucket
        self._progress = progress or _silent
        self._uris: dict[Path, str] = {}

    def upload(self, source: LocalSource) -> str:
        """The `s3://` address of the source's content."""
        path = source.path.resolve()
        if path not in self._uris:
            self._uris[path] = self._upload(path)
        return self._uris[path]

    def _upload(self, path: Path) -> str:
        key = input_key(path, content_sha256(path))
        if path.is_file():
            self.put(path, key)
        else:
            for file in _files(path):
                self.put(file, f"{key}{file.relative_to(path).as_posix()}")
        return join_uri(self._bucket, key)

    def put(self, file: Path, key: str, *, always: bool = False) -> None:
        """Upload one file, unless an object of its size has its content-addressed key already."""
        size = file.stat().st_size
        if not always and self._size(key) == size:
            self._progress(file.name, size, size)
            return
        done = 0
        self._progress(file.name, 0, size)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._progress(file.name, done, size)

        self._s3.upload_file(str(file), self._bucket, key, Callback=advance)

    def _size(self, key: str) -> int | None:
        try:
            return int(self._s3.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                return None
            raise


def _silent(_name: str, _done: int, _total: int) -> None:
    """No progress wanted."""


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below a folder, hidden ones left out, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
