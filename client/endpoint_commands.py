"""Commands about endpoints: deploy, endpoints, chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from client.console import EXIT_INVALID, err, out, reported_errors, show_json, state_of
from client.render import moment, state_text
from client.run_commands import show_run
from contracts.problems import InvalidInputError, Problem
from contracts.run_spec import load_run_yaml

__all__ = ["app"]

app = typer.Typer()
endpoints = typer.Typer(help="Live endpoints.", invoke_without_command=True)
app.add_typer(endpoints, name="endpoints")


@app.command()
def deploy(
    context: typer.Context,
    run_id: Annotated[
        str, typer.Argument(help="Id of a run with a published model.", metavar="RUN")
    ],
    file: Annotated[
        Path | None, typer.Option(help="YAML file with a `deploy` section other than the run's.")
    ] = None,
) -> None:
    """Deploy a run's model; an existing endpoint is updated without downtime."""
    with reported_errors(), state_of(context).hub() as hub:
        run = hub.deploy(run_id, None if file is None else _section(file))
    if state_of(context).as_json:
        show_json(run)
    else:
        show_run(run)


def _section(file: Path) -> dict[str, Any]:
    try:
        document = load_run_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = Problem(str(file), None, error.strerror or str(error), "Name a YAML file.")
        raise InvalidInputError([problem], subject="deploy settings") from error
    section = document.get("deploy", document) if isinstance(document, dict) else document
    if not isinstance(section, dict):
        problem = Problem(str(file), section, "is no mapping", "Write a `deploy:` section.")
        raise InvalidInputError([problem], subject="deploy settings")
    return section


@endpoints.callback()
def list_endpoints(context: typer.Context) -> None:
    """List endpoints."""
    if context.invoked_subcommand is not None:
        return
    with reported_errors(), state_of(context).hub() as hub:
        found = hub.endpoints()
    if state_of(context).as_json:
        show_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("endpoint", "state", "run", "model", "on", "updated", "reason"):
        table.add_column(column, overflow="fold")
    for item in found:
        table.add_row(
            item.name,
            state_text(item.state),
            item.run_id,
            item.model_version[:12],
            f"{item.instance_count} × {item.instance_type}",
            moment(item.updated_at),
            escape(item.reason or ""),
        )
    out.print(table)


@endpoints.command("get")
def get_endpoint(context: typer.Context, name: str) -> None:
    """Show one endpoint."""
    with reported_errors(), state_of(context).hub() as hub:
        show_json(hub.endpoint(name))


@endpoints.command("delete")
def delete_endpoint(context: typer.Context, name: str) -> None:
    """Delete an endpoint, its configuration and its model."""
    with reported_errors(), state_of(context).hub() as hub:
        view = hub.delete_endpoint(name)
    if state_of(context).as_json:
        show_json(view)
        return
    out.print(f"deleted {', '.join(view.deleted) or 'nothing yet'}")
    if view.remaining:
        out.print(f"still to go: {', '.join(view.remaining)}")


@app.command()
def chat(
    context: typer.Context,
    endpoint: Annotated[str, typer.Argument(help="Name of an endpoint.")],
    prompt: Annotated[
        str | None, typer.Argument(help="The question; default standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    stream: Annotated[bool, typer.Option(help="Print the answer as it comes.")] = False,
) -> None:
    """Ask an endpoint."""
    question = prompt if prompt is not None else sys.stdin.read().strip()
    if not question:
        err.print("[red]there is no question[/red]")
        raise typer.Exit(EXIT_INVALID)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    given = {"max_tokens": max_tokens, "temperature": temperature}
    settings = {name: value for name, value in given.items() if value is not None}
    with reported_errors(), state_of(context).hub() as hub:
        if stream:
            for piece in hub.stream_chat(endpoint, messages, **settings):
                print(piece, end="", flush=True)
            print()
        else:
            answer = hub.chat(endpoint, messages, **settings)
            if state_of(context).as_json:
                show_json({"answer": answer})
            else:
                print(answer)
