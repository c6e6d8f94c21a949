"""The examples of docs/rewards.md do what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.rewards import RewardSpec
from tests.training import tiny
from tests.training.reward_models import save_classifier
from training_container.rewards.__main__ import main
from training_container.rewards.interface import PlaneResult, RewardRequest, Sample
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
GRID = json.dumps({"rows": 2, "cols": 2, "start": [0, 0], "goal": [0, 1]})


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def specs(first_name: str) -> list[RewardSpec]:
    for block in blocks("yaml"):
        entries = yaml.safe_load(block)["rewards"]
        if entries[0]["name"] == first_name:
            return [RewardSpec.model_validate_json(json.dumps(entry)) for entry in entries]
    raise AssertionError(f"no example begins with {first_name}")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for block in blocks("python"):
        name = re.match(r"# (\S+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    return tmp_path


def score(entries: list[RewardSpec], files: Path, *answers: tuple[str, Any]) -> PlaneResult:
    samples = [
        Sample(
            text,
            prompt=({"role": "user", "content": "?"},),
            response_length=60,
            ground_truth=truth,
            columns={"answer": truth},
        )
        for text, truth in answers
    ]
    with RewardPlane(entries, SourceContext(files, ("answer",), workers=1)) as plane:
        plane.prepare()
        return plane.score(RewardRequest(tuple(samples)))


def test_every_example_is_a_valid_reward_section() -> None:
    for block in blocks("yaml"):
        for entry in yaml.safe_load(block)["rewards"]:
            RewardSpec.model_validate_json(json.dumps(entry))


def test_built_in_functions(tmp_path: Path) -> None:
    right = "<think>a</think><answer>[{'action': ['RIGHT']}]</answer>"
    result = score(specs("format"), tmp_path, (right, GRID), ("RIGHT", GRID))
    assert result.scores_B_K == [[1, 1], [0, 0]]


def test_your_own_file(files: Path) -> None:
    result = score(specs("right"), files, ("please", "please"), ("no", "please"))
    assert result.scores_B_K == [[0.5, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert result.metrics["reward/easyr1/length"] == 60


def test_reward_model_in_the_job(tmp_path: Path) -> None:
    helpful = specs("helpful")[0]
    assert helpful.model is not None
    here = helpful.model.model_copy(update={"source": str(save_classifier(tmp_path / "rm"))})
    result = score([helpful.model_copy(update={"model": here})], tmp_path, ("RIGHT", None))
    assert result.sources[0].scores[0] != 0


def test_plugin_over_a_model(files: Path) -> None:
    entry = specs("confidence")[0]
    weights = {"weights": str(save_classifier(files / "rm"))}
    parameters = {**entry.parameters, "model": weights}
    result = score([entry.model_copy(update={"parameters": parameters})], files, ("RIGHT", None))
    (found,) = result.sources[0].scores
    assert found is not None
    assert 0 < found < 2


def test_the_page_names_every_built_in() -> None:
    from training_container.rewards.registry import built_ins

    assert [name for name in built_ins() if f"`{name}`" not in PAGE] == []


# --- the try-out command -------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    stage = tiny.grpo_stage()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tiny.run_document(stage)))
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.grpo_rows(tiny.all_pairs()[:3]))
    return path


def test_the_command_prints_a_table_of_scores(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = run_file.with_name("answers.jsonl")
    start, goal = tiny.all_pairs()[0]
    import random

    good = tiny.answer(start, goal, random.Random(0))
    answers.write_text(json.dumps(good) + "\n" + json.dumps({"completion": "bad"}) + "\n")
    rows = str(run_file.with_name("rows.jsonl"))
    assert main([str(run_file), "--rows", rows, "--answers", str(answers), "--limit", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["answer", "format", "grid"]
    assert table[1].split()[-2:] == ["1", "1"]
    assert table[2].split() == ["bad", "0", "0"]
    assert main([str(run_file), "--rows", rows, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["grid"]["weight"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "none.jsonl"], "no data at"),
        (["--rows", "rows.jsonl", "--stage", "sft"], "GRPO stages: strict"),
        (["--rows", "rows.jsonl", "--answers", "rows.jsonl"], "line 1: KeyError"),
    ],
)
def test_the_command_says_what_is_wrong(
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(run_file.parent)
    assert main([str(run_file), *arguments]) == 1
    assert message in capsys.readouterr().err
