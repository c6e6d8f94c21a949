"""`grpohub rewards test`: every kind of source on real rows, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from client import trials
from client.cli import app
from tests.training import tiny
from tests.training.reward_models import save_classifier
from tests.training.test_rewards_judge import Service, ok

TEMPLATE = "Row {{ number }}: {{ content }}"


def grpohub(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(item) for item in arguments])


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    made.reply = lambda body: ok("[[8]]" if "good" in str(body["messages"]) else "no idea")
    yield made
    made.stop()


def write_run(folder: Path, rewards: list[dict[str, Any]]) -> Path:
    """A run file with rows beside it."""
    stage = tiny.grpo_stage(rewards=rewards, prompt={"template": TEMPLATE, "system": "Be brief."})
    stage["data"] = {"train": "rows.jsonl"}
    document = tiny.run_document(stage)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    rows = [{"problem": "2+2", "answer": "4", "number": 1}, {"problem": "3+3", "answer": "6",
            "number": 2}]  # fmt: skip
    tiny.write_jsonl(folder / "rows.jsonl", rows)
    return path


def test_every_kind_of_source_is_tried_and_none_hides_another(
    service: Service, tmp_path: Path
) -> None:
    save_classifier(tmp_path / "rm")
    tiny.save_model(tmp_path / "judge", hidden=32)
    (tmp_path / "mine.py").write_text(
        "def f(completions, messages, number):\n"
        "    assert messages[0][0]['content'] == 'Be brief.'\n"
        "    pairs = zip(messages, number)\n"
        "    return [float(m[1]['content'].startswith(f'Row {n}')) for m, n in pairs]\n"
        "def broken(completions): return 1 / 0\n"
    )
    local = {"source": "./judge", "query_template": "RIGHT", "temperature": 0, "max_tokens": 4}
    served = {"url": service.url}
    parser = {"kind": "brackets", "maximum": 10.0}
    rewards: list[dict[str, Any]] = [
        {"name": "exact", "function": "exact_match", "weight": 1.0},
        {"name": "mine", "file": "mine.py", "function": "f", "weight": 1.0},
        {"name": "broken", "file": "mine.py", "function": "broken", "weight": 1.0},
        {"name": "rm", "model": {"source": "./rm", "device": "cpu"}, "weight": 0.0},
        {"name": "local", "judge": local, "weight": 1.0},
        {"name": "served", "judge": {"endpoint": served, "parser": parser}, "weight": 1.0},
        {"name": "down", "judge": {"endpoint": {"url": "http://127.0.0.1:1/v1"}}, "weight": 1.0},
    ]  # fmt: skip
    run = write_run(tmp_path, rewards)
    (tmp_path / "answers.jsonl").write_text('"4"\n{"completion": "good"}\n')
    found = grpohub("--json", "rewards", "test", run, "--answers", tmp_path / "answers.jsonl")
    assert found.exit_code == 1, found.output
    view = json.loads(found.stdout)
    sources = {source["name"]: source for source in view["sources"]}
    assert {name: source["state"] for name, source in sources.items() if name != "rm"} == {
        "exact": "scored", "mine": "scored", "broken": "failed",
        "local": "failed", "served": "scored", "down": "failed",
    }  # fmt: skip
    assert sources["exact"]["scores"] == [1.0, 0.0]
    assert sources["mine"]["scores"] == [1.0, 1.0]
    assert [failure["kind"] for failure in sources["local"]["failures"]] == ["unparsable"] * 2
    assert sources["served"]["scores"] == [None, 0.8]
    assert sources["served"]["failures"][0]["kind"] == "unparsable"
    assert "ZeroDivisionError" in sources["broken"]["failures"][0]["detail"]
    assert "vllm serve" in sources["down"]["reason"]
    assert all(isinstance(score, float) for score in sources["rm"]["scores"])
    assert view["rewards"] == pytest.approx([1 + 1, 1 + 0.8])
    assert any("Row 1: 2+2" in str(request["messages"]) for request in service.requests)


def test_the_table_shows_scores_reasons_and_containment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(predict, ground_truth):\n"
        "    return None if not predict else float(predict == ground_truth)\n"
    )
    run = write_run(tmp_path, [
        {"name": "mine", "file": "mine.py", "function": "f", "weight": 0.5},
        {"name": "format", "function": "think_answer_format", "weight": 1.0},
    ])  # fmt: skip
    found = grpohub("rewards", "test", run, "--rows", "1")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["answer", "mine", "format", "reward"], ["4", "1", "0", "0.5"], ["–", "0", "0"],
    ]  # fmt: skip
    assert any(line.startswith("  network: none") for line in lines)


def test_a_reward_file_alone_is_tried(tmp_path: Path) -> None:
    file, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    tiny.write_jsonl(rows, [{"problem": "2+2", "answer": "4", "said": "five"}])
    file.write_text("def f(completions, answer): return [len(c) for c in completions]")
    found = grpohub("--json", "rewards", "test", file, "--data", rows, "--completions", "said")
    assert json.loads(found.stdout)["sources"][0]["scores"] == [4.0]
    file.write_text("def f(completions): pass\ndef g(completions): return [2]")
    found = grpohub("rewards", "test", file, "--data", rows)
    assert found.exit_code == 2
    assert "--function" in found.output
    found = grpohub("rewards", "test", file, "--data", rows, "--function", "g")
    assert "wrong_count" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "none.jsonl"], "No such file"),
        (["--stage", "sft"], "GRPO stages: strict"),
        (["--answers", "rows.jsonl"], "KeyError('completion')"),
        (["--completions", "said"], "is no column"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    run = write_run(tmp_path, [{"name": "exact", "function": "exact_match", "weight": 1.0}])
    monkeypatch.chdir(tmp_path)
    found = grpohub("rewards", "test", run, *arguments)
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


def test_without_the_training_side_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, [{"name": "exact", "function": "exact_match", "weight": 1.0}])
    monkeypatch.setattr(trials, "_NEEDED", ("no_such_module",))
    found = grpohub("rewards", "test", run)
    assert found.exit_code == 1
    output = " ".join(found.output.split())
    assert "grpohub[train]" in output
    assert "no_such_module" in output
