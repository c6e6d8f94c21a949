"""A run file with what it names on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.run_files import PreparedRun, prepare
from contracts.problems import InvalidInputError, Problem
from tests.unit.client.run_folders import run_folder


def problems_of(path: Path | dict[str, Any]) -> list[Problem]:
    with pytest.raises(InvalidInputError) as info:
        prepare(path)
    return list(info.value.problems)


def test_small_files_travel_with_the_modules_they_import_and_the_rest_is_uploaded(
    tmp_path: Path,
) -> None:
    prepared = prepare(run_folder(tmp_path))
    assert set(prepared.files) == {"prompt.jinja", "rewards.py", "helper.py"}
    assert [source.text for source in prepared.uploads()] == ["./model", "data/train.jsonl"]
    assert prepared.notes == ()


def test_addresses_replace_local_paths_and_nothing_else(tmp_path: Path) -> None:
    path = run_folder(tmp_path)
    prepared = prepare(path)
    uris = {source: f"s3://b/{index}" for index, source in enumerate(prepared.uploads())}
    document = prepared.with_sources(uris)
    expected = yaml.safe_load(path.read_text())
    expected["model"]["source"] = "s3://b/0"
    expected["stages"][0]["data"]["train"] = "s3://b/1"
    assert document == expected
    assert prepared.document["model"]["source"] == "./model"


def test_places_that_share_a_yaml_anchor_are_rewritten_each_on_its_own(tmp_path: Path) -> None:
    document = yaml.safe_load(run_folder(tmp_path).read_text())
    shared = {"train": "data/train.jsonl"}
    document["stages"][0]["data"] = shared
    document["stages"].append({"name": "two", "method": "sft", "data": shared, "max_steps": 1})
    prepared = prepare(document, folder=tmp_path)
    one, two = [source for source in prepared.uploads() if source.text == "data/train.jsonl"]
    rewritten = prepared.with_sources({one: "s3://b/one", two: "s3://b/two"})
    assert [stage["data"]["train"] for stage in rewritten["stages"]] == ["s3://b/one", "s3://b/two"]


def test_remote_sources_and_hub_ids_stay(tmp_path: Path) -> None:
    path = run_folder(tmp_path, data={"train": "s3://b/train.jsonl"})
    document = yaml.safe_load(path.read_text())
    document["model"] = {"source": "Qwen/Qwen3-8B"}
    prepared = prepare(document, folder=tmp_path)
    assert prepared.sources == ()
    assert "is taken for a hub id" in prepared.notes[0]
    document["model"] = {"source": "Qwen/Qwen3-8B", "revision": "abc"}
    assert prepare(document, folder=tmp_path).notes == ()
    document["model"] = {"source": "run:tv-20260102-abc123/smooth"}
    assert prepare(document, folder=tmp_path).notes == ()


def test_every_place_of_a_model_is_uploaded_when_it_is_local(tmp_path: Path) -> None:
    path = run_folder(tmp_path, rewards=[
        {"name": "orm", "weight": 1.0, "model": {"source": "./model", "adapter": "./model"}},
        {"name": "judge", "weight": 1.0, "judge": {"source": "./model"}},
    ])  # fmt: skip
    document = yaml.safe_load(path.read_text())
    document["deploy"] = {
        "instance_type": "ml.m5.large",
        "engine": {"lora_adapters": [{"name": "a", "source": "./model"}]},
    }
    prepared: PreparedRun = prepare(document, folder=tmp_path)
    assert [".".join(map(str, source.where)) for source in prepared.uploads()] == [
        "model.source",
        "stages.0.data.train",
        "stages.0.rewards.0.model.source",
        "stages.0.rewards.0.model.adapter",
        "stages.0.rewards.1.judge.source",
        "deploy.engine.lora_adapters.0.source",
    ]


def test_data_that_is_not_there_yet_is_a_note_to_validate_and_an_error_to_submit(
    tmp_path: Path,
) -> None:
    path = run_folder(tmp_path, data={"train": "data/later.jsonl"})
    prepared = prepare(path)
    assert prepared.notes == ("data/later.jsonl is not there yet; `grpohub submit` needs it",)
    with pytest.raises(
        InvalidInputError, match=r"stages\[0\]\.data\.train: is not on this machine"
    ):
        prepared.uploads()


@pytest.mark.parametrize(
    ("name", "text", "path", "words"),
    [
        ("rewards.py", None, "stages[0].rewards[0].file", "No such file"),
        ("rewards.py", "def score(completions:", "stages[0].rewards[0].file", "line 1"),
        ("rewards.py", "def other(c): ...", "stages[0].rewards[0].file", "is not defined"),
        ("rewards.py", "def score(completions, anser): ...", "stages[0].rewards[0].file",
         "Did you mean `answer`?"),
        ("rewards.py", b"\xff\xfe", "stages[0].rewards[0].file", "is not UTF-8"),
        ("prompt.jinja", None, "stages[0].prompt.template_file", "No such file"),
        ("prompt.jinja", "{{ contnt }}", "stages[0].prompt.template_file", "`content`"),
        ("prompt.jinja", "{% for x in %}", "stages[0].prompt.template_file", "line 1"),
        ("prompt.jinja", "\n{{ zzz }}", "stages[0].prompt.template_file", "Known: answer"),
        ("data/train.jsonl", "{}\n{", "stages[0].data.train", "line 2 is not JSON"),
        ("data/train.jsonl", "[1]", "stages[0].data.train", "line 1 is no object"),
        ("data/train.jsonl", "", "stages[0].data.train", "has no rows"),
        ("data/train.jsonl", '{"question": "?"}', "stages[0].data.problem", "is no column"),
    ],
)  # fmt: skip
def test_what_only_this_machine_can_know_is_checked(
    tmp_path: Path, name: str, text: str | bytes | None, path: str, words: str
) -> None:
    """EasyR1: a typo in `format_prompt` silently trained without a template; verl#758: a missing
    column was found after GPUs had started."""
    run = run_folder(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = [problem for problem in problems_of(run) if problem.path == path]
    assert any(words in str(problem) for problem in found), problems_of(run)


def test_a_file_outside_the_run_files_folder_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "in", prompt={"template_file": "../prompt.jinja"})
    (tmp_path / "prompt.jinja").write_text("{{ content }}")
    [problem] = problems_of(run)
    assert problem.fix == "Name a file beside or below the run file."


def test_inline_templates_and_judge_queries_are_checked_too(tmp_path: Path) -> None:
    judge = {"source": "s3://b/j/", "query_template": "{{ conversation }} {{ sreen }}"}
    run = run_folder(
        tmp_path,
        prompt={"template": "{{ content }} {{ scren }}"},
        rewards=[{"name": "j", "weight": 1.0, "judge": judge}],
    )
    assert {problem.path: problem.fix for problem in problems_of(run)} == {
        "stages[0].prompt.template": "Did you mean `screen`?",
        "stages[0].rewards[0].judge.query_template": "Did you mean `screen`?",
    }


def test_a_chat_template_of_transformers_is_accepted(tmp_path: Path) -> None:
    run = run_folder(tmp_path, prompt={"chat_template_file": "chat.jinja"})
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    assert "chat.jinja" in prepare(run).files
    (tmp_path / "chat.jinja").write_text("{% if %}")
    [problem] = problems_of(run)
    assert "template error in line 1" in problem.reason


@pytest.mark.parametrize("kind", ["json", "parquet", "folder"])
def test_columns_are_read_from_every_kind_of_data(tmp_path: Path, kind: str) -> None:
    run = run_folder(tmp_path / "run")
    rows = [{"problem": "1+1", "answer": "2"}]
    folder = tmp_path / "run/data"
    name = "data"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
        name = "data/x.parquet"
    elif kind == "json":
        (folder / "x.json").write_text(json.dumps(rows))
        name = "data/x.json"
    else:
        (folder / "train.jsonl").write_text(json.dumps(rows[0]))
    document = yaml.safe_load(run.read_text())
    document["stages"][0]["data"] = {"train": name, "answer": "anwser"}
    with pytest.raises(InvalidInputError, match="Did you mean `answer`") as info:
        prepare(document, folder=run.parent)
    # The template names a column that these rows lack, and that is reported, too.
    assert {p.value for p in info.value.problems} == {"anwser", "screen"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", b"{", "is not JSON"),
        ("x.json", b"{}", "is not a list of rows"),
        ("x.parquet", b"no", "is no parquet file"),
        ("x.csv", b"a,b", "has no file ending in"),
    ],
)
def test_data_of_another_form_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    run = run_folder(tmp_path, data={"train": name})
    (tmp_path / name).write_bytes(content)
    assert any(words in problem.reason for problem in problems_of(run))


def test_a_run_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    [absent] = problems_of(tmp_path / "nothing.yaml")
    assert absent.reason == "No such file or directory"
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    [binary] = problems_of(tmp_path / "run.yaml")
    assert "is not UTF-8" in binary.reason
