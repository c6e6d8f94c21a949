"""The synthesised cloud assembly: the stack's template and the assets beside it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class AssemblyError(Exception):
    """The folder is no cloud assembly that can be deployed here."""


@dataclass(frozen=True)
class ImageAsset:
    """Where a container image is built from."""

    folder: Path
    dockerfile: str


@dataclass(frozen=True)
class Assembly:
    """One stack's template; file assets by object key, image assets by tag."""

    stack: str
    template: dict[str, Any]
    files: dict[str, Path]
    images: dict[str, ImageAsset]

    @classmethod
    def load(cls, folder: Path) -> "Assembly":
        """Read a `cdk.out`.

        Raises:
            AssemblyError: it is missing, or does not hold exactly one stack.
        """
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise AssemblyError(f"{folder} is no cloud assembly: it has no manifest.json")
        artefacts = json.loads(manifest.read_text(encoding="utf-8"))["artifacts"].items()
        kind = "aws:cloudformation:stack"
        stacks = {name: a["properties"] for name, a in artefacts if a["type"] == kind}
        if len(stacks) != 1:
            raise AssemblyError(f"{folder} holds {len(stacks)} stacks; one is expected")
        [(name, properties)] = stacks.items()
        template = json.loads((folder / properties["templateFile"]).read_text(encoding="utf-8"))
        assets = folder / f"{name}.assets.json"
        listed = json.loads(assets.read_text(encoding="utf-8")) if assets.is_file() else {}
        return cls(name, template, _files(folder, listed), _images(folder, listed))


def _files(folder: Path, listed: dict[str, Any]) -> dict[str, Path]:
    return {
        destination["objectKey"]: (folder / asset["source"]["path"]).resolve()
        for asset in listed.get("files", {}).values()
        for destination in asset["destinations"].values()
    }


def _images(folder: Path, listed: dict[str, Any]) -> dict[str, ImageAsset]:
    return {
        destination["imageTag"]: ImageAsset(
            (folder / asset["source"]["directory"]).resolve(),
            asset["source"].get("dockerFile", "Dockerfile"),
        )
        for asset in listed.get("dockerImages", {}).values()
        for destination in asset["destinations"].values()
    }
