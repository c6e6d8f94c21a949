"""What the syntax tree of a reward file says before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.problems import Problem
from contracts.reward_files import check_reward_file, sibling_modules

COLUMNS = ("problem", "answer", "difficulty")


def check(source: str, function: str = "score", **how: Any) -> list[Problem]:
    return check_reward_file(
        source, function, path="rewards[0].file", **{"columns": COLUMNS, **how}
    )


def test_a_syntax_error_is_reported_with_its_line() -> None:
    [problem] = check("x = 1\ndef score(completions):\n    return [\n")
    assert "syntax error at line 3" in problem.reason
    assert problem.value == "    return ["


def test_a_file_that_holds_null_bytes_is_a_syntax_error_and_not_a_crash() -> None:
    [problem] = check("x = 1\0")
    assert "syntax error" in problem.reason


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("def scroe(completions): ...", "Did you mean `scroe`?"),
        ("def other_thing(completions): ...", "The file defines other_thing."),
        ("", "The file defines nothing."),
        ("score: int", "The file defines nothing."),
        ("def other():\n    def score(completions): ...", "The file defines other."),
        ("class other:\n    def score(completions): ...", "The file defines other."),
    ],
)
def test_a_missing_function_is_named_with_what_is_there(source: str, fix: str) -> None:
    [problem] = check(source)
    assert problem.reason == "is not defined in this file"
    assert problem.fix == fix


ACCEPTED = [
    "def score(completions, **kwargs): ...",
    "async def score(completions, answer): ...",
    "def score(predict, ground_truth): ...",
    "def score(reward_inputs): ...",
    "def score(completions, /, difficulty, *, answer): ...",
    "def score(completions, length=3, *, scale=2): ...",
    "def score(*, completions, problem): ...",
    "def score(completions=None, answer=None): ...",
    "class score:\n    def __call__(self, completions): ...",
    "score = make()",
    "from lib import inner as score",
    "from lib import score",
    "import os\nif os.name:\n    pass\nscore = os.fspath",
    "a, b = 1, 2\nscore = b",
    "def score(completions, truncated, response_length): ...",
    "def score(completions, is_truncated, prompts, messages, ground_truth): ...",
    "def score(response, label): ...",
    "def score(predict_str, solution, scale=1): ...",
    "def score(reward_input, scale=1): ...",
    "def score(inputs): ...",
    "def score(inputs=None): ...",
    "REWARD_TYPE = 'sequential'\ndef score(row): ...",
    "from lib import *\ndef score(row): ...",
    "from lib import *",
    "a, score = make()",
    "from typing import Any\nscore: Any = lambda predict, ground_truth: 1",
    "try:\n    import fast\n    def score(predict, answer): ...\nexcept ImportError:\n    pass",
    "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    def score(predict, answer): ...",
    "if 1:\n    def score(predict, answer): ...\nelse:\n    def score(no, such): ...",
    "with open('x') as file:\n    async def score(completions): ...",
    "try:\n    from fast import score\nexcept ImportError:\n    def score(no, such): ...",
    "@makes_a_reward\ndef score(no, such): ...",
]


@pytest.mark.parametrize("source", ACCEPTED)
def test_known_shapes_of_reward_functions_are_accepted(source: str) -> None:
    """EasyR1, TRL and plain forms."""
    assert check(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def score(): ...",
        "def score(*args): ...",
        "def score(*, answer): ...",
        "def score(**kwargs): ...",
        "def score(predict): ...",
        "def score(predict, difficulty): ...",
        "def score(answer, predict): ...",
        "def score(inputs, answer): ...",
        "if 1:\n    def score(no, such): ...",
    ],
)
@pytest.mark.parametrize("columns", [COLUMNS, None])
def test_a_function_of_no_known_interface_is_refused(
    source: str, columns: tuple[str, ...] | None
) -> None:
    """EasyR1#338: takes 1 positional argument but 2 were given, found after GPUs were paid for."""
    [problem] = check(source, columns=columns)
    assert "is no reward signature" in problem.reason
    assert "`(predict, ground_truth)`" in problem.fix


@pytest.mark.parametrize(
    ("source", "column", "fix"),
    [
        ("def score(completions, answr): ...", "answr", "Did you mean `answer`?"),
        ("def score(completions, *, zzz): ...", "zzz", "Columns: problem, answer, difficulty."),
        ("def score(completions, x, answer=1): ...", "x", "Columns: "),
        ("def score(completions, ground_truths): ...", "ground_truths", "Did you mean `ground_t"),
        ("def score(completions, predict): ...", "predict", "Columns: "),
        ("try:\n    def score(completions, answr): ...\nfinally:\n    pass", "answr", "Did you"),
    ],
)
def test_a_parameter_that_is_no_column_is_refused(source: str, column: str, fix: str) -> None:
    """ms-swift#7069: missing positional argument for a column, found during training."""
    [problem] = check(source)
    assert problem.value == column
    assert "is no column" in problem.reason
    assert problem.fix.startswith(fix)


def test_columns_are_not_judged_where_they_are_not_known() -> None:
    assert check("def score(completions, whatever): ...", columns=None) == []


def test_parameters_of_the_run_file_must_be_accepted_and_satisfy_the_function() -> None:
    source = "def score(completions, scale): ..."
    assert check(source, parameters=("scale",)) == []
    [missing, unknown] = check(source, parameters=("sclae",))
    assert "has no parameter `sclae`" in missing.reason
    assert unknown.value == "scale"
    assert check("def score(completions, **more): ...", parameters=("anything",)) == []
    assert check("def score(scale, completions): ...", parameters=("scale",)) == []


def test_a_long_chain_of_conditions_is_walked_and_not_recursed_into() -> None:
    chain = "if a == 0:\n    b = 0\n" + "".join(
        f"elif a == {n}:\n    b = {n}\n" for n in range(900)
    )
    assert check(f"{chain}else:\n    def score(completions): ...") == []


def test_modules_beside_reward_code_are_named_once_and_the_standard_library_s_not() -> None:
    source = """
import json, helper
import helper.deep
from tables.units import metre
from . import here
def score(completions):
    from late import one
"""
    assert list(sibling_modules("code/r.py", source)) == [
        "code/helper.py",
        "code/tables.py",
        "code/late.py",
    ]
    assert list(sibling_modules("r.py", "import helper")) == ["helper.py"]
    assert list(sibling_modules("r.py", "def (")) == []
