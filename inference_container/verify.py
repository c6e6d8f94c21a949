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
    """Read the manifest, hash every file it lists, and let no other lie beside them.

    Args:
        folder: what SageMaker downloaded.
        version: the version that was published, when known: the manifest itself may be altered.

    Raises:
        StartError: naming the first file that is missing, not what was exported, or not listed.
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
    # Engines read whatever bears a name they know: weights without an index, a chat template.
    listed = {MANIFEST, *(file.path for file in manifest.files)}
    for found in sorted(folder.rglob("*")):
        name = found.relative_to(folder).as_posix()
        if name not in listed and not found.is_dir() and not _is_folder_marker(found):
            raise StartError(f"{name} was not exported: {MANIFEST} does not list it; delete it")
    if version is not None and manifest.version != version:
        raise StartError(f"{path} is of version {manifest.version}, published was {version}")
    return manifest


def _is_folder_marker(path: Path) -> bool:
    """Whether it is what S3 consoles and Hadoop put for a folder: an empty object, no suffix."""
    return path.is_file() and not path.suffix and path.stat().st_size == 0


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
