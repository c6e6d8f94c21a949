"""Names of the columns of a local data set, read from its first rows only."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Columns", "DataError", "columns_of", "first_rows"]

_ROWS = 100
_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns, or why they are not known: a problem of the data, or a note about this machine."""

    columns: tuple[str, ...] | None = None
    problem: str | None = None
    note: str | None = None


class DataError(ValueError):
    """A data file that holds no rows of named columns."""


def columns_of(path: Path) -> Columns:
    """Columns of a jsonl, json or parquet file, or of the first such file of a folder."""
    file = _data_file(path)
    if file is None:
        return Columns(problem=f"has no file ending in {', '.join(_SUFFIXES)}")
    if file.suffix == ".parquet":
        return _parquet_columns(file)
    try:
        rows = list(first_rows(file, _ROWS))
    except DataError as error:
        return Columns(problem=str(error))
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return Columns(columns) if rows else Columns(problem="has no rows")


def _parquet_columns(file: Path) -> Columns:
    if importlib.util.find_spec("pyarrow") is None:
        return Columns(note="columns are not checked, as pyarrow is not installed")
    import pyarrow
    from pyarrow import parquet

    try:
        return Columns(tuple(parquet.read_schema(file).names))
    except (pyarrow.ArrowInvalid, OSError) as error:
        return Columns(problem=f"is no parquet file: {error}")


def first_rows(path: Path, limit: int) -> Iterator[Mapping[str, Any]]:
    """The first rows of a data file.

    Raises:
        DataError: for a row that is no JSON object, with its line.
    """
    if path.suffix == ".parquet":
        from pyarrow import parquet

        batches = parquet.ParquetFile(path).iter_batches(batch_size=limit)
        rows: Iterator[Any] = (row for batch in batches for row in batch.to_pylist())
        yield from itertools.islice(rows, limit)
    elif path.suffix == ".json":
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"is not JSON: {error}") from error
        if not isinstance(document, list):
            raise DataError("is not a list of rows")
        for number, row in enumerate(document[:limit], start=1):
            yield _row(row, f"row {number}")
    else:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(lines, limit), start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"line {number} is not JSON: {error}") from error
                yield _row(row, f"line {number}")


def _row(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is no object with named columns")
    return row


def _data_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in _SUFFIXES else None
    files = (file for file in sorted(path.rglob("*")) if file.suffix in _SUFFIXES)
    return next(files, None)
