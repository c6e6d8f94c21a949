"""Commands about rewards: the built-in ones, and trials of a run file's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

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
from client.trials import (
    TrialError,
    read_answers,
    reward_file_stage,
    run_file_stage,
    trial_request,
    try_here,
)
from contracts.problems import Problem
from contracts.reward_trial import trial_table

__all__ = ["app"]

app = typer.Typer()
rewards = typer.Typer(help="Built-in rewards, and trials of your own.", no_args_is_help=True)
app.add_typer(rewards, name="rewards")


@rewards.command("list")
def list_rewards(context: typer.Context) -> None:
    """The built-in rewards."""
    with reported_errors(), state_of(context).hub() as hub:
        catalogue = hub.rewards()
    if state_of(context).as_json:
        show_json(catalogue)
        return
    for item in catalogue.rewards:
        out.print(f"[bold]{item.name}[/bold]  {escape(item.summary)}")


@rewards.command("test")
def try_rewards(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A run file, or a Python file with a reward.")],
    data: Annotated[
        Path | None, typer.Option(help="Rows; default the stage's own training data.")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help='Answers to score, a JSON text or {"completion": …} a line.'),
    ] = None,
    completions: Annotated[
        str | None, typer.Option(help="Column of the data with the answers to score.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="The first GRPO stage when absent.")] = None,
    function: Annotated[str | None, typer.Option(help="Of a Python file.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=64, help="How many rows.")] = 4,
    in_hub: Annotated[
        bool, typer.Option("--hub", help="In the hub's sandbox: functions and files only.")
    ] = False,
) -> None:
    """Score real rows with a run file's reward sources, before any training.

    On this machine, with the training side installed, every kind of source runs. Without answers
    each row is scored with its reference answer and with an empty one.
    """
    state = state_of(context)
    with reported_errors():
        if file.suffix == ".py":
            chosen, files = reward_file_stage(file, function, data)
        else:
            chosen, files = run_file_stage(file, stage)
        request = trial_request(
            chosen,
            files,
            data=data,
            answers=[] if answers is None else read_answers(answers),
            column=completions,
            rows=rows,
        )
        if in_hub:
            with state.hub() as hub:
                view = hub.test_rewards(request)
        else:
            try:
                view = try_here(request, file.parent, data or Path(chosen.data.train))
            except TrialError as error:
                err.print(f"[red]{escape(str(error))}[/red]")
                raise typer.Exit(EXIT_FAILED) from error
    if state.as_json:
        show_json(view)
    elif view.problems:
        err.print(problem_table([Problem(p.path, p.value, p.reason, p.fix) for p in view.problems]))
    else:
        print(trial_table([sample.completion for sample in request.samples], view))
    if view.problems:
        raise typer.Exit(EXIT_INVALID)
    if any(source.state == "failed" for source in view.sources):
        raise typer.Exit(EXIT_FAILED)
