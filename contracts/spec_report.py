"""Pydantic's errors about a run file as a report for people: our paths, our words, a fix for each.

A location of pydantic names the branch of every union it passed (`stages[0].grpo.…`, `….str`),
which no user ever wrote. The models' JSON Schema says where such a branch name stands, so locations
are walked along the schema, and the same walk finds the valid keys at a place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from contracts.problems import Problem, nearest

__all__ = ["FieldReport", "dotted", "field_report"]

Location = tuple[int | str, ...]
Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FieldReport:
    """Field problems of a document, and the document as it was probably meant.

    Attributes:
        problems: one per mistake.
        mended: a copy with typing errors in keys and names corrected and wrong values left out, so
            that rules across fields can still be checked.
        unsure: first parts of the paths (`stages[1]`, `compute`) where a value was left out: what
            a rule says about those would be about a default that nobody asked for.
    """

    problems: tuple[Problem, ...]
    mended: Any
    unsure: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Place:
    """A location without branch names; the union it lies in, if any; keys valid where it ends."""

    path: Location
    union: Location | None
    parent_keys: tuple[str, ...]


def field_report(errors: Sequence[ErrorDetails], document: Any, schema: Node) -> FieldReport:
    """The report for pydantic's ``errors`` about ``document`` under the JSON Schema ``schema``."""
    # A default that depends on other fields is not made once one is wrong: no mistake of its own.
    errors = [error for error in errors if error["type"] != "default_factory_not_called"]
    mended = copy.deepcopy(document)
    problems: list[Problem] = []
    unsure: set[str] = set()
    for place, details in _grouped(errors, schema):
        problem, meant = _problem(place, details)
        problems.append(problem)
        if not _mend(mended, place.path, details[0]["type"], meant):
            unsure.add(_section(place.path))
    return FieldReport(tuple(problems), mended, frozenset(unsure))


def _mend(document: Any, path: Location, kind: str, meant: str | None) -> bool:
    """Correct what is at ``path`` in place, or leave it out; whether nothing is in doubt now."""
    while path and isinstance(path[-1], int):
        # Leaving out one item would renumber the others.
        path, meant = path[:-1], None
    holder = _at(document, path[:-1])
    if not path or not isinstance(holder, dict) or path[-1] not in holder:
        return False
    value = holder.pop(path[-1])
    if kind == "extra_forbidden":
        if meant is not None:
            holder.setdefault(meant, value)
        return True
    if meant is not None:
        holder[path[-1]] = meant
    return meant is not None


def _grouped(
    errors: Sequence[ErrorDetails], schema: Node
) -> Iterator[tuple[_Place, list[ErrorDetails]]]:
    """Errors by place; of a union's branches only the ones that got furthest into the value."""
    found: dict[Location, tuple[_Place, list[ErrorDetails]]] = {}
    deepest: dict[Location, int] = {}
    for detail in errors:
        if _is_echo(detail):
            continue
        place = _place(detail["loc"], schema)
        found.setdefault(place.path, (place, []))[1].append(detail)
        if place.union is not None:
            deepest[place.union] = max(len(place.path), deepest.get(place.union, 0))
    for place, details in found.values():
        if place.union is None or len(place.path) == deepest[place.union]:
            yield place, details


def _is_echo(detail: ErrorDetails) -> bool:
    """Pydantic counts a tuple's valid items only: one bad item also reads as "too short"."""
    if detail["type"] != "too_short" or not isinstance(detail["input"], list):
        return False
    return len(detail["input"]) >= int(detail["ctx"]["min_length"])


def _place(location: Location, schema: Node) -> _Place:
    """Follow a pydantic location along the schema, leaving out the names of union branches."""
    definitions = schema.get("$defs", {})
    node = _resolve(schema, definitions)
    path: list[int | str] = []
    union: Location | None = None
    keys: tuple[str, ...] = ()
    for part in location:
        branches = _branches(node, definitions)
        if len(branches) > 1:
            union = tuple(path) if "discriminator" not in node else union
            node = branches.get(str(part), {})
            continue
        node = next(iter(branches.values()), node)
        keys = tuple(node.get("properties", {}))
        path.append(part)
        child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        node = _resolve(child or {}, definitions)
    return _Place(tuple(path), union, keys)


