"""A user's reward file: which interface its function follows, told by its signature."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from contracts.reward_files import (
    EASYR1_BATCH,
    EASYR1_ONE,
    GROUND_TRUTH,
    INPUTS,
    PREDICT,
    PROVIDED_COLUMNS,
    check_reward_file,
)
from training_container.rewards.interface import RewardConfigError, Sample
from training_container.rewards.scorer import Scorer
from training_container.rewards.user_file import UserFunction, load_user_function

SAMPLES = [
    Sample(
        completion=text,
        prompt=[{"role": "user", "content": "2+2?"}],
        response_length=len(text),
        truncated=text == "5!",
        ground_truth="4",
        columns={"level": level, "answer": "4"},
    )
    for text, level in (("4", 1), ("5!", 2))
]


def load(
    folder: Path, source: str, function: str = "reward", columns: tuple[str, ...] = (), **kw: Any
) -> UserFunction:
    path = folder / "rewards.py"
    path.write_text(source)
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    return load_user_function(path, sha256, function, kw, columns or ("level", "answer"))


def outcomes(function: UserFunction) -> list[Any]:
    found = dict(Scorer(function).outcomes(SAMPLES))
    return [found[index].get("failed") or found[index]["value"] for index in range(len(found))]


@pytest.mark.parametrize(
    ("style", "source"),
    [
        (
            "columns",
            "def reward(completions, ground_truth, **kw):\n"
            "    return [float(c == t) for c, t in zip(completions, ground_truth)]",
        ),
        (
            "columns",
            "async def reward(completions, answer):\n"
            "    return [float(c == t) for c, t in zip(completions, answer)]",
        ),
        (
            "columns",  # huggingface/trl#7213: an async callable object was never awaited
            "class Judge:\n"
            "    async def __call__(self, completions, **kw):\n"
            "        return [float(c == t) for c, t in zip(completions, kw['ground_truth'])]\n"
            "reward = Judge()",
        ),
        (
            "columns",  # ms-swift's ORM: a class
            "class reward:\n"
            "    def __call__(self, completions, messages, is_truncated, **kw):\n"
            "        assert messages[0][-1] == {'role': 'assistant', 'content': '4'}\n"
            "        return [1 - int(t) for t in is_truncated]",
        ),
        (
            "easyr1_batch",
            "REWARD_TYPE = 'batch'\n"
            "def reward(reward_inputs):\n"
            "    return [{'overall': float(r['response'] == r['ground_truth']), 'n': 1}\n"
            "            for r in reward_inputs]",
        ),
        (
            "easyr1_batch",
            "def reward(reward_inputs, scale=1.0):\n"
            "    return [{'overall': scale * (r['response_length'] == 1)} for r in reward_inputs]",
        ),
        (
            "easyr1",
            "REWARD_TYPE = 'sequential'\n"
            "def reward(r):\n"
            "    return {'overall': float(r['response'] == r['ground_truth'])}",
        ),
        (
            "easyr1",
            "def reward(reward_input: dict) -> dict:\n"
            "    return {'overall': 2.0 - reward_input['response_length']}",
        ),
        ("plain", "def reward(predict, ground_truth):\n    return predict == ground_truth"),
        ("plain", "async def reward(response, answer):\n    return response == answer"),
        (
            "plugin",
            "def reward(inputs):\n"
            "    return [float(r['messages'][-1]['content'] == r['answer']) for r in inputs]",
        ),
        (
            "environment",
            "class reward:\n"
            "    def reset(self, row): self.right = row['ground_truth']\n"
            "    def step(self, text): return float(text == self.right)",
        ),
        (
            "environment",
            "class reward:\n"
            "    async def reset(self, row): self.right = row['answer']\n"
            "    async def step(self, text): return 'seen', float(text == self.right), True, {}",
        ),
    ],
)
def test_each_interface_is_recognised_and_called_as_its_own_platform_does(
    tmp_path: Path, style: str, source: str
) -> None:
    function = load(tmp_path, source)
    assert function.style == style
    assert outcomes(function) == [1.0, 0.0]


def test_parameters_of_the_run_file_reach_the_function_and_the_class(tmp_path: Path) -> None:
    by_function = "def reward(completions, bonus):\n    return [bonus] * len(completions)"
    assert outcomes(load(tmp_path, by_function, bonus=0.5)) == [0.5, 0.5]
    by_class = (
        "class reward:\n"
        "    def __init__(self, bonus): self.bonus = bonus\n"
        "    def __call__(self, predict, ground_truth): return self.bonus"
    )
    assert outcomes(load(tmp_path, by_class, bonus=0.25)) == [0.25, 0.25]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): pass", "no function 'reward'"),
        ("reward = 3", "is a int"),
        ("def reward(a, b, c): pass", "accepted signatures"),
        ("def reward(): pass", "accepted signatures"),
        ("def reward(completions, solution): pass", "asks for 'solution'.*columns: .*level"),
        ("REWARD_TYPE = 'stream'\ndef reward(x): pass", "REWARD_TYPE is 'stream'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_what_would_do(
    tmp_path: Path, source: str, message: str
) -> None:
    """hiyouga/EasyR1#338 and modelscope/ms-swift#7069: found by a TypeError in mid-training."""
    with pytest.raises(RewardConfigError, match=message):
        load(tmp_path, source)


