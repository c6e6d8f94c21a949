"""Rows of a dataset: reading, checking, order.

jsonl, json and parquet, one file or a folder of them. Column names are the run file's. The order is
a pure function of seed and epoch, so a position (rows drawn so far) is all a checkpoint needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from contracts.layout import DATA_SUFFIXES
from contracts.problems import nearest, shorten
from contracts.stages import DataSpec
from training_container.engine.errors import DataError
from training_container.engine.seeds import derive_seed

__all__ = ["DataOrder", "Row", "check_columns", "data_files", "file_fingerprint", "load_rows"]

Row = Mapping[str, Any]
_IMAGE_TAG = "<image>"


def data_files(path: Path) -> list[Path]:
    """The data files at ``path``, in name order.

    Raises:
        DataError: when there are none, or one is of another kind.
    """
    if not path.exists():
        raise DataError(f"no data at {path}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if not file.name.startswith((".", "_"))]
    strange = [file.name for file in files if file.suffix not in DATA_SUFFIXES]
    if strange:
        raise DataError(f"{path}: cannot read {', '.join(strange[:5])}; give {DATA_SUFFIXES}")
    if not files:
        raise DataError(f"{path} holds no data file; give {DATA_SUFFIXES}")
    return files


def file_fingerprint(files: Sequence[Path]) -> str:
    """sha256 over the contents of ``files`` in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def load_rows(files: Sequence[Path]) -> list[Row]:
    """All rows of all files.

    Raises:
        DataError: naming file and line of what is not a row, or when there is no row at all.
    """
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise DataError(f"no rows in {', '.join(file.name for file in files)}")
    return rows


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        try:
            yield from pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file.name} is not a readable parquet file: {error}") from error
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name} is not UTF-8: {error}") from error
    if file.suffix == ".json":
        document = _parse(text, file.name)
        if not isinstance(document, list):
            raise DataError(f"{file.name} is not a JSON array of rows")
        numbered = enumerate(document, start=1)
    else:
        # Not splitlines(): it would also split at U+2028 inside a JSON string.
        lines = enumerate(text.split("\n"), start=1)
        numbered = ((n, _parse(line, f"{file.name} line {n}")) for n, line in lines if line.strip())
    for number, row in numbered:
        if not isinstance(row, dict):
            raise DataError(f"{file.name} row {number} is not a JSON object")
        yield row


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def check_columns(rows: Sequence[Row], data: DataSpec, *, answer_required: bool) -> None:
    """Every row has what the run file names, in the right form; before any weights load.

    Raises:
        DataError: naming the first row at fault, and the nearest column when one is missing.
    """
    asked = data.messages if data.messages is not None else data.problem
    needed = [asked]
    if data.answer is not None and (answer_required and data.messages is None):
        needed.append(data.answer)
    for number, row in enumerate(rows, start=1):
        for column in needed:
            if row.get(column) is None:
                raise DataError(_missing(column, row, number))
            if column != data.messages and not isinstance(row[column], str):
                found = shorten(row[column])
                raise DataError(f"row {number}: column {column!r} is not text but {found}")
        if data.messages is not None:
            _check_messages(row[asked], number)
        if data.images is not None:
            _check_images(row, data, number)


def _missing(column: str, row: Row, number: int) -> str:
    guess = nearest(column, list(row))
    hint = f"; did you mean {guess!r}?" if guess else f"; columns are {', '.join(row)}"
    return f"row {number} has no {column!r}{hint}"


def _check_messages(messages: Any, number: int) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"row {number}: messages are not a non-empty list")
    for message in messages:
        keys = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not keys or not isinstance(message["content"], str):
            raise DataError(f"row {number}: a message needs a `role` and a text `content`")


def _check_images(row: Row, data: DataSpec, number: int) -> None:
    """As many images as `<image>` tags, each given as bytes or a path. None counts as no image."""
    assert data.images is not None
    images = row.get(data.images) or []
    if not isinstance(images, list):
        images = [images]
    for image in images:
        given = image.get("bytes") or image.get("path") if isinstance(image, Mapping) else image
        if not isinstance(given, bytes | str):
            raise DataError(f"row {number}: an image is neither bytes nor a path")
    if data.messages is not None:
        text = "".join(message["content"] for message in row[data.messages])
    else:
        text = row[data.problem]
    if text.count(_IMAGE_TAG) != len(images):
        raise DataError(
            f"row {number} has {text.count(_IMAGE_TAG)} {_IMAGE_TAG} tags but {len(images)} images"
        )


class DataOrder:
    """Which row is drawn at which position; epochs follow one another without a gap."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, position: int, count: int) -> list[int]:
        """Row indices at positions ``position`` to ``position + count - 1``."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.rows)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            seed = derive_seed(self._seed, "order", epoch)
            generator = torch.Generator().manual_seed(seed)
            self._permutation = torch.randperm(self.rows, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[offset]
