"""A run file together with what it names on this machine: checked, collected, ready to submit.

Small files (reward code, templates) travel inside the request; data and models are uploaded. Paths
are relative to the run file. What only this machine can know is checked here: whether files exist,
parse, and fit the columns of the data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from client.columns import columns_of
from contracts.layout import RunLayout
from contracts.problems import InvalidInputError, Problem, nearest
from contracts.reward_files import check_reward_file, sibling_modules
from contracts.run_spec import RunSpec, load_run_yaml, parse_run_spec
from contracts.spec_files import NamedFile, named_files
from contracts.spec_report import dotted
from contracts.stages import GrpoStage, SftStage

__all__ = ["LocalSource", "PreparedRun", "prepare", "read_run_file"]

Location = tuple[int | str, ...]
_JUDGE_VARIABLES = {"conversation", "messages", "completion", "ground_truth"}


@dataclass(frozen=True, slots=True)
class LocalSource:
    """Data or a model on this machine that a run file names."""

    where: Location
    text: str
    """As the run file writes it."""
    path: Path


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A valid run file and what belongs to it.

    Attributes:
        files: text of each small file by its relative path.
        sources: local data and models; may not exist yet.
        notes: what is no mistake of the file, but a person should know.
    """

    document: dict[str, Any]
    spec: RunSpec
    files: dict[str, str]
    sources: tuple[LocalSource, ...]
    notes: tuple[str, ...]

    def uploads(self) -> tuple[LocalSource, ...]:
        """What must be uploaded before the run can start.

        Raises:
            InvalidInputError: naming every source that is not there.
        """
        missing = [
            Problem(dotted(s.where), s.text, "is not on this machine", "Make it, or correct this.")
            for s in self.sources
            if not s.path.exists()
        ]
        if missing:
            raise InvalidInputError(missing)
        return self.sources

    def with_sources(self, uris: Mapping[LocalSource, str]) -> dict[str, Any]:
        """The document with each local source replaced by its address in S3."""
        document = copy.deepcopy(self.document)
        for source, uri in uris.items():
            holder: Any = document
            for part in source.where[:-1]:
                holder = holder[part]
            holder[source.where[-1]] = uri
        return document


def read_run_file(run_file: str | Path | Mapping[str, Any]) -> Any:
    """The document of a run file given as a path or as data, not yet validated.

    Raises:
        InvalidInputError: when it cannot be read as YAML text.
    """
    if isinstance(run_file, Mapping):
        return run_file
    path = Path(run_file)
    try:
        document = load_run_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = Problem(str(path), None, error.strerror or str(error), "Name a run file.")
        raise InvalidInputError([problem]) from error
    except UnicodeDecodeError as error:
        problem = Problem(str(path), None, f"is not UTF-8: {error.reason}", "Save it as UTF-8.")
        raise InvalidInputError([problem]) from error
    return document


def prepare(run_file: str | Path | Mapping[str, Any], *, folder: Path | None = None) -> PreparedRun:
    """Validate a run file and everything it names here.

    Raises:
        InvalidInputError: with all problems at once.
    """
    document = read_run_file(run_file)
    if folder is None:
        folder = Path() if isinstance(run_file, Mapping) else Path(run_file).parent
    spec = parse_run_spec(document)
    # YAML anchors make several places one object; each place may get an address of its own.
    document = _unshared(document)
    sources = tuple(_sources(spec, folder))
    checker = _Checker(spec, folder)
    checker.check()
    absent = dict.fromkeys(source.text for source in sources if not source.path.exists())
    notes = [f"{text} is not there yet; `grpohub submit` needs it" for text in absent]
    if spec.model.source not in {source.text for source in sources}:
        notes += _hub_notes(spec)
    if checker.problems:
        raise InvalidInputError(checker.problems)
    return PreparedRun(document, spec, checker.files, sources, (*notes, *checker.notes))


