"""Requests and responses of the HTTP API."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contracts.api import ChatRequest, CreateRunRequest, ProblemDocument, RecipeList


@pytest.mark.parametrize("body", [{"spec": {"name": "a"}}, {"yaml": "name: a"}])
def test_a_run_is_given_as_data_or_as_text(body: dict[str, Any]) -> None:
    assert CreateRunRequest.model_validate(body).files == {}


@pytest.mark.parametrize("body", [{}, {"spec": {}, "yaml": ""}])
def test_a_run_given_twice_or_not_at_all_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one of"):
        CreateRunRequest.model_validate(body)


def test_an_unknown_key_of_a_request_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        CreateRunRequest.model_validate({"yaml": "a", "dry": True})


def test_a_newer_hub_may_answer_more_than_the_client_knows() -> None:
    answer = {"recipes": ["tv"], "next_token": "later", "since": 3}
    assert RecipeList.model_validate(answer) == RecipeList(recipes=["tv"])


def test_a_chat_is_passed_on_with_everything_openai_knows() -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user"}], "logit_bias": {"1": 2}})
    assert chat.model_dump()["logit_bias"] == {"1": 2}
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": []})


def test_a_problem_document_reads_back_equal() -> None:
    document = ProblemDocument(
        type="urn:grpohub:problem:x", title="t", status=422, detail="d", request_id="r"
    )
    assert ProblemDocument.model_validate_json(document.model_dump_json()) == document
