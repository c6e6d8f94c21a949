"""The model's files against `model.json`, before any weight is loaded."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from contracts.model_manifest import ManifestFile, ModelManifest
from inference_container.settings import StartError

__all__ = ["verify_model"]

MANIFEST = "model.json"
_BLOCK = 1 << 20


def verify_model(folder: Path, *, version: str | None = None) -> ModelManifest:
    """Read the manifest and hash every file it lists.

    Args:
        folder: what SageMaker downloaded.
        version: the version that was published, when known: the manifest itself may be altered.

    Raises:
        StartError: naming the first file that is missing or not what was exported.
    """
    path = folder / MANIFEST
    try:
        manifest = ModelManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise StartError(f"{path} is missing: the model was not exported by the hub") from error
    except ValidationError as error:
        raise StartError(f"{path} is no manifest: {error.errors()[0]['msg']}") from error
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases the interpreter lock
        for problem in pool.map(lambda file: _problem(folder, file), manifest.files):
            if problem:
                raise StartError(problem)
    if version is not None and manifest.version != version:
        raise StartError(f"{path} is of version {manifest.version}, published was {version}")
    return manifest


def _problem(folder: Path, file: ManifestFile) -> str | None:
    path = folder / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{file.path} leads out of the model's folder"
    if not path.is_file():
        return f"{file.path} is missing from {folder}"
    if (size := path.stat().st_size) != file.size:
        return f"{file.path} has {size} bytes, exported were {file.size}"
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        return f"{file.path} was altered: its sha256 is {digest.hexdigest()}, not {file.sha256}"
    return None
