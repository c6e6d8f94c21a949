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
    """

    overrides: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _commands: dict[str, Command] = field(default_factory=dict)

    def add_asset(self, tag: str, folder: Path, dockerfile: str) -> None:
        """Read an image asset's entrypoint.

        Raises:
            ValueError: the Dockerfile has no exec-form ENTRYPOINT that starts Python.
        """
        entrypoint = read_entrypoint(folder / dockerfile)
        package = entrypoint[entrypoint.index("-m") + 1] if "-m" in entrypoint else ""
        argv = self.overrides.get(package, (sys.executable, *entrypoint[1:]))
        self._commands[tag] = Command(tuple(argv), folder)

    def add(self, tag: str, argv: Sequence[str], folder: Path) -> None:
        """Name a command directly."""
        self._commands[tag] = Command(tuple(argv), folder)

    def command(self, image_uri: str) -> Command:
        """The command of an image.

        Raises:
            UnknownImageError: the image was not deployed.
        """
        tag = image_uri.rpartition(":")[2]
        if tag not in self._commands:
            raise UnknownImageError(image_uri)
        return self._commands[tag]


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
