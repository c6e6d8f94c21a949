"""The run file: one YAML document that becomes a trained, deployed model.

`parse_run_spec` is the only way in. It reports every problem of a file at once, each with its path,
value, reason and fix; the CLI, the API and the container call it and so say the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from contracts.base import Strict
from contracts.compute import (
    CheckpointSpec,
    ComputeSpec,
    DeploySpec,
    RecoverySpec,
    TrackingSpec,
)
from contracts.instances import INSTANCES
from contracts.problems import InvalidInputError, Problem, nearest
from contracts.spec_checks import cross_field_problems
from contracts.stages import Stage

__all__ = [
    "ModelSpec",
    "RunSpec",
    "canonical_json",
    "load_run_yaml",
    "parse_run_spec",
    "run_schema",
]


class ModelSpec(Strict):
    """The base model."""

    source: str
    """S3 prefix, hub id, `run:<run_id>/<stage>` of an earlier run, or a local folder (uploaded)."""
    revision: str | None = None
    """Revision of a hub id."""
    hub_token_secret: str | None = None
    """Secrets Manager id or ARN of a hub token; resolved in the container."""
    trust_remote_code: bool = False
    """Run model code from the source, in the container only."""


class RunSpec(Strict):
    """A run: base model, stages, compute, recovery, deployment."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,26}[a-z0-9])?$")]
    """Lower case, at most 28 characters: it begins every AWS name of the run."""
    model: ModelSpec
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=10)]
    compute: ComputeSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    deploy: DeploySpec | None = None
    """Absent: the run ends with the exported model."""
    tracking: TrackingSpec = TrackingSpec()
    tags: dict[str, str] = Field(default_factory=dict, max_length=40)
    """Put on every AWS resource of the run."""


def run_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the run file, for editors and the OpenAPI page."""
    schema = RunSpec.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "GRPO Hub run file",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def load_run_yaml(text: str) -> Any:
    """YAML text to plain data.

    Raises:
        InvalidInputError: when the text is not YAML, naming line and column.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "(document)"
        problem = Problem(where, error.context, str(error.problem), "Mend the YAML at this place.")
        raise InvalidInputError([problem]) from error
    except yaml.YAMLError as error:
        problem = Problem("(document)", None, str(error), "Send UTF-8 YAML text.")
        raise InvalidInputError([problem]) from error


def parse_run_spec(document: Any) -> RunSpec:
    """Validated run file from plain data (a YAML or JSON document already loaded).

    Raises:
        InvalidInputError: with all problems, field errors first and cross-field errors after them.
    """
    if not isinstance(document, Mapping):
        problem = Problem("(document)", document, "is not a mapping of keys", "Start with `name:`.")
        raise InvalidInputError([problem])
    try:
        # JSON mode is strict about scalars yet reads arrays as tuples, which Python mode refuses.
        text = json.dumps(document, allow_nan=True)
    except (TypeError, ValueError) as error:
        problem = Problem("(document)", None, f"holds a value JSON has not: {error}", "Quote it.")
        raise InvalidInputError([problem]) from error
    try:
        spec = RunSpec.model_validate_json(text)
    except ValidationError as error:
        problems = [_problem(detail, document) for detail in error.errors(include_url=False)]
        raise InvalidInputError(problems) from error
    problems = list(cross_field_problems(spec, known_instances=tuple(INSTANCES)))
    if problems:
        raise InvalidInputError(problems)
    return spec


def canonical_json(spec: RunSpec) -> str:
    """The frozen form whose sha256 addresses the run file: sorted keys, no spaces, all defaults."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML silently lets a later duplicate key win; a setting without effect must be refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    key, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _problem(detail: ErrorDetails, document: Any) -> Problem:
    """A pydantic error as a report line: our words, our paths, the nearest valid key."""
    location = tuple(_without_tags(detail["loc"], document))
    path = _dotted(location)
    kind = detail["type"]
    value = detail["input"]
    if kind == "extra_forbidden":
        valid = _valid_keys(location[:-1])
        guess = nearest(location[-1], valid)
        fix = f"Did you mean `{guess}`?" if guess else f"Valid keys: {', '.join(valid)}."
        return Problem(path, value, f"unknown key `{location[-1]}`", fix)
    if kind == "missing":
        return Problem(path, None, "is required", f"Add `{location[-1]}`.")
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "literal_error":
        options = [
            part.strip(" '") for part in context["expected"].replace(" or ", ", ").split(",")
        ]
        guess = nearest(value, options)
        fix = f"Did you mean `{guess}`?" if guess else f"Choose one of {', '.join(options)}."
        return Problem(path, value, "is not one of the valid names", fix)
    if kind.startswith("union_tag"):
        return Problem(
            f"{path}.method", value, "unknown or missing stage method", "Choose `sft` or `grpo`."
        )
    if kind == "value_error":
        return Problem(path, value, str(context["error"]), "Mend this entry.")
    if kind == "string_pattern_mismatch":
        return Problem(
            path,
            value,
            "has a character or length that is not allowed",
            f"It must match {context['pattern']}.",
        )
    message = detail["msg"]
    return Problem(path, value, message[:1].lower() + message[1:], "Correct the value.")


def _without_tags(location: tuple[int | str, ...], document: Any) -> Iterator[int | str]:
    """Pydantic puts union tags (`grpo`, `sft`) and branch names into paths; users have no such
    keys."""
    node = document
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(node, Mapping):
            if part not in node and not last:
                continue
            if part not in node and last and isinstance(part, str) and part in {"sft", "grpo"}:
                continue
            node = node.get(part)
        elif isinstance(node, list | tuple) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        elif not isinstance(part, int):
            continue
        yield part


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "(document)"


def _valid_keys(location: tuple[int | str, ...]) -> list[str]:
    """Keys that the models allow at ``location``, found by walking the schema."""
    schema = RunSpec.model_json_schema()
    definitions = schema["$defs"]
    nodes = [schema]
    for part in location:
        nodes = [child for node in nodes for child in _children(node, part, definitions)]
    keys: dict[str, None] = {}
    for node in nodes:
        keys.update(dict.fromkeys(node.get("properties", {})))
    return list(keys)


def _children(
    node: dict[str, Any], part: int | str, definitions: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
    if child is not None:
        yield from _resolve(child, definitions)


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in node:
        yield from _resolve(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
        return
    branches = node.get("anyOf") or node.get("oneOf")
    if branches:
        for branch in branches:
            yield from _resolve(branch, definitions)
        return
    yield node
