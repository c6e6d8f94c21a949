"""Commands about runs: list, get, watch, logs, metrics, checkpoints, timeline, cancel, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from client.console import EXIT_INVALID, err, out, reported_errors, show_json, state_of
from client.hub import Hub
from client.metric_views import check_names, metric_table, plot_png, plot_terminal, rows_of_run
from client.render import duration_text, last_writing, moment, size_text, state_text
from client.watch import Watch, exit_code
from contracts.api import AttemptView, RunView
from contracts.states import RunState

__all__ = ["app", "show_answer", "watched"]

app = typer.Typer()

RunId = Annotated[str, typer.Argument(help="Id of a run.", metavar="RUN")]
StageOption = Annotated[int | None, typer.Option(help="Stage index; default the latest begun.")]


@app.command("list")
def list_runs(
    context: typer.Context,
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20,
) -> None:
    """List runs."""
    with reported_errors(), state_of(context).hub() as hub:
        runs = hub.runs(state=state, limit=limit)
    if state_of(context).as_json:
        show_json(runs)
        return
    if not runs:
        out.print("no runs" if state is None else f"no run is {state.value}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "created", "endpoint", "reason"):
        table.add_column(column, overflow="fold")
    for run in runs:
        row = (moment(run.created_at), run.endpoint_name or "", escape(run.reason or ""))
        table.add_row(run.run_id, state_text(run.state), *row)
    out.print(table)


@app.command()
def get(context: typer.Context, run_id: RunId) -> None:
    """Show a run and its training jobs."""
    with reported_errors(), state_of(context).hub() as hub:
        run, attempts = hub.run(run_id), hub.attempts(run_id)
    if state_of(context).as_json:
        plain = [attempt.model_dump(mode="json") for attempt in attempts]
        show_json({"run": run.model_dump(mode="json"), "attempts": plain})
        return
    show_run(run)
    if attempts:
        out.print()
        out.print(_attempt_table(attempts))


def show_run(run: RunView) -> None:
    """Print a run for a person."""
    out.print(f"[bold]{run.run_id}[/bold]", state_text(run.state))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("started", f"{moment(run.created_at)} by {escape(run.source)}")
    if run.reason:
        facts.add_row("reason", escape(run.reason))
    for stage in run.stages:
        steps = f"step {stage.step or 0}/{stage.max_steps or '?'}"
        tries = f"{stage.attempts} attempt{'' if stage.attempts == 1 else 's'}"
        text = f"{stage.index} {stage.name} ({stage.method}), {steps}, {tries}: "
        facts.add_row("stage", Text(text).append_text(state_text(stage.state)))
    if run.model is not None:
        facts.add_row("model", escape(run.model.uri))
        facts.add_row("", f"{size_text(run.model.size)}, version {run.model.version[:12]}")
    if run.endpoint_name is not None:
        facts.add_row("endpoint", run.endpoint_name)
    if run.smoke_test is not None:
        test = run.smoke_test
        facts.add_row("asked", f"from the {escape(test.source)}")
        facts.add_row("", escape(test.prompt))
        facts.add_row("answered", f"in {duration_text(test.seconds)}")
        facts.add_row("", escape(test.answer))
    out.print(facts)


def _attempt_table(attempts: list[AttemptView]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("job", "state", "outcome", "on", "from step", "newest", "interrupted", "time")
    for column in (*columns, "saved"):
        table.add_column(column, overflow="fold")
    for job in attempts:
        kind = "Spot" if job.spot else "on demand"
        saved = "-" if job.spot_savings is None else f"{job.spot_savings:.0%}"
        table.add_row(
            f"…-{job.stage_index}-a{job.attempt:03d}",  # the rest is the run's id, shown above
            state_text(job.state),
            job.outcome.value if job.outcome else job.secondary_status or "",
            f"{job.instance_count} × {job.instance_type} {kind}",
            "-" if job.resumed_from_step is None else str(job.resumed_from_step),
            "-" if job.newest_checkpoint_step is None else str(job.newest_checkpoint_step),
            str(job.interruptions),
            duration_text(job.training_seconds),
            saved,
        )
    return table


@app.command()
def watch(
    context: typer.Context,
    run_id: RunId,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between observations.")] = 2.0,
) -> None:
    """Watch a run until it ends; the exit code says whether it succeeded."""
    with reported_errors(), state_of(context).hub() as hub:
        run = watched(context, hub, run_id, every)
    show_answer(context, run)
    raise typer.Exit(exit_code(run))


def watched(context: typer.Context, hub: Hub, run_id: str, every: float = 2.0) -> RunView:
    """Watch a run until it ends; for a program the standard output stays free for the answer."""
    console = err if state_of(context).as_json else out
    return Watch(hub, run_id, console, seconds_between=every).follow()


@app.command()
def logs(
    context: typer.Context,
    run_id: RunId,
    stage: StageOption = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt; default the latest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the attempt ends.")] = False,
) -> None:
    """Print the containers' logs."""
    with reported_errors(), state_of(context).hub() as hub:
        for line in hub.logs(run_id, stage=stage, attempt=attempt, follow=follow):
            if state_of(context).as_json:
                print(line.model_dump_json(), flush=True)
            else:
                text = last_writing(line.message)
                print(f"{moment(line.time)} {line.host} {text}", flush=True)


