"""Reward sources: exactly one kind each, and settings only where they have an effect."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contracts.rewards import EndpointSpec, JudgeParserSpec, JudgeReward, ModelReward, RewardSpec

SOURCE: dict[str, Any] = {"name": "a", "weight": 1.0}
JUDGE = {"source": "s3://b/judge/"}
MODEL = {"source": "s3://b/model/"}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"function": "length"}, "function"),
        ({"file": "r.py", "function": "score"}, "file"),
        ({"model": MODEL}, "model"),
        ({"judge": JUDGE}, "judge"),
    ],
)
def test_a_source_is_of_the_kind_it_names(fields: dict[str, Any], kind: str) -> None:
    assert RewardSpec.model_validate({**SOURCE, **fields}).kind == kind


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "give one of `function`, `file`, `model`, `judge`"),
        ({"file": "r.py"}, "`file` needs `function`"),
        ({"model": MODEL, "judge": JUDGE}, "not model and judge"),
        ({"file": "r.py", "function": "f", "judge": JUDGE}, "not file and judge"),
        ({"model": MODEL, "function": "f"}, "`function` has no effect beside `model`"),
        ({"judge": JUDGE, "parameters": {"a": 1}}, "`parameters` has no effect beside `judge`"),
        ({"function": "length", "network": True}, "`network` has an effect only with `file`"),
        ({"function": "a-b"}, "must be a Python name"),
    ],
)
def test_a_source_that_is_not_one_thing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("`", ".")):
        RewardSpec.model_validate({**SOURCE, **fields})


def test_a_weight_is_always_written() -> None:
    with pytest.raises(ValidationError, match="weight"):
        RewardSpec.model_validate({"name": "a", "function": "length"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of"),
        ({"url": "https://x/v1", "sagemaker_endpoint": "e"}, "exactly one of"),
    ],
)
def test_an_endpoint_has_one_address(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EndpointSpec.model_validate(fields)
    assert EndpointSpec(url="https://x/v1").max_concurrency == 16


@pytest.mark.parametrize("kind", [ModelReward, JudgeReward])
def test_a_model_or_judge_is_here_or_elsewhere_but_not_both(kind: Any) -> None:
    endpoint = {"url": "https://x/v1"}
    assert kind.model_validate({"endpoint": endpoint}).source is None
    for fields in ({}, {"source": "s3://b/m/", "endpoint": endpoint}):
        with pytest.raises(ValidationError, match="exactly one of `source` and `endpoint`"):
            kind.model_validate(fields)


@pytest.mark.parametrize("fields", [{"combine": "max"}, {"combine_with": "rule"}])
def test_a_judge_combines_with_a_named_source_or_not_at_all(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="go together"):
        JudgeReward.model_validate({**JUDGE, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"minimum": 1.0}, "must be above"),
        ({"kind": "regex"}, "`pattern` goes with kind `regex`"),
        ({"pattern": "x"}, "`pattern` goes with kind `regex`"),
        ({"kind": "regex", "pattern": "(x"}, "is no regular expression"),
        ({"kind": "regex", "pattern": "x"}, "needs a group around the number"),
        ({"kind": "json"}, "`field` goes with kind `json`"),
        ({"field": "x"}, "`field` goes with kind `json`"),
    ],
)
def test_a_parser_has_what_its_kind_needs_and_no_more(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JudgeParserSpec.model_validate(fields)
    assert JudgeParserSpec(kind="regex", pattern="(x)").pattern == "(x)"
    assert JudgeParserSpec(kind="json", field="score").field == "score"
