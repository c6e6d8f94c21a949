"""Checks a request against the service's own model: required members, lengths, ranges, patterns,
enums.

botocore carries SageMaker's API model with every limit in it, but checks only types and required
members before it sends; the service checks the rest. Reading the model keeps all limits of FACTS
A.1.8 without copying any.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape

from local_aws.sagemaker.errors import invalid


@cache
def service_model() -> Any:
    """The API model of the `sagemaker` service."""
    return botocore.session.get_session().get_service_model("sagemaker")


def check(operation: str, request: Any) -> None:
    """Refuse a request that the service's model does not allow.

    Raises:
        ApiError: a ValidationException that lists every violation, in the service's wording.
    """
    shape = service_model().operation_model(operation).input_shape
    problems = list(_problems(request, shape, "")) if shape is not None else []
    if problems:
        plural = "s" if len(problems) > 1 else ""
        raise invalid(f"{len(problems)} validation error{plural} detected: {'; '.join(problems)}")


def _problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(shape, StructureShape):
        yield from _structure_problems(value, shape, path)
    elif isinstance(shape, ListShape):
        yield from _size_problems(value, len(value), shape, path, "length")
        for index, item in enumerate(value, start=1):
            yield from _problems(item, shape.member, f"{path}.{index}.member")
    elif isinstance(shape, MapShape):
        yield from _size_problems(value, len(value), shape, path, "length")
        for key, item in value.items():
            yield from _problems(key, shape.key, f"{path}.key")
            yield from _problems(item, shape.value, f"{path}.{key}")
    elif isinstance(shape, StringShape):
        yield from _string_problems(value, shape, path)
    elif shape.type_name in ("integer", "long", "float", "double"):
        yield from _size_problems(value, value, shape, path, "value")


def _structure_problems(value: Any, shape: StructureShape, path: str) -> Iterator[str]:
    for name in shape.required_members:
        if value.get(name) is None:
            yield _problem("null", _join(path, name), "Member must not be null")
    for name, item in value.items():
        if name in shape.members and item is not None:
            yield from _problems(item, shape.members[name], _join(path, name))


def _string_problems(value: str, shape: StringShape, path: str) -> Iterator[str]:
    yield from _size_problems(value, len(value), shape, path, "length")
    if shape.enum and value not in shape.enum:
        allowed = ", ".join(shape.enum)
        yield _problem(f"'{value}'", path, f"Member must satisfy enum value set: [{allowed}]")
    pattern = shape.metadata.get("pattern")
    compiled = _compile(pattern) if pattern else None
    if compiled and not compiled.fullmatch(value):
        text = f"Member must satisfy regular expression pattern: {pattern}"
        yield _problem(f"'{value}'", path, text)


def _size_problems(value: Any, size: float, shape: Shape, path: str, what: str) -> Iterator[str]:
    limits = shape.metadata
    if "max" in limits and size > limits["max"]:
        text = f"Member must have {what} less than or equal to {limits['max']}"
        yield _problem(f"'{value}'", path, text)
    if "min" in limits and size < limits["min"]:
        text = f"Member must have {what} greater than or equal to {limits['min']}"
        yield _problem(f"'{value}'", path, text)


@cache
def _compile(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:  # the model's patterns are Java's; \p{L} and the like have no counterpart here
        return None


def _join(path: str, name: str) -> str:
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name


def _problem(value: str, path: str, constraint: str) -> str:
    return f"Value {value} at '{path}' failed to satisfy constraint: {constraint}"