SIGNATURES = [
    *(f"completions, {name}" for name in PROVIDED_COLUMNS),
    *(f"{first}, {second}" for first in PREDICT for second in GROUND_TRUTH),
    *(EASYR1_BATCH, EASYR1_ONE, INPUTS, "completions, level", "*, completions, level", "scale=1"),
    *("completions, ground_truths", "completions, response", "completions, level, nothing"),
    *("predict, truth", "predict, level", "answer, predict", "predict", "row", "*rows", "**rows"),
    *("inputs, level", "inputs, scale=1", "reward_inputs, level", "reward_input, answer", ""),
    *("predict, answer, scale", "predict, answer, scale=1", "response=1", "completions, **rows"),
]


@pytest.mark.parametrize("head", ["", "REWARD_TYPE = 'batch'\n"])
@pytest.mark.parametrize("signature", SIGNATURES)
def test_what_is_refused_at_submit_time_is_what_the_job_would_refuse(
    tmp_path: Path, signature: str, head: str
) -> None:
    source = f"{head}def reward({signature}): return 1"
    columns = ("level", "answer")
    refused = check_reward_file(source, "reward", path="r.py", columns=columns)
    if refused:
        with pytest.raises(RewardConfigError):
            load(tmp_path, source, columns=columns)
    else:
        load(tmp_path, source, columns=columns)


def test_every_column_that_is_promised_is_given(tmp_path: Path) -> None:
    names = ", ".join(PROVIDED_COLUMNS)
    source = f"def reward(completions, {names}):\n    return [{names}]"
    columns = load(tmp_path, source).call(SAMPLES)
    assert all(None not in column for column in columns)


def test_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardConfigError, match="no parameter 'bonsu'"):
        load(tmp_path, "def reward(completions, bonus=1): pass", bonsu=1)
    with pytest.raises(RewardConfigError, match="cannot be made"):
        load(tmp_path, "class reward:\n    def __init__(self): pass", bonus=1)


def test_a_file_that_is_not_the_frozen_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def reward(predict, ground_truth): return 1")
    with pytest.raises(RewardConfigError, match="the run froze"):
        load_user_function(path, "0" * 64, "reward", {}, ())


def test_two_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    functions = []
    for name, value in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        functions.append(load(folder, f"def reward(predict, ground_truth): return {value}"))
    assert [outcomes(function) for function in functions] == [[1, 1], [2, 2]]


def test_only_the_columns_that_are_named_are_read(tmp_path: Path) -> None:
    named = load(tmp_path, "def reward(completions, level, ground_truth): pass")
    assert named.columns == ("level",)
    assert load(tmp_path, "def reward(completions, **kw): pass").columns is None
    assert load(tmp_path, "def reward(predict, ground_truth): pass").columns == ()


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("[1.0]", ["wrong_count", "returned 1 scores for 2 completions"]),
        ("[1.0, 2.0, 3.0]", ["wrong_count", "returned 3 scores for 2 completions"]),
        ("1.0", ["wrong_type", "returned a float, not a list of scores"]),
        ("None", ["wrong_type", "returned a NoneType, not a list of scores"]),
        ("['a', 'b']", ["wrong_type", "a score of type str"]),
        ("[{'score': 1}] * 2", ["wrong_type", "a dict without `overall` (has score)"]),
        ("[float('inf')] * 2", ["not_finite", "a score of inf"]),
        ("[None, None]", None),
        ("[float('nan')] * 2", None),
        ("[True, True]", 1.0),
        ("__import__('numpy').ones(2, 'float32')", 1.0),
        ("list(__import__('numpy').ones(2, 'float32'))", 1.0),
        ("[{'overall': 1, 'note': 'x', 'n': 2}] * 2", 1.0),
    ],
)
def test_what_a_function_may_return(tmp_path: Path, returned: str, wanted: Any) -> None:
    """huggingface/trl#6533: one score for many was broadcast. EasyR1: a short list became 0."""
    function = load(tmp_path, f"def reward(completions):\n    return {returned}")
    assert outcomes(function) == [wanted, wanted]


def test_one_bad_sample_fails_alone_in_a_per_sample_function(tmp_path: Path) -> None:
    source = "def reward(predict, ground_truth):\n    return 1 / (predict == '4')"
    first, second = outcomes(load(tmp_path, source))
    assert first == 1.0
    assert second == ["exception", "ZeroDivisionError: division by zero (line 2 of reward)"]
