"""Reading and ordering rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from contracts.stages import DataSpec
from tests.training import tiny
from training_container.engine.data import (
    DataOrder,
    check_columns,
    data_files,
    file_fingerprint,
    load_rows,
)
from training_container.engine.errors import DataError

ROWS = [{"problem": f"p{n}", "answer": f"a{n}"} for n in range(3)]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    lines = tiny.write_jsonl(tmp_path / "a.jsonl", ROWS)
    array = tmp_path / "b.json"
    array.write_text(json.dumps(ROWS))
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    assert load_rows([lines]) == load_rows([array]) == load_rows([table]) == ROWS


def test_a_folder_is_read_in_name_order(tmp_path: Path) -> None:
    tiny.write_jsonl(tmp_path / "2.jsonl", ROWS[2:])
    tiny.write_jsonl(tmp_path / "1.jsonl", ROWS[:2])
    (tmp_path / "_SUCCESS").touch()
    assert load_rows(data_files(tmp_path)) == ROWS


def test_a_line_separator_inside_text_does_not_split_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"problem": "a\u2028b"}, ensure_ascii=False) + "\n")
    assert load_rows([path]) == [{"problem": "a\u2028b"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"problem": 1}\n{oops\n', "a.jsonl line 2"),
        ("a.json", '{"problem": 1}', "not a JSON array"),
        ("a.jsonl", "[1]\n", "row 1 is not a JSON object"),
        ("a.jsonl", "", "no rows"),
        ("a.parquet", "no parquet", "not a readable parquet file"),
        ("a.csv", "x", "cannot read a.csv"),
    ],
)
def test_unreadable_data_names_file_and_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(data_files(tmp_path))


def test_absent_and_empty_data_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data at"):
        data_files(tmp_path / "absent")
    with pytest.raises(DataError, match="no data file"):
        data_files(tmp_path)


@pytest.mark.parametrize(
    ("spec", "row", "message"),
    [
        ({}, {"problems": "x", "answer": "y"}, "row 2 has no 'problem'; did you mean 'problems'"),
        ({}, {"problem": 3, "answer": "y"}, "row 2: column 'problem' is not text"),
        ({}, {"problem": "x", "answer": 2}, "row 2: column 'answer' is not text but 2"),
        ({}, {"problem": "x"}, "row 2 has no 'answer'"),
        ({"messages": "chat"}, {"chat": []}, "non-empty list"),
        ({"messages": "chat"}, {"chat": [{"role": "user"}]}, "`role` and a text `content`"),
        ({"images": "images"}, {"problem": "x", "answer": "y", "images": [b"1"]}, "0 <image> tags"),
        (
            {"images": "images"},
            {"problem": "<image>", "answer": "y", "images": [3]},
            "neither bytes nor a path",
        ),
    ],
)
def test_a_bad_row_is_named_before_anything_loads(
    spec: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    """verl-project/verl#758: a missing column surfaced as a KeyError after the GPUs had started."""
    good = {
        "problem": "x",
        "answer": "y",
        "chat": [{"role": "user", "content": "x"}],
        "images": None,
    }
    with pytest.raises(DataError, match=message):
        check_columns([good, row], DataSpec(train="s3://b/k", **spec), answer_required=True)


def test_images_may_be_absent_null_or_counted(tmp_path: Path) -> None:
    """EasyR1 fails on a null image column, and does not compare tags with images."""
    data = DataSpec(train="s3://b/k", images="images")
    rows = [
        {"problem": "x", "answer": "y"},
        {"problem": "x", "answer": "y", "images": None},
        {"problem": "<image> and <image>", "answer": "y", "images": [{"bytes": b"1"}, "a.png"]},
    ]
    check_columns(rows, data, answer_required=True)


def test_order_is_a_permutation_of_each_epoch_and_differs_between_epochs() -> None:
    """huggingface/trl#6351: the same order in each epoch."""
    order = DataOrder(10, seed=1, shuffle=True)
    first, second = order.take(0, 10), order.take(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_order_depends_on_the_position_alone() -> None:
    """verl-project/verl#1875: after a resume in epoch 1, EasyR1 replays epoch 0's order."""
    whole = DataOrder(7, seed=3, shuffle=True).take(0, 30)
    for start in (0, 5, 7, 13, 20):
        assert DataOrder(7, seed=3, shuffle=True).take(start, 30 - start) == whole[start:]
    assert DataOrder(7, seed=4, shuffle=True).take(0, 30) != whole


def test_without_shuffling_rows_come_as_they_are() -> None:
    assert DataOrder(3, seed=1, shuffle=False).take(2, 5) == [2, 0, 1, 2, 0]


def test_the_fingerprint_sees_content_and_order(tmp_path: Path) -> None:
    a, b = (
        tiny.write_jsonl(tmp_path / "a.jsonl", ROWS[:1]),
        tiny.write_jsonl(tmp_path / "b.jsonl", ROWS[1:]),
    )
    assert file_fingerprint([a, b]) != file_fingerprint([b, a])
    before = file_fingerprint([a])
    tiny.write_jsonl(a, ROWS[:2])
    assert file_fingerprint([a]) != before
