"""Parameters of built-in rewards: checked at submit time, in the run file's own report."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from contracts.built_in_rewards import GridNavigation, checked_parameters
from contracts.problems import InvalidInputError
from contracts.run_spec import parse_run_spec
from tests.unit.contracts.documents import run_document


@pytest.mark.parametrize(
    ("function", "parameters", "path", "words"),
    [
        ("soft_overlog", {}, "function", "Did you mean `soft_overlong`?"),
        ("qqq", {}, "function", "Built in: think_answer_format, boxed_math"),
        ("length", {"maxmum": 9, "maximum": 9}, "parameters.maxmum", "Did you mean `maximum`?"),
        ("length", {}, "parameters.maximum", "Add `maximum`."),
        ("length", {"maximum": "9"}, "parameters.maximum", "valid integer"),
        ("length", {"maximum": dt.date(2026, 1, 1)}, "parameters.maximum", "valid integer"),
        ("length", {"maximum": 1, "minimum": 2}, "parameters", "`minimum` must not exceed"),
        ("soft_overlong", {"max_length": 5, "cache": 6}, "parameters", "`cache` must not exceed"),
        ("grid_navigation", {"mode": "smooth"}, "parameters.mode", "Did you mean `smoothed`?"),
        ("regex", {"pattern": "(a"}, "parameters.pattern", "is no regular expression"),
        (
            "regex",
            {"pattern": "a", "group_equals_ground_truth": True},
            "parameters",
            "needs a group in `pattern`",
        ),
        ("json_schema", {}, "parameters.schema", "Add `schema`."),
    ],
)
def test_a_fault_is_named_with_its_place_and_fix(
    function: str, parameters: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        checked_parameters(function, parameters)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in str(problem)


def test_good_parameters_come_back_checked() -> None:
    found = checked_parameters("grid_navigation", {"mode": "smoothed", "max_distance": 3})
    assert found == GridNavigation(mode="smoothed", max_distance=3)
    group = {"pattern": "(a)", "group_equals_ground_truth": True}
    assert checked_parameters("regex", group).model_dump() == {
        "pattern": "(a)", "match": "search", "extract": "whole", "group_equals_ground_truth": True
    }  # fmt: skip
    assert checked_parameters("length", {"maximum": 2, "minimum": 2})
    assert checked_parameters("soft_overlong", {"max_length": 5, "cache": 5})


def test_a_run_file_is_refused_for_them_before_anything_is_paid_for() -> None:
    document = run_document()
    stage = next(stage for stage in document["stages"] if stage["name"] == "smooth")
    stage["rewards"][0] = {
        "name": "short", "function": "length", "weight": 1.0, "parameters": {"maxmum": 3},
    }  # fmt: skip
    with pytest.raises(InvalidInputError) as caught:
        parse_run_spec(document)
    index = document["stages"].index(stage)
    where = f"stages[{index}].rewards[0].parameters"
    assert {problem.path for problem in caught.value.problems} == {
        f"{where}.maxmum",
        f"{where}.maximum",
    }
