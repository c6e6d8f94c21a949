"""The files a run file names: which they are, and what is wrong with them.

The client uploads their text beside the run file and the control plane freezes it, so both call
this and say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from contracts.problems import Problem, nearest
from contracts.reward_files import check_reward_file
from contracts.run_spec import RunSpec
from contracts.spec_checks import template_variables
from contracts.stages import GrpoStage

__all__ = ["NamedFile", "check_named_files", "named_files"]


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file named by a run file."""

    path: str
    """Where the run file names it, such as `stages[0].rewards[1].file`."""
    name: str
    """Its path relative to the run file."""
    kind: Literal["reward", "template", "chat template"]
    function: str = ""
    """The function called, of a reward file."""
    parameters: tuple[str, ...] = ()
    """Keyword arguments the run file passes to it."""


def named_files(spec: RunSpec) -> tuple[NamedFile, ...]:
    """Every file that ``spec`` names, in the order of the run file; one named twice is given
    twice."""
    return tuple(_named(spec))


def check_named_files(spec: RunSpec, files: Mapping[str, str]) -> list[Problem]:
    """Problems of the named files. ``files`` maps relative paths to text; further files are
    allowed.

    Reward code may import modules that lie beside it, so a file that the run file does not name is
    no error.
    """
    problems = [
        Problem(name, name, "is not a plain relative path", "Name it without `..`, `\\` or a root.")
        for name in files
        if not _plain(name)
    ]
    for named in named_files(spec):
        if named.name not in files:
            guess = nearest(named.name, list(files))
            fix = f"Did you mean `{guess}`?" if guess else "Send its text with the run file."
            problems.append(Problem(named.path, named.name, "is not among the files sent", fix))
        elif named.kind == "reward":
            problems += check_reward_file(
                files[named.name], named.function, path=named.path, parameters=named.parameters
            )
        elif named.kind == "template" and not template_variables(files[named.name]):
            problems.append(
                Problem(
                    named.path,
                    named.name,
                    "prints no variable, so every prompt would be the same",
                    "Use {{ content }} or a column name.",
                )
            )
    return problems


def _named(spec: RunSpec) -> Iterator[NamedFile]:
    for index, stage in enumerate(spec.stages):
        where = f"stages[{index}]"
        prompt = stage.prompt
        if prompt.template_file is not None:
            yield NamedFile(f"{where}.prompt.template_file", prompt.template_file, "template")
        if prompt.chat_template_file is not None:
            path = f"{where}.prompt.chat_template_file"
            yield NamedFile(path, prompt.chat_template_file, "chat template")
        if not isinstance(stage, GrpoStage):
            continue
        for number, source in enumerate(stage.rewards):
            path = f"{where}.rewards[{number}]"
            if source.file is not None:
                yield NamedFile(
                    f"{path}.file", source.file, "reward", source.function or "",
                    tuple(source.parameters),
                )  # fmt: skip
            if source.model is not None and source.model.template_file is not None:
                yield NamedFile(
                    f"{path}.model.template_file", source.model.template_file, "chat template"
                )
    if spec.deploy is not None and spec.deploy.engine.chat_template_file is not None:
        path = "deploy.engine.chat_template_file"
        yield NamedFile(path, spec.deploy.engine.chat_template_file, "chat template")


def _plain(name: str) -> bool:
    return "\\" not in name and not any(part in ("", ".", "..") for part in name.split("/"))
