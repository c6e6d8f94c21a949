"""Commands that send something: submit, upload, recipes."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from botocore.exceptions import ClientError
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from client.console import (
    EXIT_FAILED,
    EXIT_INVALID,
    err,
    out,
    problem_table,
    reported_errors,
    show_json,
    state_of,
)
from client.hub import Hub
from client.run_commands import show_answer, watched
from client.run_files import PreparedRun, prepare
from client.upload import Progress as Told
from client.upload import Uploader, content_sha256, input_key
from client.watch import exit_code
from contracts.api import RunView
from contracts.layout import DATA_SUFFIXES, UPLOADED_RUN_FILES, join_uri, upload_error_key
from contracts.problems import InvalidInputError, Problem, nearest

__all__ = ["app"]

app = typer.Typer()
recipes = typer.Typer(help="Run files that an uploaded data file starts.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")

RunFile = Annotated[Path, typer.Argument(help="A run file.")]


@app.command()
def submit(
    context: typer.Context,
    file: RunFile,
    wait: Annotated[bool, typer.Option(help="Watch until it ends; exit code as `watch`.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be sent, and what the hub thinks of it."),
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same key and file give one run.")
    ] = None,
) -> None:
    """Check a run file, upload what it names, and start the run."""
    state = state_of(context)
    with reported_errors(), state.hub() as hub:
        if dry_run:
            _dry_run(hub, prepare(file), as_json=state.as_json)
            return
        with _progress_bar() as told:
            run = hub.submit(file, progress=told, idempotency_key=key)
        if state.as_json and not wait:
            show_json(run)
            return
        say = err if state.as_json else out
        say.print(f"[green]started[/green] {run.run_id}")
        if not wait:
            say.print(f"grpohub watch {run.run_id}")
            return
        run = watched(context, hub, run.run_id)
    show_answer(context, run)
    raise typer.Exit(exit_code(run))


def _dry_run(hub: Hub, prepared: PreparedRun, *, as_json: bool) -> None:
    """Resolve a run as `submit` would, and have the hub validate it; nothing is sent but text."""
    bucket = hub.info().bucket
    uris = {
        source: join_uri(
            bucket, input_key(source.path.resolve(), content_sha256(source.path.resolve()))
        )
        for source in prepared.uploads()
    }
    verdict = hub.validate(prepared.with_sources(uris), prepared.files)
    if as_json:
        show_json(verdict)
    elif verdict.valid:
        for source, uri in uris.items():
            out.print(f"would upload {escape(f'{source.path} to {uri}')}")
        for name in prepared.files:
            out.print(f"would send {escape(name)}")
        print(json.dumps(verdict.spec, indent=2, ensure_ascii=False))
    else:
        err.print(
            problem_table([Problem(p.path, p.value, p.reason, p.fix) for p in verdict.problems])
        )
    if not verdict.valid:
        raise typer.Exit(EXIT_INVALID)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Told]:
    """A bar for each upload; nothing where standard error is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def told(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(f"upload {name}", total=total)
            bars.update(tasks[name], completed=done)

        yield told


@app.command()
def upload(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A data file for a recipe, or a run.yaml.")],
    recipe: Annotated[
        str | None, typer.Option(help="Registered recipe that this data starts.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the run that this starts; 0: none.")
    ] = 60,
) -> None:
    """Put a file into the hub's inbox, which starts a run by itself.

    A data file needs --recipe. A run.yaml brings the files it names from beside it, and its data
    and models are uploaded when they are on this machine.
    """
    state = state_of(context)
    say = err if state.as_json else out
    with reported_errors():
        _check_upload(file, recipe)
        prepared = prepare(file) if recipe is None else None
        with state.hub() as hub:
            if recipe is not None:
                _check_recipe(hub, recipe)
            folder = recipe or f"{file.resolve().parent.name}-{time.time_ns():x}"
            key = f"uploads/{folder}/{file.name}"
            bucket = hub.info().bucket
            s3: Any = hub.settings.aws("s3")
            known = {run.run_id for run in hub.runs(limit=50)}
            old = _report(s3, bucket, key)
            with _progress_bar() as told:
                uploader = Uploader(s3, bucket, told)
                if prepared is None:
                    uploader.put(file, key, always=True)
                else:
                    text = _rewritten(prepared, uploader)
                    for name in prepared.files:
                        uploader.put(file.parent / name, f"uploads/{folder}/{name}", always=True)
                    # Last: with it the run starts.
                    s3.put_object(Bucket=bucket, Key=key, Body=text.encode())
            uri = join_uri(bucket, key)
            say.print(f"uploaded {escape(uri)}")
            run = _started_by(hub, s3, bucket, key, known, old, wait) if wait else None
    if run is not None:
        say.print(f"[green]started[/green] {run.run_id}")
    if state.as_json:
        show_json({"object": uri} if run is None else run)


def _check_upload(file: Path, recipe: str | None) -> None:
    """Refuse what the hub would leave lying in its inbox."""
    known = ", ".join(DATA_SUFFIXES)
    if not file.is_file():
        problem = Problem(str(file), None, "is no file", "Name a file on this machine.")
    elif recipe is None and file.name not in UPLOADED_RUN_FILES:
        fix = "Name it with --recipe; only a run.yaml starts a run on its own."
        problem = Problem(str(file), None, "needs a recipe", fix)
    elif recipe is not None and not file.name.endswith(DATA_SUFFIXES):
        problem = Problem(str(file), None, "is no data file", f"End its name in {known}.")
    else:
        return
    raise InvalidInputError([problem], subject="upload")


def _check_recipe(hub: Hub, name: str) -> None:
    known = hub.recipes()
    if name in known:
        return
    guess = nearest(name, known)
    fix = f"Registered are: {', '.join(known)}." if known else "Register it: grpohub recipes put"
    if guess:
        fix = f"Did you mean `{guess}`?"
    problem = Problem("--recipe", name, "is no recipe of this hub", fix)
    raise InvalidInputError([problem], subject="upload")


def _rewritten(prepared: PreparedRun, uploader: Uploader) -> str:
    """The run file with its local data and models uploaded and named by their addresses."""
    uris = {source: uploader.upload(source) for source in prepared.uploads()}
    # JSON is YAML, and the rewritten addresses are data, not the file's text.
    return json.dumps(prepared.with_sources(uris), indent=2, ensure_ascii=False)


def _started_by(
    hub: Hub, s3: Any, bucket: str, key: str, known: set[str], old: _Report | None, seconds: float
) -> RunView:
    """The run that an upload started. Exits with the hub's report when it was refused.

    ``old`` is the report that an earlier upload to the same key left.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for summary in hub.runs(limit=50):
            if summary.run_id not in known:
                run = hub.run(summary.run_id)
                if key in run.source:
                    return run
                known.add(summary.run_id)
        report = _report(s3, bucket, key)
        if report is not None and report != old:
            uri = join_uri(bucket, upload_error_key(key))
            err.print(f"[red]refused[/red]: {escape(uri)}")
            err.print(escape(report.text))
            raise typer.Exit(EXIT_INVALID)
        time.sleep(1)
    err.print(f"no run has started within {seconds:g} s; look at `grpohub list`")
    raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class _Report:
    """Why an upload was refused, and when that was written."""

    text: str
    time: dt.datetime


def _report(s3: Any, bucket: str, key: str) -> _Report | None:
    try:
        found = s3.get_object(Bucket=bucket, Key=upload_error_key(key))
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("NoSuchKey", "404"):
            raise
        return None
    return _Report(found["Body"].read().decode(), found["LastModified"])


@recipes.command("put")
def put_recipe(context: typer.Context, name: str, file: RunFile) -> None:
    """Register a run file: data uploaded with --recipe NAME is every stage's training data."""
    with reported_errors(), state_of(context).hub() as hub:
        prepared = prepare(file)
        with _progress_bar() as told:
            uploader = Uploader(hub.settings.aws("s3"), hub.info().bucket, told)
            text = _rewritten(prepared, uploader)
        hub.put_recipe(name, text, prepared.files)
    out.print(f"[green]registered[/green] {escape(name)}")


@recipes.command("list")
def list_recipes(context: typer.Context) -> None:
    """Names of the registered recipes."""
    with reported_errors(), state_of(context).hub() as hub:
        names = hub.recipes()
    if state_of(context).as_json:
        show_json(names)
        return
    for name in names:
        print(name)


@recipes.command("get")
def get_recipe(context: typer.Context, name: str) -> None:
    """Print a recipe."""
    with reported_errors(), state_of(context).hub() as hub:
        found = hub.recipe(name)
    if state_of(context).as_json:
        show_json(found)
    else:
        print(found.yaml)


@recipes.command("delete")
def delete_recipe(context: typer.Context, name: str) -> None:
    """Forget a recipe."""
    with reported_errors(), state_of(context).hub() as hub:
        hub.delete_recipe(name)
    out.print(f"deleted {escape(name)}")
