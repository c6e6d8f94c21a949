"""Reward trials: a run file's sources, rows and sample answers as one request, and who runs it.

On this machine every kind of source runs, by the training side in a process of its own, because the
client imports nothing of it. In the hub only what its sandbox function can.
"""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from client.columns import DataError, data_file, first_rows
from client.run_files import prepare
from contracts.problems import InvalidInputError, Problem
from contracts.reward_trial import MAX_SAMPLES, RewardSample, RewardTestRequest, RewardTestView
from contracts.rewards import RewardSpec
from contracts.run_spec import parse_run_spec
from contracts.stages import DataSpec, GrpoStage

__all__ = ["TrialError", "read_answers", "reward_file_stage", "run_file_stage", "trial_request",
           "try_here"]  # fmt: skip

_NEEDED = ("training_container", "torch", "transformers", "httpx", "math_verify", "jsonschema")
Files = Mapping[str, str]


class TrialError(RuntimeError):
    """A trial that cannot be run on this machine."""


def run_file_stage(run_file: Path, name: str | None) -> tuple[GrpoStage, Files]:
    """The GRPO stage called ``name`` (the first when None) with local sources made absolute, and
    the run's small files. Raises InvalidInputError."""
    prepared = prepare(run_file)
    here = {source: str(source.path.resolve()) for source in prepared.sources}
    spec = parse_run_spec(prepared.with_sources(here))
    stages = [stage for stage in spec.stages if isinstance(stage, GrpoStage)]
    for stage in stages:
        if name in (None, stage.name):
            return stage, prepared.files
    known = ", ".join(stage.name for stage in stages) or "none"
    problem = Problem("stages", name, "is no GRPO stage of this run", f"GRPO stages: {known}.")
    raise InvalidInputError([problem])


def reward_file_stage(
    file: Path, function: str | None, data: Path | None
) -> tuple[GrpoStage, Files]:
    """A reward file alone, as the only source of a stage. Raises InvalidInputError."""
    if data is None:
        problem = Problem("--data", None, "is missing", "Name local rows with --data.")
        raise InvalidInputError([problem], subject="data")
    try:
        text = file.read_text(encoding="utf-8")
        defined = [
            node.name
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
        ]
    except (OSError, ValueError, SyntaxError) as error:
        problem = Problem(str(file), None, str(error), "Mend the file.")
        raise InvalidInputError([problem], subject="reward file") from error
    if function is None and len(defined) != 1:
        reason = f"defines {', '.join(defined) or 'nothing'}"
        problem = Problem(str(file), None, reason, "Say which one with --function.")
        raise InvalidInputError([problem], subject="reward file")
    name = function or defined[0]
    source = RewardSpec(name=name, weight=1.0, file=file.name, function=name)
    rows = _rows(data, 1)
    answer = "answer" if rows and "answer" in rows[0] else None
    stage = GrpoStage(
        name="trial",
        method="grpo",
        data=DataSpec(train=str(data), answer=answer),
        rewards=(source,),
        max_steps=1,
    )
    return stage, {file.name: text}


def read_answers(file: Path) -> list[str]:
    """Sample answers, a JSON text or `{"completion": …}` a line. Raises InvalidInputError."""
    answers = []
    where = "it"
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            where = f"line {number}"
            value = json.loads(line)
            answers.append(value["completion"] if isinstance(value, dict) else value)
            if not isinstance(answers[-1], str):
                raise ValueError("is no text")
        if not answers:
            raise ValueError("holds no answer")
    except (OSError, ValueError, KeyError) as error:
        reason = f"{where}: {error!r}"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif isinstance(error, UnicodeDecodeError):
            reason = f"is not UTF-8: {error.reason}"
        fix = 'Write a JSON text or {"completion": "…"} a line.'
        problem = Problem(str(file), None, reason, fix)
        raise InvalidInputError([problem], subject="answers") from error
    return answers


