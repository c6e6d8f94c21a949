"""Names of the columns of a local data set, read from its first rows only."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.layout import DATA_SUFFIXES

__all__ = ["Columns", "DataError", "columns_of", "data_file", "first_rows"]

_ROWS = 100


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
    try:
        file = data_file(path)
        if file.suffix == ".parquet":
            return _parquet_columns(file)
        rows = list(first_rows(file, _ROWS))
    except (DataError, OSError) as error:
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
    except (pyarrow.ArrowException, OSError) as error:
        return Columns(problem=f"is no parquet file: {error}")


def first_rows(path: Path, limit: int) -> Iterator[Mapping[str, Any]]:
    """The first rows of a data file.

    Raises:
        DataError: for a row that is no JSON object in UTF-8, with its line; for what is no parquet.
        OSError: when the file cannot be read.
    """
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, limit)
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
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, limit), start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode())
                except UnicodeDecodeError as error:
                    raise DataError(f"line {number} is not UTF-8: {error.reason}") from error
                except ValueError as error:
                    raise DataError(f"line {number} is not JSON: {error}") from error
                yield _row(row, f"line {number}")


def _parquet_rows(path: Path, limit: int) -> list[Mapping[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError("cannot be read, as pyarrow is not installed")
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=limit)
        rows = (row for batch in batches for row in batch.to_pylist())
        return list(itertools.islice(rows, limit))
    except pyarrow.ArrowException as error:
        raise DataError(f"is no parquet file: {error}") from error


def _row(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is no object with named columns")
    return row


def data_file(path: Path) -> Path:
    """``path``, or the first data file of that folder. Raises DataError when there is none."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = (file for file in files if file.suffix in DATA_SUFFIXES and not file.is_dir())
    file = next(found, None)
    if file is None:
        raise DataError(f"has no file ending in {', '.join(DATA_SUFFIXES)}")
    return file
