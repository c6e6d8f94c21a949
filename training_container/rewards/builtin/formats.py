"""Rewards for the shape of a completion."""

from __future__ import annotations

import functools
import json
from typing import Any

from contracts.built_in_rewards import JsonSchema, ThinkAnswerFormat
from training_container.rewards.builtin.extract import answer_of
from training_container.rewards.builtin.grid import actions_of
from training_container.rewards.interface import Sample

__all__ = ["json_schema", "think_answer_format"]


def think_answer_format(sample: Sample, parameters: ThinkAnswerFormat) -> float:
    """1 when the whole completion is one think block, white space and one answer block, neither
    empty, else 0."""
    text = (parameters.prefill + sample.completion).strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    anchored = text.startswith("<think>") and text.endswith("</answer>")
    if not anchored or any(text.count(tag) != 1 for tag in tags):
        return 0.0
    thinking, _, rest = text.removeprefix("<think>").partition("</think>")
    between, _, answer = rest.removesuffix("</answer>").partition("<answer>")
    thought = bool(thinking.strip()) or parameters.allow_empty_thinking
    if between.strip() or not answer.strip() or not thought:
        return 0.0
    match parameters.answer:
        case "json":
            return float(_json(answer) is not _NOT_JSON)
        case "actions":
            return float(actions_of(answer) is not None)
    return 1.0


def json_schema(sample: Sample, parameters: JsonSchema) -> float:
    """1 when the answer is JSON that satisfies the schema, else 0; a code fence is allowed."""
    answer = answer_of(sample.completion, parameters.extract)
    value = _json(_unfenced(answer)) if answer is not None else _NOT_JSON
    if value is _NOT_JSON:
        return 0.0
    return float(_validator(json.dumps(parameters.schema_, sort_keys=True)).is_valid(value))


@functools.lru_cache(maxsize=32)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema))


_NOT_JSON = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _unfenced(text: str) -> str:
    lines = text.splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return text