def trial_request(
    stage: GrpoStage,
    files: Files,
    *,
    data: Path | None,
    answers: Sequence[str],
    column: str | None,
    rows: int,
) -> RewardTestRequest:
    """The first rows of the data with the answers to be scored.

    Answers are given to the rows in turn, or come from ``column``; without either each row is
    scored with its own reference answer and with an empty one. Raises InvalidInputError.
    """
    path = data if data is not None else Path(stage.data.train)
    if data is None and stage.data.train.startswith("s3://"):
        problem = Problem(
            "data.train", stage.data.train, "is not on this machine", "Name local rows with --data."
        )
        raise InvalidInputError([problem], subject="data")
    samples = []
    for number, row in enumerate(_rows(path, rows)):
        columns = _plain(row)
        truth = None if stage.data.answer is None else columns.get(stage.data.answer)
        prompt = _messages(stage, row, files)
        samples += [
            RewardSample(completion=text, prompt=prompt, ground_truth=truth, columns=columns)
            for text in _texts(row, number, answers, column, truth)
        ]
    return RewardTestRequest(
        rewards=list(stage.rewards), files=dict(files), samples=samples[:MAX_SAMPLES]
    )


def _texts(
    row: Mapping[str, Any], number: int, answers: Sequence[str], column: str | None, truth: Any
) -> list[str]:
    if answers:
        return [answers[number % len(answers)]]
    if column is None:
        return ["" if truth is None else str(truth), ""]
    if column not in row:
        fix = f"Columns: {', '.join(row)}."
        problem = Problem(f"row {number + 1}", column, "is no column of the data", fix)
        raise InvalidInputError([problem], subject="data")
    return [str(row[column])]


def _rows(path: Path, count: int) -> list[Mapping[str, Any]]:
    try:
        rows = list(first_rows(data_file(path) if path.is_dir() else path, count))
    except (DataError, OSError) as error:
        problem = Problem(str(path), None, str(error), "Name local rows with --data.")
        raise InvalidInputError([problem], subject="data") from error
    return rows


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that have a form in JSON; images, say, stay here."""
    plain = {}
    for name, value in row.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=_as_json))
        except TypeError:
            continue
    return plain


def _as_json(value: Any) -> Any:
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise TypeError(type(value).__name__)


def _messages(stage: GrpoStage, row: Mapping[str, Any], files: Files) -> list[dict[str, Any]]:
    """What the policy is asked, as the trainer writes it (`engine/prompts.py`)."""
    if stage.data.messages is not None:
        asked = [dict(message) for message in row.get(stage.data.messages) or ()]
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
    else:
        content = row.get(stage.data.problem, "")
        text = stage.prompt.template
        if stage.prompt.template_file is not None:
            text = files[stage.prompt.template_file]
        if text is not None:
            environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
            try:
                template = environment.from_string(text.strip())
                content = template.render(**{**row, "content": content})
            except (jinja2.TemplateError, TypeError) as error:
                problem = Problem("prompt", None, f"cannot be rendered: {error}", "Mend it.")
                raise InvalidInputError([problem]) from error
        asked = [{"role": "user", "content": content}]
    system = stage.prompt.system
    return asked if system is None else [{"role": "system", "content": system}, *asked]


def try_here(request: RewardTestRequest, folder: Path, data: Path) -> RewardTestView:
    """Run a request with the training side installed beside this client.

    ``folder`` is where the files of the sources lie; they may read it and the data's folder. Raises
    TrialError when the training side is not installed or does not answer.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise TrialError(
            f"scoring on this machine needs the training side ({', '.join(missing)} not found): "
            "install `grpohub[train]`, or let the hub's sandbox score with --hub"
        )
    command = [sys.executable, "-m", "training_container.rewards", "--files", str(folder)]
    done = subprocess.run(
        [*command, "--read", str(data.resolve().parent)],
        input=request.model_copy(update={"files": {}}).model_dump_json(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TrialError(f"the training side ended with code {done.returncode}; see above")
    return RewardTestView.model_validate_json(done.stdout)