def _branches(node: Node, definitions: Node) -> dict[str, Node]:
    """Branches of a union by the name pydantic gives them; `| None` makes no union."""
    if "discriminator" in node:
        mapping = node["discriminator"]["mapping"]
        return {tag: _resolve({"$ref": ref}, definitions) for tag, ref in mapping.items()}
    listed = [_resolve(branch, definitions) for branch in node.get("anyOf", ())]
    listed = [branch for branch in listed if branch.get("type") != "null"]
    # The names of untagged branches are pydantic's; only arrays of them have anything inside.
    return {_branch_name(branch): branch for branch in listed}


def _branch_name(branch: Node) -> str:
    if branch.get("type") == "array":
        return "tuple[str, ...]"
    return {"string": "str"}.get(str(branch.get("type")), str(branch.get("title")))


def _resolve(node: Node, definitions: Node) -> Node:
    if "$ref" in node:
        target: Node = definitions[node["$ref"].rsplit("/", 1)[1]]
        return _resolve(target, definitions)
    return node


def _problem(place: _Place, details: list[ErrorDetails]) -> tuple[Problem, str | None]:
    """The report line, and the key or name that was probably meant."""
    detail = details[0]
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    path = dotted(place.path)
    last = place.path[-1] if place.path else ""
    meant: str | None = None
    if kind == "extra_forbidden":
        meant = nearest(last, place.parent_keys)
        listed = f"Valid keys: {', '.join(place.parent_keys)}."
        problem = Problem(path, value, f"unknown key `{last}`", _suggest(meant, listed))
    elif kind == "missing":
        problem = Problem(path, None, "is required", f"Add `{last}`.")
    elif kind == "literal_error":
        options = _options(context["expected"])
        meant = nearest(value, options)
        listed = f"Choose one of {', '.join(options)}."
        problem = Problem(path, value, "is not one of the valid names", _suggest(meant, listed))
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        problem = _method_problem(path, value)
    elif kind == "value_error":
        problem = Problem(path, value, str(context["error"]), "Mend this entry.")
    elif kind == "string_pattern_mismatch":
        reason = "has a character or length that is not allowed"
        problem = Problem(path, value, reason, f"It must match {context['pattern']}.")
    else:
        reasons = dict.fromkeys(item["msg"][:1].lower() + item["msg"][1:] for item in details)
        problem = Problem(path, value, ", or ".join(reasons), "Correct the value.")
    return problem, meant


def _method_problem(path: str, stage: Any) -> Problem:
    """A stage whose method is not there, perhaps under another key, or is none."""
    given: Node = stage if isinstance(stage, Mapping) else {}
    if "method" not in given and (typed := nearest("method", [str(key) for key in given])):
        key_path, reason = f"{path}.{typed}", f"unknown key `{typed}`"
        return Problem(key_path, given.get(typed), reason, "Did you mean `method`?")
    tag = given.get("method")
    fix = _suggest(nearest(tag, ("sft", "grpo")), "Choose `sft` or `grpo`.")
    return Problem(f"{path}.method", tag, "is no stage method", fix)


def _suggest(meant: str | None, otherwise: str) -> str:
    return f"Did you mean `{meant}`?" if meant else otherwise


def _options(expected: str) -> list[str]:
    """The names in pydantic's "'a', 'b' or 'c'"."""
    return [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]


def dotted(path: Location) -> str:
    """`stages[0].grpo.group_size`, as a person writes it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "(document)"


def _section(path: Location) -> str:
    """`stages[1]` or the top-level key: how far a doubtful value reaches."""
    return dotted(path[:2] if path[:1] == ("stages",) else path[:1])


def _at(document: Any, path: Location) -> Any:
    """What is at ``path``, or None."""
    for part in path:
        if isinstance(document, Mapping):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return None
    return document
