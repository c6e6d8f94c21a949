"""The run file: one YAML document that becomes a trained, deployed model.

`parse_run_spec` is the only way in. It reports every problem of a file at once, each with its path,
value, reason and fix; the CLI, the API and the container call it and so say the same.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from contracts.base import Strict
from contracts.compute import (
    CheckpointSpec,
    ComputeSpec,
    DeploySpec,
    RecoverySpec,
    TrackingSpec,
)
from contracts.instances import INSTANCES
from contracts.problems import InvalidInputError, Problem
from contracts.spec_checks import cross_field_problems
from contracts.spec_report import dotted, field_report
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


@functools.cache
def _schema() -> dict[str, Any]:
    return RunSpec.model_json_schema()


def run_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the run file, for editors and the OpenAPI page."""
    schema = copy.deepcopy(_schema())
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
        return yaml.load(text, Loader=_RunFileLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "(document)"
        problem = Problem(where, error.context, str(error.problem), "Mend the YAML at this place.")
        raise InvalidInputError([problem]) from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: PyYAML builds dates itself, and 2026-13-01 has no month.
        problem = Problem("(document)", None, str(error), "Send UTF-8 YAML text.")
        raise InvalidInputError([problem]) from error
    except RecursionError as error:
        problem = Problem("(document)", None, "is nested too deeply", "A run file is a few levels.")
        raise InvalidInputError([problem]) from error


def parse_run_spec(document: Any) -> RunSpec:
    """Validated run file from plain data (a YAML or JSON document already loaded).

    Raises:
        InvalidInputError: with all problems, field errors first and cross-field errors after them.
    """
    foreign = _not_json(document)  # first: what refers to itself cannot even be shown
    if foreign:
        raise InvalidInputError(foreign)
    if not isinstance(document, Mapping):
        problem = Problem("(document)", document, "is not a mapping of keys", "Start with `name:`.")
        raise InvalidInputError([problem])
    try:
        spec = _validate(document)
    except ValidationError as error:
        raise InvalidInputError(_all_problems(error, document)) from error
    problems = list(cross_field_problems(spec, known_instances=tuple(INSTANCES)))
    if problems:
        raise InvalidInputError(problems)
    return spec


def canonical_json(spec: RunSpec) -> str:
    """The frozen form whose sha256 addresses the run file: sorted keys, no spaces, all defaults."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def _validate(document: Any) -> RunSpec:
    # JSON mode is strict about scalars yet reads arrays as tuples, which Python mode refuses.
    return RunSpec.model_validate_json(json.dumps(document))


def _all_problems(error: ValidationError, document: Any) -> list[Problem]:
    """Field problems, and what can already be said across fields of the document as meant."""
    report = field_report(error.errors(include_url=False), document, _schema())
    try:
        spec = _validate(report.mended)
    except ValidationError:
        return list(report.problems)
    across = cross_field_problems(spec, known_instances=tuple(INSTANCES))
    sure = [p for p in across if not p.path.startswith(tuple(_related(report.unsure)))]
    return [*report.problems, *sure]


def _related(sections: frozenset[str]) -> Iterator[str]:
    """Sections whose rules read a doubtful value; limits of time couple two of them."""
    yield from sections
    if "compute" in sections:
        yield "checkpoint"


class _RunFileLoader(yaml.SafeLoader):
    """YAML silently lets a later duplicate key win; a setting without effect must be refused.

    Checked when a mapping is composed, because merging (`<<: *base`) legally overrides keys later.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"key `{key_node.value}` appears twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return node


# YAML 1.1 reads `1e-6` as text because it has no dot; every learning rate is written so.
_RunFileLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)

_MAX_DEPTH = 30
_MAX_VALUES = 20_000
"""A run file has a few hundred values; YAML aliases can stand for billions."""


def _not_json(document: Any) -> list[Problem]:
    """Values that JSON has not, such as YAML's dates, and documents out of all proportion."""
    problems: list[Problem] = []
    stack: list[tuple[tuple[int | str, ...], Any]] = [((), document)]
    count = 0
    while stack:
        path, value = stack.pop()
        count += 1
        if count > _MAX_VALUES or len(path) > _MAX_DEPTH:
            reason = f"has more than {_MAX_VALUES} values or {_MAX_DEPTH} levels"
            return [Problem("(document)", None, reason, "Write a run file without aliases.")]
        if isinstance(value, Mapping):
            problems += [
                Problem(dotted(path), key, "has a key that is not text", "Quote the key.")
                for key in value
                if not isinstance(key, str)
            ]
            stack += [((*path, str(key)), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            stack += [((*path, index), item) for index, item in enumerate(value)]
        elif value is not None and not isinstance(value, bool | int | float | str):
            kind = type(value).__name__
            problems.append(
                Problem(dotted(path), str(value), f"is read as a {kind}", "Quote it as text.")
            )
    return problems
