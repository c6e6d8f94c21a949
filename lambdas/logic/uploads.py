"""Objects that appear in the bucket: run files, data for recipes, recipes. One object version, at
most one run."""

from __future__ import annotations

import hashlib
import posixpath
from typing import TYPE_CHECKING

from contracts.events import ObjectCreatedDetail
from contracts.layout import DATA_SUFFIXES, UPLOADED_RUN_FILES, join_uri, upload_error_key
from contracts.problems import InvalidInputError
from lambdas.errors import ConflictError
from lambdas.logic.recipes import (
    check_recipe,
    read_named_files,
    read_run_file,
    recipe_request,
    stage_mappings,
)
from lambdas.logic.runs import RunRequest, create_run
from lambdas.observability import logger

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["on_recipe", "on_upload"]


def on_upload(hub: Hub, detail: ObjectCreatedDetail, state_machine_arn: str) -> str | None:
    """Start the run that an upload asks for. Returns its id; None when the object asks for none.

    `uploads/**/run.yaml` is a run file whose relative paths lie beside it. A data file directly
    under `uploads/<recipe>/` starts the registered recipe with it. A refused upload leaves a
    report beside it.
    """
    key = detail.object.key
    parts = key.split("/")
    if key.endswith(".error.json"):
        return None
    try:
        if parts[-1] in UPLOADED_RUN_FILES:
            request = _beside(hub, key, detail.object.version_id)
        elif len(parts) == 3 and parts[-1].endswith(DATA_SUFFIXES):
            found = recipe_request(hub, parts[1], join_uri(hub.bucket.name, key))
            if found is None:
                return None
            request = found
        else:
            return None
        identity = hashlib.sha256(detail.identity.encode()).hexdigest()
        folder = create_run(hub, request, key=f"upload-{identity}",
                            state_machine_arn=state_machine_arn)  # fmt: skip
    except (InvalidInputError, ConflictError) as error:
        _report(hub, key, error)
        return None
    return folder.run.run_id


def on_recipe(hub: Hub, key: str) -> None:
    """Check a recipe that somebody put into the bucket; a bad one leaves a report beside it."""
    parts = key.split("/")
    if len(parts) != 2 or not key.endswith(".yaml"):
        return
    try:
        check_recipe(hub, parts[1].removesuffix(".yaml"))
    except InvalidInputError as error:
        _report(hub, key, error)


def _beside(hub: Hub, key: str, version: str | None) -> RunRequest:
    """The run file at ``key``, of the object version that the event tells of, as a newer one has
    its own event. Files it names and relative data paths lie beside it in the bucket."""
    document = read_run_file(hub, key, version)
    folder = posixpath.dirname(key) + "/"
    for stage in stage_mappings(document):
        data = stage.get("data")
        if not isinstance(data, dict):
            continue
        for name in ("train", "validation"):
            value = data.get(name)
            if isinstance(value, str) and "://" not in value:
                data[name] = join_uri(hub.bucket.name, posixpath.normpath(folder + value))
    files = read_named_files(hub, document, folder)
    return RunRequest(document, files, source=join_uri(hub.bucket.name, key))


def _report(hub: Hub, key: str, error: InvalidInputError | ConflictError) -> None:
    problems = error.problems if isinstance(error, InvalidInputError) else ()
    logger.warning("refused upload", extra={"key": key, "problems": str(error)})
    hub.bucket.write_json(
        upload_error_key(key),
        {
            "object": key,
            "detail": str(error),
            "problems": [problem.as_dict() for problem in problems],
        },
    )
