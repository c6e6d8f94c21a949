"""From an image address to the command that its container would run.

The cloud assembly says which folder and Dockerfile each image asset is built from; the Dockerfile's
exec-form ENTRYPOINT says what runs. Here the same command runs as a process, with this Python.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ENTRYPOINT = re.compile(r"^ENTRYPOINT\s+(\[.*\])\s*$", re.MULTILINE)
_PYTHON = re.compile(r"(.*/)?python[\d.]*$")


class UnknownImageError(Exception):
    """No image asset of the deployed template has this tag."""


@dataclass(frozen=True)
class Command:
    """What to run and where; `argv` lacks SageMaker's own argument, `train` or `serve`."""

    argv: tuple[str, ...]
    folder: Path


@dataclass
class Images:
    """The commands of the deployed images, by tag. `overrides` replaces a package's command, for
    tests.

    A registry keeps the images of earlier deployments, and models go on naming them. Their sources
    are gone from here: the present image of the same package stands in.
    """

    overrides: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _commands: dict[str, Command] = field(default_factory=dict)
    _packages: dict[str, str] = field(default_factory=dict)

    def add_asset(self, tag: str, folder: Path, dockerfile: str) -> None:
        """Read an image asset's entrypoint.

        Raises:
            ValueError: the Dockerfile has no exec-form ENTRYPOINT that starts Python.
        """
        entrypoint = read_entrypoint(folder / dockerfile)
        package = entrypoint[entrypoint.index("-m") + 1] if "-m" in entrypoint else ""
        argv = self.overrides.get(package, (sys.executable, *entrypoint[1:]))
        self._commands[tag] = Command(tuple(argv), folder)
        self._packages[tag] = package

    def keep(self, file: Path) -> None:
        """Take up the tags of earlier deployments from a file, and add the present ones to it."""
        present = {package: self._commands[tag] for tag, package in self._packages.items()}
        earlier = _read_tags(file)
        for tag, package in earlier.items():
            if package in present:
                self._commands.setdefault(tag, present[package])
        part = file.with_name(f"{file.name}.part")
        part.write_text(json.dumps({**earlier, **self._packages}), encoding="utf-8")
        part.replace(file)

    def stands_in(self, image_uri: str) -> bool:
        """Whether an image is one of an earlier deployment, for which the present one runs."""
        tag = image_uri.rpartition(":")[2]
        return tag in self._commands and tag not in self._packages

    def add(self, tag: str, argv: Sequence[str], folder: Path) -> None:
        """Name a command directly."""
        self._commands[tag] = Command(tuple(argv), folder)
        self._packages[tag] = tag

    def command(self, image_uri: str) -> Command:
        """The command of an image.

        Raises:
            UnknownImageError: the image was not deployed.
        """
        tag = image_uri.rpartition(":")[2]
        if tag not in self._commands:
            raise UnknownImageError(image_uri)
        return self._commands[tag]


def _read_tags(file: Path) -> dict[str, str]:
    try:
        tags: dict[str, str] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):  # the first deployment, or a file that a crash cut off
        return {}
    return tags


def read_entrypoint(dockerfile: Path) -> list[str]:
    """The last exec-form ENTRYPOINT, from its Python interpreter on.

    Raises:
        ValueError: there is none. SageMaker needs the exec form, or PID 1 is a shell and never sees
            SIGTERM.
    """
    found = _ENTRYPOINT.findall(dockerfile.read_text(encoding="utf-8"))
    for entrypoint in reversed(found):
        words: list[str] = json.loads(entrypoint)
        for index, word in enumerate(words):
            if _PYTHON.match(word):
                return words[index:]
    raise ValueError(f"{dockerfile} has no exec-form ENTRYPOINT that runs Python")
