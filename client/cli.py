"""The `grpohub` command line: options, commands, and commands of other packages."""

from __future__ import annotations

import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from client import endpoint_commands, reward_commands, run_commands, submit_commands
from client.console import State, out, reported_errors, show_json
from client.run_files import prepare
from contracts.problems import InvalidInputError
from contracts.run_spec import run_schema

__all__ = ["app", "main"]

app = typer.Typer(
    help="One YAML file to a GRPO-trained, deployed model on Amazon SageMaker Spot.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (submit_commands.app, run_commands.app, endpoint_commands.app, reward_commands.app):
    app.add_typer(part)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"grpohub {metadata.version('grpohub')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    api_url: Annotated[
        str | None,
        typer.Option(help="The stack's ApiUrl; default GRPOHUB_API_URL, then the embedded mode."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log requests.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the command."""
    logging.basicConfig(level=logging.WARNING)
    if verbose:  # not botocore's, which logs what requests are signed with
        logging.getLogger("httpx").setLevel(logging.INFO)
    context.obj = State(api_url=api_url, as_json=as_json)


@app.command()
def validate(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A run file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check a run file and everything it names on this machine. Exit code 0 or 2."""
    as_json = as_json or context.obj.as_json
    if not as_json:
        with reported_errors():
            prepared = prepare(file)
        for note in prepared.notes:
            out.print(f"[yellow]note[/yellow] {escape(note)}")
        stages = ", ".join(f"{stage.name} ({stage.method})" for stage in prepared.spec.stages)
        out.print(f"[green]valid[/green] {escape(prepared.spec.name)}: {escape(stages)}")
        return
    try:
        prepared = prepare(file)
    except InvalidInputError as error:
        show_json({"valid": False, "problems": [p.as_dict() for p in error.problems], "notes": []})
        raise typer.Exit(2) from error
    show_json({"valid": True, "problems": [], "notes": list(prepared.notes)})


@app.command()
def schema() -> None:
    """Print the JSON Schema of the run file, for editors."""
    print(json.dumps(run_schema(), indent=2, ensure_ascii=False))


def main() -> None:
    """Entry point: commands of other installed parts (`local`) join, then the command runs."""
    for entry in metadata.entry_points(group="grpohub.commands"):
        try:
            app.add_typer(entry.load(), name=entry.name)
        except ModuleNotFoundError as error:
            _add_missing(entry.name, str(error))
    app()


def _add_missing(name: str, reason: str) -> None:
    """A command that says what to install, in place of one whose packages are not there."""

    @app.command(name, help=f"Not installed: pip install 'grpohub[{name}]'.", hidden=True)
    def missing() -> None:
        out.print(f"[red]{escape(reason)}[/red]: pip install 'grpohub[{name}]'")
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
