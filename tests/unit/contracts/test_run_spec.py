"""The run file: one report with everything that is wrong, each with path, value, reason and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.problems import InvalidInputError, Problem
from contracts.run_spec import (
    RunSpec,
    canonical_json,
    load_run_yaml,
    parse_run_spec,
    run_schema,
)
from tests.unit.contracts.documents import put, refused, run_document

EXAMPLES = sorted(Path(__file__).parents[3].glob("examples/*/run.yaml"))


def problems_of(document: Any) -> list[Problem]:
    with pytest.raises(InvalidInputError) as info:
        parse_run_spec(document)
    return list(info.value.problems)


def only_problem(document: Any) -> Problem:
    [problem] = problems_of(document)
    return problem


def test_a_minimal_run_file_gets_the_documented_defaults() -> None:
    spec = parse_run_spec(run_document())
    stage = spec.stages[1]
    assert stage.method == "grpo"
    assert stage.optimizer.learning_rate == 1e-6
    assert spec.stages[0].optimizer.learning_rate == 1e-5
    assert (stage.grpo.clip_low, stage.grpo.clip_high) == (0.2, 0.2)
    assert stage.grpo.kl is not None
    assert (stage.grpo.kl.estimator, stage.grpo.kl.coefficient) == ("k3", 0.01)
    assert spec.compute.ladder[0].spot
    assert spec.deploy is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert parse_run_spec(load_run_yaml(path.read_text())).stages


def test_there_are_the_three_examples() -> None:
    names = {path.parent.name for path in EXAMPLES}
    assert names >= {"tv_navigation", "translation_quality", "math"}


# (path of what is set, its value, path reported, words of the report)
FIELD_CASES = [
    ("max_step", 3, "max_step", "unknown key `max_step`"),
    ("stages.0.max_stepz", 3, "stages[0].max_stepz", "Did you mean `max_steps`?"),
    ("stages.1.max_stepz", 3, "stages[1].max_stepz", "Did you mean `max_steps`?"),
    ("stages.0.grpo", {}, "stages[0].grpo", "unknown key `grpo`"),
    ("stages.1.grpo.grop_size", 3, "stages[1].grpo.grop_size", "Did you mean `group_size`?"),
    ("stages.1.grpo.zzz", 3, "stages[1].grpo.zzz", "Valid keys: group_size, prompts_per_step"),
    ("stages.1.grpo.kl.coefficent", 1, "stages[1].grpo.kl.coefficent", "`coefficient`"),
    ("stages.1.rewards.1.wieght", 1, "stages[1].rewards[1].wieght", "Did you mean `weight`?"),
    ("deploy", {"instance_typ": 1}, "deploy.instance_typ", "Did you mean `instance_type`?"),
    ("stages.1.grpo.advantage", "grop", "stages[1].grpo.advantage", "Did you mean `grpo`?"),
    ("stages.1.grpo.loss", "x", "stages[1].grpo.loss", "ppo_clip, gspo, cispo, sapo"),
    ("stages.1.method", "grop", "stages[1].method", "Did you mean `grpo`?"),
    ("stages.1.method", "dpo", "stages[1].method", "Choose `sft` or `grpo`."),
    ("stages.1.method", 7, "stages[1].method", "Choose `sft` or `grpo`."),
    ("stages.0", "sft", "stages[0]", "should be an object"),
    ("name", "TV", "name", "must match"),
    ("name", 7, "name", "valid string"),
    ("stages.1.grpo.group_size", 1, "stages[1].grpo.group_size", "greater than or equal to 2"),
    ("stages.1.grpo.group_size", "8", "stages[1].grpo.group_size", "valid integer"),
    ("stages.1.grpo.group_size", True, "stages[1].grpo.group_size", "valid integer"),
    ("stages.1.grpo.clip_dual", 0.5, "stages[1].grpo.clip_dual", "greater than 1"),
    ("stages.1.optimizer.learning_rate", float("nan"), "stages[1].optimizer.learning_rate",
     "finite number"),
    ("stages.1.lora.target_modules", 5, "stages[1].lora.target_modules",
     "valid string, or input should be a valid array"),
    ("stages.1.lora.target_modules", ["q", 5], "stages[1].lora.target_modules[1]", "valid string"),
    ("stages.1.rewards", [], "stages[1].rewards", "at least 1 item"),
    ("compute.ladder", [], "compute.ladder", "at least 1 item"),
    ("stages", [], "stages", "at least 1 item"),
    ("stages", "sft", "stages", "valid array"),
    ("stages.0.max_steps", None, "stages[0]", "give `max_steps` or `epochs`"),
    ("stages.1.prompt.template_file", "x.jinja", "stages[1].prompt", "give one of"),
    ("stages.1.rewards.0.function", "no name", "stages[1].rewards[0].function", "Python name"),
    ("tags", {"a": 1}, "tags.a", "valid string"),
    ("deploy", {"instance_type": "ml.m5.large", "engine": {"lora_adapters": [
        {"name": "default", "source": "s3://b/a/"}]}}, "deploy.engine.lora_adapters[0].name",
     "is what requests call the base model"),
    ("deploy", {"instance_type": "ml.m5.large", "endpoint_name": "a--"}, "deploy.endpoint_name",
     "must match"),
    ("deploy", {"instance_type": "ml.m5.large", "endpoint_name": "a" * 64}, "deploy.endpoint_name",
     "at most 63"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value", "path", "words"), FIELD_CASES)
def test_a_wrong_field_is_reported_once_where_the_user_wrote_it(
    where: str, value: Any, path: str, words: str
) -> None:
    """A typo in a preset once silently chose another reward. Unknown names are errors."""
    document = put(run_document(), where, value)
    found = [p for p in problems_of(document) if p.path == path]
    assert len(found) == 1
    assert words in str(found[0])


@pytest.mark.parametrize("where", [case[0] for case in FIELD_CASES])
def test_one_mistake_makes_one_line(where: str) -> None:
    [case] = [case for case in FIELD_CASES if case[0] == where][:1]
    expected = 2 if case[2] == "deploy.instance_typ" else 1  # the required key is missing, too
    assert len(problems_of(put(run_document(), where, case[1]))) == expected


def test_a_method_under_a_misspelt_key_is_found_there() -> None:
    document = run_document()
    document["stages"][1]["methd"] = document["stages"][1].pop("method")
    problem = only_problem(document)
    assert (problem.path, problem.value) == ("stages[1].methd", "grpo")
    assert "Did you mean `method`?" in str(problem)


@pytest.mark.parametrize(
    "where", ["name", "model", "stages", "compute", "model.source", "stages.1.data.train"]
)
def test_a_missing_key_is_named(where: str) -> None:
    document = run_document()
    *parents, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    node: Any = document
    for part in parents:
        node = node[part]
    del node[last]
    problem = only_problem(document)
    assert problem.reason == "is required"
    assert problem.fix == f"Add `{last}`."


# (what is set, path reported, words of the report)
CROSS_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"compute.ladder.0.instance_type": "ml.g6e.48xlrge"}, "compute.ladder[0].instance_type",
     "Did you mean `ml.g6e.48xlarge`?"),
    ({"compute.ladder.0.instance_type": "x"}, "compute.ladder[0].instance_type", "such as"),
    ({"compute.max_wait_hours": 100.0, "compute.ladder.0.spot": False}, "compute.max_wait_hours",
     "only with a Spot rung"),
    ({"compute.max_wait_hours": 1.0}, "compute.max_wait_hours", "is below max_runtime_hours"),
    # Boise-State-Development/agentcore-public-stack#1024: the time limit came before any save.
    ({"checkpoint.every_minutes": 60.0, "compute.max_runtime_hours": 1.0},
     "checkpoint.every_minutes", "no checkpoint would be saved"),
    ({"stages.1.name": "warm-up"}, "stages[1].name", "is used twice"),
    ({"stages.1.start_from": {"stage": "warmup"}}, "stages[1].start_from.stage",
     "Did you mean `warm-up`?"),
    ({"stages.1.start_from": {"stage": "zzz"}}, "stages[1].start_from.stage", "Earlier stages:"),
    ({"stages.0.start_from": {"stage": "smooth"}}, "stages[0].start_from.stage",
     "This is the first stage."),
    ({"stages.0.lora": {}, "stages.1.start_from": {"stage": "warm-up", "step": 9}},
     "stages[1].start_from.step", "merged model"),
    ({"stages.1.start_from": {"stage": "warm-up", "step": 11}}, "stages[1].start_from.step",
     "ends at step 10"),
    ({"stages.1.data.answer": "problem"}, "stages[1].data", "named for two purposes"),
    ({"stages.0.data.answer": None}, "stages[0].data.answer", "nothing to train on"),
    ({"stages.1.data.messages": "chat"}, "stages[1].prompt", "no effect on a `messages` column"),
    ({"stages.1.prompt.template": "Answer!"}, "stages[1].prompt.template", "prints no variable"),
    ({"stages.1.rewards.1.name": "format"}, "stages[1].rewards[1].name", "is used twice"),
    ({"stages.1.rewards.0.function": "think_answer_fromat"}, "stages[1].rewards[0].function",
     "Did you mean `think_answer_format`?"),
    ({"stages.1.rewards.0.function": "zzz"}, "stages[1].rewards[0].function", "Built in: "),
    ({"stages.1.rewards.0.weight": 0.0, "stages.1.rewards.1.weight": 0.0}, "stages[1].rewards",
     "every weight is 0"),
    ({"stages.1.rewards.1": {"name": "judge", "weight": 1.0, "judge": {
        "source": "s3://b/judge/", "combine": "max", "combine_with": "judge"}}},
     "stages[1].rewards[1].judge.combine_with", "Name one of format."),
    ({"stages.1.grpo.mini_batch_prompts": 3}, "stages[1].grpo.mini_batch_prompts",
     "does not divide"),
    ({"stages.1.grpo.advantage": "dr_grpo", "stages.1.grpo.scale_rewards": "batch"},
     "stages[1].grpo.scale_rewards", "or use `none`."),
    ({"stages.1.grpo.kl": {"estimator": "k1"}}, "stages[1].grpo.kl.estimator",
     "keep `k1` with `placement: reward`"),
    ({"stages.1.grpo.loss": "sapo", "stages.1.grpo.clip_high": 0.28},
     "stages[1].grpo.clip_high", "has no effect with loss `sapo`"),
    ({"stages.1.grpo.loss": "gspo", "stages.1.grpo.clip_dual": 2.0},
     "stages[1].grpo.clip_dual", "it goes with `ppo_clip`"),
    ({"stages.1.grpo.sapo_tau_positive": 2.0}, "stages[1].grpo.sapo_tau_positive",
     "it goes with `sapo`"),
    ({"stages.1.grpo.advantage": "gdpo", "stages.1.rewards": [
        {"name": "a", "function": "exact_match", "weight": 1.0}]}, "stages[1].grpo.advantage",
     "at least two reward sources"),
    ({"stages.1.grpo.advantage": "rloo", "stages.1.grpo.reward_fusion": "normalize_then_sum"},
     "stages[1].grpo.reward_fusion", "has no effect"),
    ({"stages.1.grpo.overlong": {"buffer": 2048}}, "stages[1].grpo.overlong.buffer",
     "is not below max_response_length"),
    ({"stages.1.micro_batch_tokens": 4095}, "stages[1].micro_batch_tokens", "must fit"),
    ({"tags": {"aws:x": "1"}}, "tags.aws:x", "reserved"),
    ({"tags": {"grpohub:run": "1"}}, "tags.grpohub:run", "reserved"),
    ({"tags": {"k": "v" * 257}}, "tags.k", "256 characters"),
    ({"tags": {"": "v"}}, "tags.", "AWS allows"),
    ({"deploy": {"instance_type": "ml.g5.xlrge"}}, "deploy.instance_type", "`ml.g5.xlarge`"),
    ({"deploy": {"instance_type": "ml.g5.xlarge", "fallback_instance_types": ["x"]}},
     "deploy.fallback_instance_types[0]", "is not an instance type"),
    ({"deploy": {"instance_type": "ml.g5.xlarge", "autoscaling": {
        "min_instances": 3, "max_instances": 2}}}, "deploy.autoscaling.max_instances",
     "is below min_instances"),
    ({"deploy": {"instance_type": "ml.g5.xlarge", "engine": {"lora_adapters": [
        {"name": "a", "source": "s3://b/a/"}, {"name": "a", "source": "s3://b/b/"}]}}},
     "deploy.engine.lora_adapters", "used twice"),
    ({"deploy": {"instance_type": "ml.g5.xlarge", "engine": {"lora_adapters": [
        {"name": f"a{n}", "source": "s3://b/" + "x" * 90} for n in range(12)]}}},
     "deploy.engine", "holds 1024"),
    ({"deploy": {"instance_type": "ml.g5.xlarge", "instance_count": 3, "autoscaling": {}}},
     "deploy.instance_count", "is above autoscaling.max_instances (2)"),
    ({"model.trust_remote_code": True, "deploy": {"instance_type": "ml.g5.xlarge"}},
     "deploy.engine.trust_remote_code", "Set it to true"),
    ({"tags": {"k": "a;b"}}, "tags.k", "a character that AWS refuses"),
    ({"stages.1.data.images": "images"}, "stages[1].data.images", "models of text"),
    ({"stages.1.validation.every_steps": 5}, "stages[1].validation.every_steps",
     "no effect without `data.validation`"),
    ({"stages.0.data.validation": "s3://b/v.jsonl", "stages.0.validation.temperature": 1.0},
     "stages[0].validation.temperature", "samples nothing"),
    ({"stages.0.prompt.max_prompt_length": 9}, "stages[0].prompt.max_prompt_length",
     "Use `sft.max_length`"),
    ({"stages.1.optimizer.min_lr_ratio": 0.5}, "stages[1].optimizer.min_lr_ratio",
     "choose `linear` or `cosine`"),
    ({"stages.1.grpo.kl": {"target": 0.5}}, "stages[1].grpo.kl.target", "`control: adaptive`"),
    ({"model.revision": "main"}, "model.revision", "only with a hub id"),
    ({"model.source": "run:old-1/x", "model.hub_token_secret": "hub"}, "model.hub_token_secret",
     "only with a hub id"),
    ({"stages.1.rewards.1": {"name": "m", "weight": 1.0, "model": {
        "source": "s3://b/m/", "revision": "v1"}}}, "stages[1].rewards[1].model.revision",
     "only with a hub id"),
    ({"stages.1.rewards.1": {"name": "j", "weight": 1.0, "judge": {
        "endpoint": {"url": "https://j/v1"}, "revision": "v1"}}},
     "stages[1].rewards[1].judge.revision", "only with a hub id"),
    ({"checkpoint.keep_best": {"metric": "validation/reward"}}, "checkpoint.keep_best.metric",
     "is computed by no stage"),
    ({"stages.1.data.validation": "s3://b/v.jsonl", "checkpoint.keep_best": {
        "metric": "validation/rewrd"}}, "checkpoint.keep_best.metric",
     "Did you mean `validation/reward`?"),
    ({"checkpoint.keep_best": {"metric": "zzz"}}, "checkpoint.keep_best.metric", "Computed are"),
    ({"stages.1.optimizer.betas": [1.5, 0.9]}, "stages[1].optimizer.betas[0]", "less than 1"),
    ({"stages.1.rollout.temperature": 3.0}, "stages[1].rollout.temperature", "equal to 2"),
    ({"stages.1.max_steps": 10**40}, "stages[1].max_steps", "99999999"),
    ({"stages.1.rewards.0.timeout_seconds": 7200.0}, "stages[1].rewards[0].timeout_seconds",
     "equal to 1000"),
    ({"compute.ladder": [{"instance_type": "ml.g5.xlarge"}] * 11}, "compute.ladder", "at most 10"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "words"), CROSS_CASES)
def test_what_no_single_field_can_know_is_checked(
    changes: dict[str, Any], path: str, words: str
) -> None:
    """Settings that have no effect, and references to what is not there, are rejected."""
    document = run_document()
    for where, value in changes.items():
        put(document, where, value)
    problem = only_problem(document)
    assert problem.path == path
    assert words in str(problem)


VALID_CHANGES: list[dict[str, Any]] = [
    {"stages.1.start_from": {"stage": "warm-up", "step": 10}},
    {"stages.1.start_from": {"stage": "warm-up"}},
    {"stages.0.max_steps": None, "stages.0.epochs": 1,
     "stages.1.start_from": {"stage": "warm-up", "step": 9000}},
    {"compute.max_wait_hours": 72.0},
    {"stages.1.data.messages": "chat", "stages.1.prompt.template": None},
    {"stages.0.data.messages": "chat", "stages.0.data.answer": None},
    {"stages.1.grpo.advantage": "gdpo", "stages.1.grpo.reward_fusion": "normalize_then_sum"},
    {"stages.1.grpo.mini_batch_prompts": 4, "stages.1.grpo.overlong": {"buffer": 100}},
    {"stages.1.lora.target_modules": ["q_proj", "v_proj"]},
    {"stages.1.rewards.1": {"name": "judge", "weight": 1.0, "judge": {
        "source": "s3://b/judge/", "combine": "max", "combine_with": "format"}}},
    {"deploy": {"instance_type": "ml.g5.xlarge", "autoscaling": {
        "min_instances": 0, "max_instances": 1}}},
    {"deploy": {"instance_type": "ml.g5.xlarge", "engine": {"lora_adapters": [
        {"name": "a", "source": "s3://b/a/"}]}}},
    {"model.trust_remote_code": True,
     "deploy": {"instance_type": "ml.g5.xlarge", "engine": {"trust_remote_code": True}}},
    {"tags": {"team": "search", "Kostenstelle Süd": "a-b_c.d:e/f=g+h@i"}},
    {"model": {"source": "org/name", "revision": "main", "hub_token_secret": "hub"}},
    {"stages.1.grpo.kl": {"target": 0.5, "control": "adaptive"}},
    {"stages.1.optimizer": {"min_lr_ratio": 0.5, "lr_scheduler": "linear"}},
    {"stages.1.data.validation": "s3://b/v.jsonl", "stages.1.validation": {"temperature": 1.0},
     "checkpoint.keep_best": {"metric": "validation/reward/mine"}},
    {"checkpoint.keep_best": {"metric": "loss", "mode": "min"}},
]  # fmt: skip


@pytest.mark.parametrize("changes", VALID_CHANGES)
def test_what_is_legal_is_accepted(changes: dict[str, Any]) -> None:
    document = run_document()
    for where, value in changes.items():
        put(document, where, value)
    parse_run_spec(document)


def test_one_report_holds_all_problems_those_across_fields_included() -> None:
    document = run_document()
    for where, value in {
        "model.trust_remote_cod": True,
        "stages.0.max_stepz": 5,
        "stages.1.grpo.group_size": 1,
        "stages.1.grpo.mini_batch_prompts": 3,
        "stages.0.data.answer": None,
        "compute.ladder.0.instance_type": "ml.g6e.48xlrge",
    }.items():
        put(document, where, value)

    problems = problems_of(document)

    assert {problem.path for problem in problems} == {
        "model.trust_remote_cod",
        "stages[0].max_stepz",
        "stages[0].data.answer",
        "stages[1].grpo.group_size",
        "compute.ladder[0].instance_type",
        # The wrong group size puts rules about this stage off: they would speak of a default.
    }


def test_a_rule_about_a_value_nobody_gave_is_not_reported() -> None:
    document = put(run_document(), "compute.max_runtime_hours", "many")
    put(document, "compute.max_wait_hours", 1.0)
    put(document, "checkpoint.every_minutes", 1e6)
    assert [problem.path for problem in problems_of(document)] == ["compute.max_runtime_hours"]


def test_a_mistyped_key_still_counts_as_what_was_meant() -> None:
    document = run_document()
    del document["compute"]["ladder"][0]["instance_type"]
    put(document, "compute.ladder.0.instance_typ", "ml.g6e.48xlrge")
    paths = [problem.path for problem in problems_of(document)]
    assert "compute.ladder[0].instance_typ" in paths
    assert "compute.ladder[0].instance_type" in paths


def test_two_wrong_items_of_one_list_are_both_reported() -> None:
    document = put(run_document(), "stages.1.rewards", [7, {"name": "a", "function": "length"}])
    assert {p.path for p in problems_of(document)} == {
        "stages[1].rewards[0]",
        "stages[1].rewards[1].weight",
    }


def test_a_wrong_list_item_is_left_out_with_its_list_and_not_renumbered() -> None:
    document = put(run_document(), "deploy", {"instance_type": "x", "fallback_instance_types": [7]})
    assert {p.path for p in problems_of(document)} == {"deploy.fallback_instance_types[0]"}


@pytest.mark.parametrize("document", [None, [], "text", 7])
def test_a_document_that_is_no_mapping_is_refused(document: Any) -> None:
    assert only_problem(document).fix == "Start with `name:`."


def test_a_report_names_value_and_fix_in_words_and_as_data() -> None:
    document = put(run_document(), "stages.1.grpo.advantage", "grop")
    problem = only_problem(document)
    assert str(problem) == (
        "stages[1].grpo.advantage: is not one of the valid names (found 'grop'). "
        "Did you mean `grpo`?"
    )
    assert problem.as_dict() == {
        "path": "stages[1].grpo.advantage",
        "value": "'grop'",
        "reason": "is not one of the valid names",
        "fix": "Did you mean `grpo`?",
    }
    with pytest.raises(InvalidInputError, match="run file: 1 problem\n"):
        parse_run_spec(document)


def test_a_long_value_is_shown_short() -> None:
    problem = only_problem(put(run_document(), "name", "x" * 5000))
    assert len(problem.as_dict()["value"]) == 120


# YAML


def test_an_exponent_without_a_dot_is_a_number() -> None:
    """PyYAML alone reads 1e-6 as text."""
    values = "[1e-6, 1E3, +2e1, -1.5e-3, .5e1, 5, 1e, e5, 1e-6x]"
    assert load_run_yaml(f"x: {values}") == {
        "x": [1e-6, 1000.0, 20.0, -0.0015, 5.0, 5, "1e", "e5", "1e-6x"]
    }


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\na: 2", "line 2, column 1", "key `a` appears twice"),
        ("x: {b: 1, b: 2}", "line 1, column 11", "key `b` appears twice"),
        ("a: [1,\nb: 2", "line 2, column 5", "expected"),
        ("a: \tb: c", "line 1", ""),
        ("{a: b}: c", "line 1, column 1", "unhashable"),
        ("a: !!python/object:os.system x", "line 1", "could not determine a constructor"),
        ("a: \x00", "(document)", "not allowed"),
        ("a: 2026-13-01", "(document)", "month"),
        ("[" * 20_000, "(document)", "nested too deeply"),
    ],
)
def test_broken_yaml_is_reported_with_its_place(text: str, where: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as info:
        load_run_yaml(text)
    [problem] = info.value.problems
    assert problem.path.startswith(where)
    assert words in problem.reason


def test_anchors_and_merge_keys_work_and_later_keys_override() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b, y: 3}\nd: [*b]"
    loaded = load_run_yaml(text)
    assert loaded["c"] == {"x": 1, "y": 3}
    assert loaded["d"] == [{"x": 1, "y": 2}]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("name: 2026-01-01", "name", "is read as a date"),
        ("stages: [{name: !!binary aGk=}]", "stages[0].name", "is read as a bytes"),
        ("tags: {1: x}", "tags", "key that is not text"),
        ("a: &a [*a]", "(document)", "30 levels"),
        ("&a [*a]", "(document)", "30 levels"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,"
         "*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]", "(document)", "20000 values"),
    ],
)  # fmt: skip
def test_yaml_that_is_no_json_document_is_refused(text: str, path: str, words: str) -> None:
    """A few lines of YAML aliases can stand for billions of values."""
    problem = only_problem(load_run_yaml(text))
    assert problem.path == path
    assert words in problem.reason


# Properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
PATHS = [
    "name", "model", "stages", "stages.0", "stages.1", "stages.1.data", "stages.1.rewards",
    "stages.1.rewards.0", "stages.1.grpo", "stages.1.grpo.kl", "stages.1.lora", "stages.1.method",
    "stages.1.start_from", "compute", "compute.ladder", "compute.ladder.0", "deploy", "tags",
    "tracking", "checkpoint", "recovery",
]  # fmt: skip


@given(where=st.sampled_from(PATHS), value=json_values)
def test_any_value_anywhere_is_accepted_or_reported_never_a_crash(where: str, value: Any) -> None:
    problems = refused(lambda: parse_run_spec(put(run_document(), where, value)))
    assert all(problem.path and problem.reason and problem.fix for problem in problems)


@given(text=st.text(max_size=60))
def test_any_text_is_yaml_or_reported(text: str) -> None:
    assert all(problem.reason for problem in refused(lambda: load_run_yaml(text)))


def test_a_run_file_is_frozen_through_and_through() -> None:
    spec = parse_run_spec(run_document())
    with pytest.raises(ValidationError, match="frozen"):
        spec.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        spec.stages[0].data.train = "s3://elsewhere"


@pytest.mark.parametrize(
    ("setting", "on_gpu", "on_cpu"),
    [("auto", True, False), (True, True, True), (False, False, False)],
)
def test_activations_are_recomputed_on_gpu_unless_one_says_otherwise(
    setting: bool | str, on_gpu: bool, on_cpu: bool
) -> None:
    document = run_document()
    document["stages"][0]["gradient_checkpointing"] = setting
    stage = parse_run_spec(document).stages[0]
    assert (stage.recomputes(on_gpu=True), stage.recomputes(on_gpu=False)) == (on_gpu, on_cpu)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (0.2, 0.2, "group")),
        ({"loss": "gspo"}, (3e-4, 4e-4, "group")),
        ({"loss": "gspo", "clip_high": 1e-3}, (3e-4, 1e-3, "group")),
        ({"loss": "cispo", "advantage": "rloo"}, (1.0, 4.0, "none")),
        ({"advantage": "rloo", "scale_rewards": "batch"}, (0.2, 0.2, "batch")),
        ({"advantage": "dr_grpo"}, (0.2, 0.2, "none")),
        ({"kl": {"estimator": "k1", "placement": "reward"}}, (0.2, 0.2, "group")),
    ],
)
def test_clip_range_and_scale_default_to_what_was_published(
    settings: dict[str, Any], wanted: tuple[float, float, str]
) -> None:
    changed = put(run_document(), "stages.1.grpo", settings)
    grpo = parse_run_spec(changed).stages[1].grpo
    assert (grpo.clip_low, grpo.clip_high, grpo.scale_rewards) == wanted
    text = canonical_json(parse_run_spec(changed))
    assert parse_run_spec(json.loads(text)) == parse_run_spec(changed)


def test_the_canonical_form_is_one_text_per_meaning_and_reads_back_equal() -> None:
    first = parse_run_spec(run_document())
    reordered = dict(reversed(run_document().items()))
    explicit = put(run_document(), "stages.1.grpo.clip_low", 0.2)
    text = canonical_json(first)
    assert (
        text
        == canonical_json(parse_run_spec(reordered))
        == canonical_json(parse_run_spec(explicit))
    )
    assert parse_run_spec(json.loads(text)) == first
    assert canonical_json(parse_run_spec(put(run_document(), "stages.1.seed", 2))) != text


def test_the_schema_accepts_the_examples_and_refuses_an_unknown_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(run_schema())
    validator.check_schema(run_schema())
    for path in EXAMPLES:
        validator.validate(load_run_yaml(path.read_text()))
    assert not validator.is_valid(put(run_document(), "stages.0.max_stepz", 1))


def test_every_key_of_the_run_file_says_what_it_means() -> None:
    schema = run_schema()
    models = {"RunSpec": schema, **schema["$defs"]}
    mute = [
        f"{name}.{key}"
        for name, model in models.items()
        for key, node in model.get("properties", {}).items()
        if not node.get("description") and "$ref" not in json.dumps(node)
    ]
    assert mute == []
    assert all(model.get("description") for model in models.values())


def test_python_callers_get_the_same_strictness() -> None:
    with pytest.raises(ValidationError):
        RunSpec.model_validate({**run_document(), "extra": 1})
