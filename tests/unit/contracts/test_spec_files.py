"""Files a run file names."""

from __future__ import annotations

from contracts.run_spec import RunSpec, parse_run_spec
from contracts.spec_files import check_named_files, named_files
from tests.unit.contracts.documents import put, run_document

REWARD = "def score(completions, **columns): ..."


def run_with_files() -> RunSpec:
    document = run_document()
    put(document, "stages.0.prompt.template_file", "sft.jinja")
    put(document, "stages.1.prompt.chat_template_file", "chat.jinja")
    put(document, "stages.1.rewards.0", {
        "name": "orm", "weight": 1.0, "model": {"source": "s3://b/m/", "template_file": "rm.jinja"}
    })  # fmt: skip
    put(document, "deploy", {
        "instance_type": "ml.g5.xlarge", "engine": {"chat_template_file": "serve.jinja"}
    })  # fmt: skip
    return parse_run_spec(document)


FILES = {
    "sft.jinja": "{{ content }}",
    "chat.jinja": "{{ messages }}",
    "rm.jinja": "x",
    "serve.jinja": "x",
    "rewards.py": REWARD,
}


def test_every_named_file_is_found_with_its_place_and_kind() -> None:
    found = [(named.path, named.name, named.kind) for named in named_files(run_with_files())]
    assert found == [
        ("stages[0].prompt.template_file", "sft.jinja", "template"),
        ("stages[1].prompt.chat_template_file", "chat.jinja", "chat template"),
        ("stages[1].rewards[0].model.template_file", "rm.jinja", "chat template"),
        ("stages[1].rewards[1].file", "rewards.py", "reward"),
        ("deploy.engine.chat_template_file", "serve.jinja", "chat template"),
    ]
    assert [named.name for named in named_files(parse_run_spec(run_document()))] == ["rewards.py"]


def test_files_that_fit_have_no_problem_and_further_files_are_allowed() -> None:
    assert check_named_files(run_with_files(), {**FILES, "lib/helper.py": ""}) == []


def test_a_file_that_was_not_sent_is_named_with_the_nearest_one() -> None:
    files = {**FILES, "reward.py": REWARD}
    del files["rewards.py"], files["serve.jinja"]
    [near, far] = check_named_files(run_with_files(), files)
    assert near.fix == "Did you mean `reward.py`?"
    assert far.path == "deploy.engine.chat_template_file"


def test_what_is_wrong_inside_a_file_is_found() -> None:
    files = {**FILES, "rewards.py": "def other(): ...", "sft.jinja": "Answer!"}
    [template, reward] = check_named_files(run_with_files(), files)
    assert "prints no variable" in template.reason
    assert reward.reason == "is not defined in this file"


def test_a_file_that_would_leave_the_runs_prefix_is_refused() -> None:
    names = ["../x.py", "/x.py", "a\\b.py", "a//b.py"]
    problems = check_named_files(run_with_files(), {**FILES, **dict.fromkeys(names, "")})
    assert [problem.value for problem in problems] == names
