"""Recipes: run files in the bucket that an uploaded data file starts. The bucket is their only
store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from contracts.layout import join_uri, recipe_files_prefix, recipe_key
from contracts.problems import InvalidInputError, Problem
from contracts.reward_files import sibling_modules
from contracts.run_spec import load_run_yaml, parse_run_spec
from contracts.spec_files import named_files
from lambdas.errors import ObjectMissingError
from lambdas.logic.runs import RunRequest, check_request

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["check_new_recipe", "check_recipe", "read_named_files", "read_run_file",
           "recipe_request", "stage_mappings"]  # fmt: skip

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?")


def check_new_recipe(hub: Hub, name: str, text: str, files: Mapping[str, str]) -> None:
    """Check a recipe before it is stored.

    Raises:
        InvalidInputError: with all its problems.
    """
    if not _NAME.fullmatch(name):
        fix = "Use lower case letters, digits and inner hyphens, at most 64."
        raise InvalidInputError([Problem("name", name, "is not a recipe name", fix)])
    document = _with_data(load_run_yaml(text), _stand_in(hub, name))
    check_request(RunRequest(document, files))


def check_recipe(hub: Hub, name: str) -> None:
    """Check a registered recipe with a stand-in for the data that will come.

    Raises:
        InvalidInputError: with all its problems.
    """
    request = recipe_request(hub, name, _stand_in(hub, name))
    if request is not None:
        check_request(request)


def recipe_request(hub: Hub, name: str, data_uri: str) -> RunRequest | None:
    """The run that recipe ``name`` makes of an uploaded data file; None when there is no such
    recipe.

    The file becomes the training data of every stage. Validation data stay the recipe's own.

    Raises:
        InvalidInputError: the recipe is wrong.
    """
    try:
        document = _with_data(read_run_file(hub, recipe_key(name)), data_uri)
    except ObjectMissingError:
        return None
    files = read_named_files(hub, document, recipe_files_prefix(name))
    return RunRequest(document, files, source=data_uri)


def read_run_file(hub: Hub, key: str, version: str | None = None) -> Any:
    """The run file at ``key`` as plain data, not validated yet; of that object version, if one is
    given.

    Raises:
        ObjectMissingError: when there is none.
        InvalidInputError: it is not YAML in UTF-8.
    """
    body = hub.bucket.read(key, version)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: {error.reason} at byte {error.start}"
        problem = Problem("(document)", None, reason, "Save the file as UTF-8.")
        raise InvalidInputError([problem]) from error
    return load_run_yaml(text)


def read_named_files(hub: Hub, document: Any, prefix: str) -> dict[str, str]:
    """Text of the files that a run file names, and of the modules that reward code among them
    imports from its own folder; what is missing is reported with the rest of its problems."""
    files: dict[str, str] = {}
    for named in named_files(parse_run_spec(document)):
        if ".." not in named.name.split("/"):
            _read_file(hub, prefix, named.name, named.path, files)
    return files


def _read_file(hub: Hub, prefix: str, name: str, path: str, files: dict[str, str]) -> None:
    """Add the text of ``name``, which ``path`` of the run file asks for, and of its modules."""
    try:
        files[name] = hub.bucket.read(prefix + name).decode()
    except ObjectMissingError:
        return
    except UnicodeDecodeError as error:
        problem = Problem(path, name, "is not UTF-8 text", "Send text.")
        raise InvalidInputError([problem]) from error
    if name.endswith(".py"):
        for module in sibling_modules(name, files[name]):
            if module not in files:
                _read_file(hub, prefix, module, path, files)


def stage_mappings(document: Any) -> Iterator[dict[str, Any]]:
    """The stages of a run file that is not validated yet."""
    items = document.get("stages") if isinstance(document, dict) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()


def _with_data(document: Any, uri: str) -> Any:
    for stage in stage_mappings(document):
        data = stage.setdefault("data", {})
        if isinstance(data, dict):
            data["train"] = uri
    return document


def _stand_in(hub: Hub, name: str) -> str:
    return join_uri(hub.bucket.name, f"uploads/{name}/data.jsonl")