@app.command()
def metrics(
    context: typer.Context,
    run_id: RunId,
    stage: Annotated[int | None, typer.Option(help="Stage index; default all.")] = None,
    plot: Annotated[
        str | None, typer.Option(help="`terminal`, or a PNG file to draw into.", metavar="TARGET")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Metric; may be repeated. Default the main ones.")
    ] = None,
) -> None:
    """Print or draw a run's metrics."""
    if plot is not None and plot != "terminal" and Path(plot).suffix != ".png":
        err.print("[red]--plot takes `terminal` or the name of a .png file[/red]")
        raise typer.Exit(EXIT_INVALID)
    with reported_errors(), state_of(context).hub() as hub:
        run = hub.run(run_id)
        rows = rows_of_run(hub, run, stage)
        check_names(rows, name)
        marks = hub.timeline(run_id) if plot is not None else []
    if state_of(context).as_json:
        show_json(rows)
    elif not rows:
        out.print("no metrics yet")
    elif plot is None:
        out.print(metric_table(rows, name))
    elif plot == "terminal":
        out.print(plot_terminal(rows, name))
    else:
        names = [item.name for item in run.stages]
        try:
            plot_png(rows, Path(plot), names=name, timeline=marks, stage_names=names, title=run_id)
        except OSError as error:
            err.print(f"[red]{escape(plot)}: {error.strerror}[/red]: name a file to write")
            raise typer.Exit(EXIT_INVALID) from error
        out.print(f"wrote {escape(plot)}")


@app.command()
def checkpoints(context: typer.Context, run_id: RunId, stage: StageOption = None) -> None:
    """List a stage's checkpoints, and why incomplete ones are incomplete."""
    with reported_errors(), state_of(context).hub() as hub:
        found = hub.checkpoints(run_id, stage=stage)
    if state_of(context).as_json:
        show_json(found)
        return
    if not found:
        out.print("no checkpoints yet")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "step", "generation", "state", "attempt", "size", "metrics"):
        table.add_column(column, overflow="fold")
    for item in found:
        verdict = "[green]complete[/green]" if item.complete else escape("; ".join(item.reasons))
        shown = ", ".join(f"{key} {value:.4g}" for key, value in item.metrics.items())
        table.add_row(
            f"{item.stage_index} {item.stage}",
            str(item.step),
            item.generation,
            verdict,
            str(item.attempt or "-"),
            size_text(item.size),
            escape(shown),
        )
    out.print(table)


@app.command()
def timeline(context: typer.Context, run_id: RunId) -> None:
    """What happened to a run, in order."""
    with reported_errors(), state_of(context).hub() as hub:
        entries = hub.timeline(run_id)
    if state_of(context).as_json:
        show_json(entries)
        return
    for entry in entries:
        line = f"[dim]{moment(entry.time)}[/dim] [cyan]{entry.kind}[/cyan] {escape(entry.text)}"
        out.print(line, soft_wrap=True)


@app.command()
def cancel(context: typer.Context, run_id: RunId) -> None:
    """Stop a run."""
    with reported_errors(), state_of(context).hub() as hub:
        show_answer(context, hub.cancel(run_id))


@app.command()
def resume(context: typer.Context, run_id: RunId) -> None:
    """Go on with a failed or cancelled run from its newest complete checkpoint."""
    with reported_errors(), state_of(context).hub() as hub:
        show_answer(context, hub.resume(run_id))


def show_answer(context: typer.Context, run: RunView) -> None:
    """Print a run for a person or a program."""
    if state_of(context).as_json:
        show_json(run)
    else:
        show_run(run)
