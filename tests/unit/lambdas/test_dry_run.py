"""A user's reward function in the sandbox of the dry run."""

from __future__ import annotations

from typing import Any

import pytest

from lambdas.logic.dry_run import dry_run

SAMPLES = [{"completion": "4", "ground_truth": "4"}, {"completion": "5", "ground_truth": "4"}]


def run(file: str, seconds: float = 60) -> Any:
    return dry_run({"file": file, "function": "f", "samples": SAMPLES}, seconds=seconds)


@pytest.mark.parametrize(
    "file",
    [
        "def f(completions, ground_truth): return [*map(str.__eq__, completions, ground_truth)]",
        "def f(completions, **columns): return [c == '4' for c in completions]",
        "def f(predict, ground_truth): return float(predict == ground_truth)",
        "def f(reward_inputs): return [{'overall': i['response'] == '4'} for i in reward_inputs]",
        "REWARD_TYPE = 'sequential'\ndef f(x): return {'overall': x['response'] == '4'}",
        "async def f(completions): return [c == '4' for c in completions]",
        "class f:\n    def __call__(self, completions): return [c == '4' for c in completions]",
        "def f(inputs): return [r['messages'][-1]['content'] == '4' for r in inputs]",
    ],
)
def test_every_accepted_signature_is_called_as_the_trainer_calls_it(file: str) -> None:
    assert run(file).scores == [1.0, 0.0]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("def f(completions): return [1]", "1 scores for 2 samples"),
        ("def f(completions): return [float('nan')] * 2", "not a finite number"),
        ("def f(completions):\n    return [1 / 0]", "ZeroDivisionError at line 2"),
        ("import sys\ndef f(completions): sys.exit(3)", "SystemExit"),
        ("def f(completions): return ['x' * 10**10]", "MemoryError"),
        ("import os\ndef f(completions): os._exit(7)", "ended with code 7"),
        ("def f(a, b, c): return 1", "is no reward signature"),
    ],
)
def test_what_goes_wrong_is_said(file: str, words: str) -> None:
    found = run(file)
    assert found.scores is None
    assert words in (found.error or "")


def test_a_function_that_never_returns_is_killed() -> None:
    found = run("def f(completions):\n    while True: pass", seconds=2)
    assert found.error == "did not finish within 2 s"


def test_the_process_has_no_credentials_and_what_it_prints_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    file = (
        "import os\n"
        "def f(completions):\n"
        "    print('{\"scores\": [9, 9]}')\n"
        "    return [float('AWS_SECRET_ACCESS_KEY' in os.environ)] * 2"
    )
    assert run(file).scores == [0.0, 0.0]
