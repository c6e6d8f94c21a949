"""`model.json`: what an exported model consists of. Written last, checked before anything loads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from contracts.base import Strict

__all__ = ["ManifestFile", "ModelManifest"]


class ManifestFile(Strict):
    """One file, its path relative to the model prefix."""

    path: Annotated[str, Field(min_length=1)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelManifest(Strict):
    """An exported model."""

    format: Literal[1] = 1
    run_id: str
    stage: str
    step: Annotated[int, Field(ge=0)]
    architecture: str
    parameters: Annotated[int, Field(ge=0)]
    """Number of weights."""
    dtype: str
    base_model: str
    adapter: str | None = None
    """Folder of the LoRA adapter, when it was exported too."""
    metrics: Mapping[str, float] = Field(default_factory=dict)
    files: tuple[ManifestFile, ...]

    @property
    def version(self) -> str:
        """sha256 over the files' paths and hashes: two equal models have one version."""
        digest = hashlib.sha256()
        for file in sorted(self.files, key=lambda item: item.path):
            digest.update(f"{file.path}\0{file.sha256}\n".encode())
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
