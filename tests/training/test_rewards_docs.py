"""The examples of docs/rewards.md do what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from client.cli import app
from contracts.rewards import RewardSpec
from tests.training import tiny
from tests.training.reward_models import save_classifier
from tests.training.test_rewards_judge import Service, asked, ok
from tests.training.test_rewards_judge import service as service  # noqa: PLC0414 (a fixture)
from tests.training.test_rewards_run import Classifier
from tests.training.test_rewards_run import served as served  # noqa: PLC0414 (a fixture)
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


def test_reward_model_served(served: Classifier, tmp_path: Path) -> None:
    entry = specs("helpful")[1]
    assert entry.model is not None
    (result,) = score([at(entry, "model", served.url)], tmp_path, ("four", None)).sources
    assert result.scores == [4.0]


def test_judge_outside_combined_with_a_rule(service: Service, tmp_path: Path) -> None:
    rule, equivalent, _ = specs("rule")
    service.reply = lambda body: ok("[[YES]]" if "about 4" in asked(body) else "[[NO]]")
    entries = [rule, at(equivalent, "judge", service.url)]
    answers = (("4", "4"), ("about 4", "4"), ("5", "4"))
    result = score(entries, tmp_path, *answers)
    assert result.scores_B_K == [[1, 1], [0, 1], [0, 0]]  # the larger of judge and rule
    assert result.fused() == [1, 1, 0]
    assert "Reference: 4" in asked(service.requests[0])


def test_judge_in_the_job(tmp_path: Path) -> None:
    """An untrained one: it is asked twice an answer, and what it stammers is no score."""
    quality = specs("rule")[2]
    assert quality.judge is not None
    weights = str(tiny.save_model(tmp_path / "judge", hidden=32))
    short = quality.judge.model_copy(update={"source": weights, "max_tokens": 4})
    entry = quality.model_copy(update={"judge": short, "max_failure_rate": 1.0})
    (result,) = score([entry], tmp_path, ("RIGHT", None)).sources
    assert result.scores == [None]
    assert result.failures[0].kind == "unparsable"
    assert result.metrics["reward/quality/judge_tokens"] > 2


def test_synchronous_judge_inside_a_file(service: Service, files: Path) -> None:
    (entry,) = specs("asked")
    entry = entry.model_copy(update={"parameters": {"url": service.url}})
    service.reply = lambda body: ok(f"Reward: {0.75 if 'please' in asked(body) else 0.25}")
    (result,) = score([entry], files, ("please", None), ("now", None)).sources
    assert result.scores == [0.75, 0.25]


def at(entry: RewardSpec, kind: str, url: str) -> RewardSpec:
    """The page's entry with the address of a service that is there."""
    part = getattr(entry, kind)
    endpoint = part.endpoint.model_copy(update={"url": url})
    return entry.model_copy(update={kind: part.model_copy(update={"endpoint": endpoint})})


@pytest.mark.long
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


def test_the_try_out_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The first console block, typed as it stands beside the files it names."""
    block = blocks("console")[0]
    command = block.splitlines()[0].removeprefix("$ grpohub ").split()
    stage = {
        "name": "only",
        "method": "grpo",
        "data": {"train": "train.jsonl"},
        "rewards": yaml.safe_load(blocks("yaml")[0])["rewards"],
        "max_steps": 1,
    }
    document = {
        "name": "page",
        "model": {"source": "hub/model"},
        "stages": [stage],
        "compute": {"ladder": [{"instance_type": "ml.g6e.2xlarge"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    row = {"problem": "From (0, 0) to (0, 1)?", "answer": GRID}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    right = "<think>a</think><answer>[{'action': ['RIGHT']}]</answer>"
    (tmp_path / "answers.jsonl").write_text(json.dumps(right) + "\n" + json.dumps("RIGHT"))
    command = [str(tmp_path / part) if "." in part else part for part in command]
    printed = CliRunner().invoke(app, command).stdout.splitlines()
    shown = [line for line in block.splitlines()[1:] if line]
    timeless = re.compile(r"\d+\.\d+ s")
    assert [timeless.sub("", line).rstrip() for line in printed if line] == [
        timeless.sub("", line).rstrip() for line in shown
    ]
