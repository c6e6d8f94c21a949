"""The question a new endpoint is asked: from the run file, else from the run's validation data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment

from contracts.run_spec import RunSpec
from lambdas.errors import ObjectMissingError
from lambdas.logic.records import RunRecord
from lambdas.logic.specs import deploy_spec

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["SmokePrompt", "smoke_prompt"]

_FIRST_ROW = 256 * 1024
_BUILT_IN = "What is 2 + 2? Answer with one number."
AnyStage = Any


@dataclass(frozen=True, slots=True)
class SmokePrompt:
    """Chat messages, their last user text, and where they come from."""

    messages: list[dict[str, Any]]
    source: Literal["run file", "validation data", "built in"]

    @property
    def text(self) -> str:
        content = self.messages[-1].get("content", "")
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def smoke_prompt(hub: Hub, run: RunRecord, spec: RunSpec) -> SmokePrompt:
    """The prompt of the run file; else the one the trainer left; else the first row of JSON Lines
    data.

    Only when there is none of these (parquet data and a trainer that left nothing) a built-in
    question is asked.
    """
    deploy = deploy_spec(run, spec)
    if deploy is not None and deploy.smoke_test.prompt is not None:
        return SmokePrompt([_user(deploy.smoke_test.prompt)], "run file")
    index = len(spec.stages) - 1
    layout = run.layout.stage(index, spec.stages[index].name)
    try:
        left = hub.bucket.read_json(layout.sample_prompt)
        return SmokePrompt(left["messages"], "validation data")
    except ObjectMissingError:
        messages = _first_row_messages(hub, run, spec.stages[index])
    if messages:
        return SmokePrompt(messages, "validation data")
    return SmokePrompt([_user(_BUILT_IN)], "built in")


def _first_row_messages(hub: Hub, run: RunRecord, stage: AnyStage) -> list[dict[str, Any]]:
    data = stage.data
    uri = data.validation or data.train
    try:
        line = hub.bucket.first_bytes(uri, _FIRST_ROW).split(b"\n", 1)[0]
        row = json.loads(line)
    except (ObjectMissingError, ValueError):  # Not JSON Lines (parquet, or one JSON array).
        return []
    if not isinstance(row, dict):
        return []
    if data.messages is not None:
        turns: list[dict[str, Any]] = row.get(data.messages) or []
        while turns and turns[-1].get("role") == "assistant":
            turns = turns[:-1]
        return turns
    if not isinstance(row.get(data.problem), str):
        return []
    content = _render(hub, run, stage, row)
    system = [{"role": "system", "content": stage.prompt.system}] if stage.prompt.system else []
    return [] if content is None else [*system, _user(content)]


def _render(hub: Hub, run: RunRecord, stage: AnyStage, row: dict[str, Any]) -> str | None:
    prompt = stage.prompt
    content: str = row[stage.data.problem]
    if prompt.template_file is not None:
        template = hub.bucket.read(run.layout.code(prompt.template_file)).decode()
    elif prompt.template is not None:
        template = prompt.template
    else:
        return content
    try:
        variables = {**row, "content": content}
        return SandboxedEnvironment().from_string(template.strip()).render(**variables)
    except TemplateError:  # The trainer would have refused the run; here it only costs the prompt.
        return None


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
