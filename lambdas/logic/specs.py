"""The frozen run file of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from contracts.compute import DeploySpec
from contracts.run_spec import RunSpec
from lambdas.errors import NotFoundError
from lambdas.logic.folder import RunFolder
from lambdas.logic.records import RunRecord

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["deploy_spec", "load_folder", "load_spec"]


def load_spec(hub: Hub, run: RunRecord) -> RunSpec:
    """The run file. It was validated when it was frozen, so only its form is read again."""
    return RunSpec.model_validate_json(hub.bucket.read(run.layout.spec))


def load_folder(hub: Hub, run_id: str) -> RunFolder:
    """The run's rows.

    Raises:
        NotFoundError: when there is no such run.
    """
    folder = hub.table.load(run_id)
    if folder is None:
        raise NotFoundError(f"no run {run_id}")
    return folder


def deploy_spec(run: RunRecord, spec: RunSpec) -> DeploySpec | None:
    """The deploy section in force: one given later wins over the run file's."""
    if run.deploy_override is not None:
        return DeploySpec.model_validate_json(run.deploy_override)
    if spec.deploy is not None and spec.deploy.when == "succeeded":
        return spec.deploy
    return None