def _unshared(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _unshared(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_unshared(item) for item in node]
    return node


def _sources(spec: RunSpec, folder: Path) -> Iterator[LocalSource]:
    """Every local path among the run's data and models."""
    for where, text, is_data in _named_sources(spec):
        path = folder / Path(text).expanduser()
        explicit = text.startswith(("./", "../", "/", "~"))
        remote = text.startswith(("s3://", "run:"))
        if not remote and (is_data or explicit or path.is_dir()):
            yield LocalSource(where, text, path)


def _named_sources(spec: RunSpec) -> Iterator[tuple[Location, str, bool]]:
    """(place, text, whether it is data) of everything that may be uploaded."""
    found: list[tuple[Location, str | None, bool]] = [
        (("model", "source"), spec.model.source, False)
    ]
    for index, stage in enumerate(spec.stages):
        data: Location = ("stages", index, "data")
        found += [((*data, "train"), stage.data.train, True)]
        found += [((*data, "validation"), stage.data.validation, True)]
        for number, reward in enumerate(stage.rewards if isinstance(stage, GrpoStage) else ()):
            place: Location = ("stages", index, "rewards", number)
            if reward.model is not None:
                found += [((*place, "model", "source"), reward.model.source, False)]
                found += [((*place, "model", "adapter"), reward.model.adapter, False)]
            if reward.judge is not None:
                found += [((*place, "judge", "source"), reward.judge.source, False)]
    for number, adapter in enumerate(spec.deploy.engine.lora_adapters if spec.deploy else ()):
        place = ("deploy", "engine", "lora_adapters", number, "source")
        found += [(place, adapter.source, False)]
    return ((where, text, is_data) for where, text, is_data in found if text is not None)


def _hub_notes(spec: RunSpec) -> Iterator[str]:
    source = spec.model.source
    if (
        not source.startswith(("s3://", "run:", "./", "../", "/", "~"))
        and spec.model.revision is None
    ):
        yield (
            f"model.source: {source} is taken for a hub id, as it is no folder here; "
            "a revision would say which weights are meant"
        )


class _Checker:
    """Reads the small files of a run, and collects everything that is wrong with them."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.files: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def check(self) -> None:
        columns = [
            self._columns(stage, f"stages[{index}]") for index, stage in enumerate(self.spec.stages)
        ]
        for named in named_files(self.spec):
            text = self._text(named.name, named.path)
            if text is not None:
                self._named(named, text, columns[_stage_index(named.path)])
        for index, stage in enumerate(self.spec.stages):
            known = _variables(columns[index], {"content"})
            if stage.prompt.template is not None:
                self._parse(stage.prompt.template, f"stages[{index}].prompt.template", known)
            for number, reward in enumerate(stage.rewards if isinstance(stage, GrpoStage) else ()):
                if reward.judge is not None:
                    place = f"stages[{index}].rewards[{number}].judge.query_template"
                    known = _variables(columns[index], _JUDGE_VARIABLES)
                    self._parse(reward.judge.query_template, place, known)

    def _named(self, named: NamedFile, text: str, columns: tuple[str, ...] | None) -> None:
        if named.kind == "reward":
            self._modules_beside(named.name, text)
            self.problems += check_reward_file(
                text,
                named.function,
                path=named.path,
                columns=columns,
                parameters=named.parameters,
            )
        elif named.kind == "template":
            self._parse(text, named.path, _variables(columns, {"content"}))
        else:
            self._parse(text, named.path, None)

    def _modules_beside(self, name: str, text: str) -> None:
        """Modules that reward code imports from its own folder travel with it."""
        for beside in sibling_modules(name, text):
            if beside not in self.files and (self.folder / beside).is_file():
                found = self._text(beside, name)
                if found is not None:
                    self._modules_beside(beside, found)

    def _columns(self, stage: SftStage | GrpoStage, path: str) -> tuple[str, ...] | None:
        """Columns of the training data if they can be known here; named columns are checked."""
        local = self.folder / Path(stage.data.train).expanduser()
        if stage.data.train.startswith("s3://") or not local.exists():
            return None
        found = columns_of(local)
        if found.problem is not None:
            problem = Problem(f"{path}.data.train", str(local), found.problem, "Correct the data.")
            self.problems.append(problem)
        if found.note is not None:
            self.notes.append(f"{path}.data.train: {found.note}")
        columns = found.columns
        if columns is None:
            return None
        for field in _needed_columns(stage):
            column = getattr(stage.data, field)
            if column not in columns:
                guess = nearest(column, columns)
                fix = f"Did you mean `{guess}`?" if guess else f"Columns: {', '.join(columns)}."
                place = f"{path}.data.{field}"
                self.problems.append(Problem(place, column, "is no column of the data", fix))
        return columns

    def _text(self, relative: str, path: str) -> str | None:
        """Text of a small file, remembered for the request; None after a problem."""
        try:
            RunLayout("x").code(relative)
            text = (self.folder / relative).read_text(encoding="utf-8")
        except ValueError as error:
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            fix = "Name a file beside or below the run file."
            self.problems.append(Problem(path, relative, reason, fix))
            return None
        except OSError as error:
            reason = error.strerror or str(error)
            self.problems.append(Problem(path, relative, reason, "Paths start at the run file."))
            return None
        self.files[relative] = text
        return text

    def _parse(self, text: str, path: str, known: set[str] | None) -> None:
        """Syntax of a template, and whether its variables exist when ``known`` says which do."""
        environment = jinja2.sandbox.SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = environment.parse(text)
        except jinja2.TemplateSyntaxError as error:
            # Chat templates mark the assistant's part with a tag that only transformers knows.
            if "'generation'" not in str(error.message):
                reason = f"template error in line {error.lineno}: {error.message}"
                self.problems.append(Problem(path, None, reason, "Mend this line."))
            return
        if known is None:
            return
        for name in sorted(jinja2.meta.find_undeclared_variables(tree) - known):
            guess = nearest(name, sorted(known))
            fix = f"Did you mean `{guess}`?" if guess else f"Known: {', '.join(sorted(known))}."
            self.problems.append(Problem(path, name, "is no variable of this template", fix))


def _stage_index(path: str) -> int:
    """Of `stages[1].…` 1; what belongs to no stage is looked at as if it were the first's."""
    return int(path[len("stages[") : path.index("]")]) if path.startswith("stages[") else 0


def _variables(columns: tuple[str, ...] | None, more: set[str]) -> set[str] | None:
    return None if columns is None else {*columns, *more}


def _needed_columns(stage: SftStage | GrpoStage) -> Iterator[str]:
    """Fields of `data` whose column must exist: named ones, and defaults that the method reads."""
    data = stage.data
    for field in ("problem", "answer", "messages", "images"):
        named = field in data.model_fields_set
        read = data.messages is None and (field == "problem" or isinstance(stage, SftStage))
        if getattr(data, field) is not None and (named or read):
            yield field
