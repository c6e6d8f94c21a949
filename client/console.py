"""What all commands share: the consoles, the hub of this invocation, and exit codes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from client.chat import AnswerError
from client.hub import NOT_FOUND, ApiError, Hub, UnreachableError
from client.settings import ConfigurationError
from contracts.problems import InvalidInputError, Problem

__all__ = ["EXIT_FAILED", "EXIT_INVALID", "EXIT_UNREACHABLE", "State", "err", "out"]

EXIT_FAILED = 1
"""The hub refused, or the run did not succeed."""
EXIT_INVALID = 2
"""The run file, or something it names, is wrong; also wrong usage."""
EXIT_UNREACHABLE = 3
"""No hub is configured, or it does not answer."""

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


@dataclass(slots=True)
class State:
    """Options before the command."""

    api_url: str | None = None
    as_json: bool = False

    def hub(self) -> Hub:
        """The hub to talk to."""
        return Hub(self.api_url)


def state_of(context: typer.Context) -> State:
    """The options of this invocation."""
    found = context.find_object(State)
    return found if found is not None else State()


def show_json(value: Any) -> None:
    """Print a model, a list of models or plain data for a program."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def problem_table(problems: tuple[Problem, ...] | list[Problem]) -> Table:
    """All problems, one row each."""
    table = Table(show_lines=False, box=None, pad_edge=False)
    for title, style in (("where", "bold"), ("what", ""), ("found", "dim"), ("fix", "green")):
        table.add_column(title, style=style, overflow="fold")
    for problem in problems:
        found = problem.as_dict()["value"] if problem.value is not None else ""
        table.add_row(
            escape(problem.path), escape(problem.reason), escape(found), escape(problem.fix)
        )
    return table


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Turn the errors a person can act on into one message and an exit code."""
    try:
        yield
    except InvalidInputError as error:
        count = len(error.problems)
        err.print(f"[red]{escape(error.subject)}: {count} problem{'s' if count != 1 else ''}[/red]")
        err.print(problem_table(error.problems))
        raise typer.Exit(EXIT_INVALID) from error
    except ApiError as error:
        document = error.problem
        err.print(f"[red]{escape(document.title)}[/red] ({document.status})")
        err.print(escape(document.detail))
        if document.status == NOT_FOUND:
            err.print("See `grpohub list` and `grpohub endpoints`.")
        if document.problems:
            err.print(problem_table([Problem(**vars(item)) for item in document.problems]))
        if document.request_id:
            err.print(f"[dim]request {escape(document.request_id)}[/dim]")
        invalid = document.status in (400, 422)
        raise typer.Exit(EXIT_INVALID if invalid else EXIT_FAILED) from error
    except (ConfigurationError, UnreachableError) as error:
        err.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(EXIT_UNREACHABLE) from error
    except AnswerError as error:
        err.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(EXIT_FAILED) from error
    except (ClientError, BotoCoreError) as error:
        err.print(f"[red]AWS: {escape(str(error))}[/red]")
        raise typer.Exit(EXIT_FAILED) from error
