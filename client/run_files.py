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
from contracts.reward_files import check_reward_file
from contracts.run_spec import RunSpec, load_run_yaml, parse_run_spec
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
            f"model.source: {source} is a folder here or else a hub id; "
            "a revision would fix which weights are meant"
        )


class _Checker:
    """Collects the small files of a run, and everything that is wrong with them."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.files: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def check(self) -> None:
        for index, stage in enumerate(self.spec.stages):
            self._stage(stage, f"stages[{index}]")
        if self.spec.deploy is not None:
            engine = self.spec.deploy.engine
            self._template(engine.chat_template_file, "deploy.engine.chat_template_file")

    def _stage(self, stage: SftStage | GrpoStage, path: str) -> None:
        columns = self._columns(stage, path)
        prompt = stage.prompt
        known = None if columns is None else {*columns, "content"}
        self._template(prompt.template_file, f"{path}.prompt.template_file", known)
        self._template(prompt.chat_template_file, f"{path}.prompt.chat_template_file")
        if prompt.template is not None:
            self._parse(prompt.template, f"{path}.prompt.template", known)
        for number, reward in enumerate(stage.rewards if isinstance(stage, GrpoStage) else ()):
            place = f"{path}.rewards[{number}]"
            if reward.file is not None and reward.function is not None:
                source = self._text(reward.file, f"{place}.file")
                if source is not None:
                    self.problems += check_reward_file(
                        source,
                        reward.function,
                        path=f"{place}.file",
                        columns=columns,
                        parameters=tuple(reward.parameters),
                    )
            if reward.model is not None:
                self._template(reward.model.template_file, f"{place}.model.template_file")
            if reward.judge is not None:
                known = None if columns is None else {*columns, *_JUDGE_VARIABLES}
                self._parse(reward.judge.query_template, f"{place}.judge.query_template", known)

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
        if found.columns is None:
            return None
        for field in ("problem", "answer", "messages", "images"):
            column = getattr(stage.data, field)
            named = field in stage.data.model_fields_set
            needed = isinstance(stage, SftStage) and stage.data.messages is None
            replaced = field == "problem" and stage.data.messages is not None and not named
            if column is None or column in found.columns or replaced:
                continue
            if named or field == "problem" or needed:
                guess = nearest(column, found.columns)
                listed = f"Columns: {', '.join(found.columns)}."
                fix = f"Did you mean `{guess}`?" if guess else listed
                place = f"{path}.data.{field}"
                self.problems.append(Problem(place, column, "is no column of the data", fix))
        return found.columns

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

    def _template(self, relative: str | None, path: str, known: set[str] | None = None) -> None:
        text = None if relative is None else self._text(relative, path)
        if text is not None:
            self._parse(text, path, known)

    def _parse(self, text: str, path: str, known: set[str] | None) -> None:
        """Syntax of a template, and whether its variables exist when ``known`` says which do."""
        try:
            # Chat templates use loop controls and {% generation %}, which Jinja knows by extension.
            environment = jinja2.sandbox.SandboxedEnvironment(
                extensions=["jinja2.ext.loopcontrols"]
            )
            tree = environment.parse(text)
        except jinja2.TemplateSyntaxError as error:
            if "generation" not in str(error.message):
                reason = f"template error in line {error.lineno}: {error.message}"
                self.problems.append(Problem(path, None, reason, "Mend this line."))
            return
        if known is None:
            return
        for name in sorted(jinja2.meta.find_undeclared_variables(tree) - known):
            guess = nearest(name, sorted(known))
            fix = f"Did you mean `{guess}`?" if guess else f"Known: {', '.join(sorted(known))}."
            self.problems.append(Problem(path, name, "is neither a column nor `content`", fix))
