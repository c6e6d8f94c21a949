"""The exported model goes to S3, its manifest last: without `model.json` there is no model."""

from __future__ import annotations

from pathlib import Path

from contracts.failures import ExitCode
from contracts.layout import StageLayout
from contracts.model_manifest import ModelManifest
from training_container.checkpoints.fence import read_control
from training_container.checkpoints.store import Store, StoreError
from training_container.failure import StageError

__all__ = ["publish_model"]

MANIFEST = "model.json"


def publish_model(store: Store, layout: StageLayout, folder: Path, attempt: int) -> ModelManifest:
    """Upload the files that the manifest lists, then the manifest. What else an earlier attempt
    left there is deleted: no endpoint starts beside a file that the manifest does not list.

    Raises:
        StageError: EXPORT when a file is missing, changed or cannot be uploaded; FENCED when a
            newer attempt has taken over.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise StageError(ExitCode.EXPORT, f"the trainer left no {MANIFEST}: nothing is announced")
    manifest = ModelManifest.model_validate_json(path.read_bytes())
    for file in manifest.files:
        local = folder / file.path
        if not local.is_file() or local.stat().st_size != file.size:
            raise StageError(ExitCode.EXPORT, f"{file.path} is not what {MANIFEST} lists")
    try:
        _check_fence(store, layout, attempt)
        # An older manifest must not vouch for a mixture of old and new files.
        store.delete([layout.model_manifest])
        files = {folder / f.path: layout.model_prefix + f.path for f in manifest.files}
        store.delete(store.listing(layout.model_prefix).keys() - set(files.values()))
        store.upload(files)
        _check_fence(store, layout, attempt)
        store.put(layout.model_manifest, path.read_bytes())
    except StoreError as error:
        raise StageError(ExitCode.EXPORT, f"the model was not uploaded: {error}") from error
    return manifest


def _check_fence(store: Store, layout: StageLayout, attempt: int) -> None:
    control = read_control(store, layout.control)
    if not control.allows(attempt):
        raise StageError(ExitCode.FENCED, f"attempt {control.attempt} of this stage has taken over")
