"""Run files for tests, as plain data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from contracts.problems import InvalidInputError, Problem

_RUN: dict[str, Any] = {
    "name": "tv",
    "model": {"source": "s3://bucket/model/"},
    "stages": [
        {
            "name": "warm-up",
            "method": "sft",
            "data": {"train": "s3://bucket/sft.jsonl"},
            "max_steps": 10,
        },
        {
            "name": "smooth",
            "method": "grpo",
            "data": {"train": "s3://bucket/train.jsonl"},
            "prompt": {"template": "{{ content }}"},
            "rewards": [
                {"name": "format", "function": "think_answer_format", "weight": 0.5},
                {"name": "mine", "file": "rewards.py", "function": "score", "weight": 0.5},
            ],
            "grpo": {"group_size": 4, "prompts_per_step": 8},
            "max_steps": 20,
        },
    ],
    "compute": {"ladder": [{"instance_type": "ml.g6e.48xlarge"}]},
}


def run_document() -> dict[str, Any]:
    """A small valid run of two stages; the caller may change it."""
    return copy.deepcopy(_RUN)


def put(document: Any, path: str, value: Any) -> Any:
    """Set `stages.1.grpo.group_size` and the like, making mappings on the way."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node = document
    for part in parents:
        node = node[part] if isinstance(part, int) else node.setdefault(part, {})
    node[last] = value
    return document


def refused(call: Callable[[], object]) -> tuple[Problem, ...]:
    """Problems of the InvalidInputError that ``call`` raises; none when it succeeds."""
    try:
        call()
    except InvalidInputError as error:
        return error.problems
    return ()
