"""Commands about endpoints: deploy, endpoints, chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.markup import escape
from rich.table import Table

from client.chat import chat_messages
from client.console import EXIT_INVALID, err, out, reported_errors, show_json, state_of
from client.hub import Hub
from client.render import moment, state_text
from client.run_commands import show_answer
from contracts.problems import InvalidInputError, Problem
from contracts.run_spec import load_run_yaml
from contracts.states import EndpointState

__all__ = ["app"]

_SERVING = (EndpointState.IN_SERVICE, EndpointState.UPDATING, EndpointState.ROLLING_BACK)

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
    show_answer(context, run)


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
    if not found:
        out.print("no endpoints")
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What answers: an endpoint, and the model that the request names when it serves several."""

    title: str
    endpoint: str
    settings: Mapping[str, Any]

    @classmethod
    def find(cls, hub: Hub, name: str, settings: Mapping[str, Any]) -> Self:
        """Read `ENDPOINT`, `RUN` or either with `:MODEL`; endpoint names hold no colon."""
        place, _, model = name.partition(":")
        view = hub.endpoint_of(place)
        if view.state not in _SERVING:
            reason = f"is {view.state.value}" + (f": {view.reason}" if view.reason else "")
            coming = view.state is EndpointState.CREATING
            fix = "Wait for it: grpohub endpoints" if coming else f"grpohub deploy {view.run_id}"
            raise InvalidInputError([Problem("endpoint", place, reason, fix)], subject="chat")
        return cls(name, view.name, {**settings, "model": model} if model else settings)

    def answer(self, hub: Hub, messages: list[dict[str, Any]], *, stream: bool) -> str:
        """The whole answer, by the API or, without its limit of 30 s, straight from SageMaker."""
        if stream:
            return "".join(hub.stream_chat(self.endpoint, messages, **self.settings))
        return hub.chat(self.endpoint, messages, **self.settings)


@app.command()
def chat(
    context: typer.Context,
    endpoint: Annotated[
        str,
        typer.Argument(
            help="Name of an endpoint or id of a deployed run; NAME:ADAPTER for a LoRA adapter."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="The question; default standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image before the question; may be repeated.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Ask this one too, and print both answers side by side.", metavar="NAME"),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    stream: Annotated[
        bool, typer.Option(help="Straight from SageMaker, as it comes and without a limit of 30 s.")
    ] = False,
) -> None:
    """Ask an endpoint, or two at once."""
    question = prompt if prompt is not None else sys.stdin.read().strip()
    if not question:
        err.print("[red]there is no question[/red]")
        raise typer.Exit(EXIT_INVALID)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    settings = {name: value for name, value in given.items() if value is not None}
    as_json = state_of(context).as_json
    with reported_errors(), state_of(context).hub() as hub:
        messages = chat_messages(question, system=system, images=image or ())
        asked = [_Asked.find(hub, name, settings) for name in (endpoint, compare) if name]
        if len(asked) == 1 and stream and not as_json:
            for piece in hub.stream_chat(asked[0].endpoint, messages, **asked[0].settings):
                print(piece, end="", flush=True)
            print()
            return
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda one: one.answer(hub, messages, stream=stream), asked))
    if len(asked) == 1:
        show_json({"answer": answers[0]}) if as_json else print(answers[0])
    elif as_json:
        pairs = zip(asked, answers, strict=True)
        show_json([{"endpoint": one.title, "answer": answer} for one, answer in pairs])
    else:
        out.print(_side_by_side([one.title for one in asked], answers))


def _side_by_side(titles: list[str], answers: list[str]) -> Table:
    table = Table(expand=True, show_lines=False)
    for title in titles:
        table.add_column(escape(title), ratio=1, overflow="fold")
    table.add_row(*(escape(answer) for answer in answers))
    return table
