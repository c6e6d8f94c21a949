"""`grpohub local`: start, look at and stop the embedded cloud, and make it fail on purpose."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from local_aws.running import NOTE, NotRunningError, RefusedError, Running
from local_aws.sagemaker.capacity import Shortage
from local_aws.site import REGION

DEFAULT_PORT = 4599
START_SECONDS = 180.0
WAKE_SECONDS = 0.5

app = typer.Typer(
    help="The whole hub on this machine: the same control plane, no AWS account.",
    no_args_is_help=True,
)
out = Console(highlight=False, soft_wrap=True, emoji=False)


def _on(value: str | bool) -> bool:
    if str(value).lower() not in ("on", "off", "true", "false"):
        raise typer.BadParameter("say on or off")
    return str(value).lower() in ("on", "true")


StateDir = Annotated[Path, typer.Option(help="Where everything is kept.")]
Run = Annotated[str, typer.Argument(help="A run id, or a training job's name.")]
Switch = Annotated[bool, typer.Argument(help="on or off", metavar="[on|off]", parser=_on)]
HERE = Path(".grpohub")


@app.command()
def up(
    *,
    port: Annotated[int, typer.Option(help="The one port of all services.", min=0, max=65535)] = (
        DEFAULT_PORT
    ),
    state_dir: StateDir = HERE,
    assembly: Annotated[
        Path | None,
        typer.Option(help="A synthesised cdk.out; by default this checkout is synthesised."),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Divides schedules, grace periods and Wait states.", min=0.1)
    ] = 10.0,
    spot_market: Annotated[
        str, typer.Option(help="Reclaim Spot jobs by chance, e.g. seed=7,mean-minutes=2.")
    ] = "",
    detach: Annotated[bool, typer.Option(help="Return when it is up.")] = False,
) -> None:
    """Start everything, deploy the stack, and serve until Ctrl-C."""
    _make(state_dir)
    _refuse_second(state_dir)
    if detach:
        _start_in_background(state_dir)
        return
    from local_aws.assembly import AssemblyError
    from local_aws.sagemaker.capacity import SpotMarket
    from local_aws.server import LocalCloud, PortTakenError
    from local_aws.synth import SynthesisError, current_assembly

    # Both, since what a script starts in the background has Ctrl-C ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    try:
        market = SpotMarket.parse(spot_market) if spot_market else None
        if assembly is None:
            out.print("synthesising the stack (quick when nothing has changed) …")
            assembly = current_assembly(state_dir / "cdk.out")
        cloud = LocalCloud(assembly, state_dir, port=port, speed=speed, market=market, report=_say)
        with cloud:
            _introduce(cloud, state_dir, time.monotonic() - began)
            _wait_for_the_end()
        _forget(state_dir)
        # All is stopped and kept; to take moto's tables apart would cost the interpreter seconds.
        sys.stdout.flush()
        os._exit(0)
    except PortTakenError as error:
        _fail(f"{error}: choose another with --port, or stop what listens there")
    except (AssemblyError, SynthesisError, ValueError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        out.print("stopped before it was up")
    finally:
        _forget(state_dir)


@app.command()
def down(state_dir: StateDir = HERE) -> None:
    """Stop the embedded cloud and everything it started."""
    running = _running(state_dir)
    if not running.stop():
        _fail(f"process {running.pid} has not ended")
    out.print("stopped; what is kept lies in", str(state_dir))


@app.command()
def status(
    state_dir: StateDir = HERE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what runs and which faults are switched on."""
    answer = _ask(state_dir, "status")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    for title in ("api_url", "outputs", "jobs", "endpoints", "faults", "skipped", "refused"):
        out.print(f"[bold]{title}[/bold]")
        value = answer[title]
        rows = value.items() if isinstance(value, dict) else [("", v) for v in _listed(value)]
        for name, entry in rows:
            out.print(f"  {name} {entry}".rstrip(), markup=False)


@app.command()
def interrupt(
    run: Run,
    notice: Annotated[bool, typer.Option(help="SIGTERM before SIGKILL, and EC2's warning.")] = True,
    hold: Annotated[float, typer.Option(help="Seconds until there is capacity again.")] = 2.0,
    state_dir: StateDir = HERE,
) -> None:
    """Reclaim the Spot instances that a run trains on."""
    job = _ask(state_dir, "interrupt", run=run, notice=notice, hold=hold)["job"]
    how = "with notice" if notice else "without notice"
    out.print(f"{job} interrupted {how}; capacity returns in {hold:g} s")


@app.command("crash-host")
def crash_host(
    run: Run,
    host: Annotated[int, typer.Option(help="The host's rank.")] = 0,
    state_dir: StateDir = HERE,
) -> None:
    """Kill one host of a run's training job."""
    job = _ask(state_dir, "crash-host", run=run, host=host)["job"]
    out.print(f"host {host} of {job} killed")


@app.command("fail-capacity")
def fail_capacity(
    instance_type: Annotated[str, typer.Argument(help="For example ml.g6e.48xlarge.")],
    kind: Annotated[
        Shortage,
        typer.Option(
            help="capacity (the job fails), wait (it stays Pending) or quota (it is refused)."
        ),
    ] = Shortage.CAPACITY,
    count: Annotated[int | None, typer.Option(help="Only the next so many.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Capacity is back.")] = False,
    state_dir: StateDir = HERE,
) -> None:
    """Let an instance type be unavailable."""
    if off:
        _ask(state_dir, "restore-capacity", type=instance_type)
        out.print(f"{instance_type} is available")
        return
    _ask(state_dir, "fail-capacity", type=instance_type, kind=kind, count=count)
    out.print(f"{instance_type} is unavailable ({kind})")


@app.command("drop-events")
def drop_events(switch: Switch = True, state_dir: StateDir = HERE) -> None:
    """Lose every event; the reconciler has to do."""
    out.print(_ask(state_dir, "drop-events", on=switch))


@app.command("duplicate-events")
def duplicate_events(switch: Switch = True, state_dir: StateDir = HERE) -> None:
    """Deliver every event twice."""
    out.print(_ask(state_dir, "duplicate-events", on=switch))


@app.command("reorder-events")
def reorder_events(switch: Switch = True, state_dir: StateDir = HERE) -> None:
    """Hold each event back for up to three seconds."""
    out.print(_ask(state_dir, "reorder-events", on=switch))


@app.command("spot-market")
def spot_market(
    market: Annotated[
        str, typer.Argument(help="seed=7,mean-minutes=2, or nothing to end it.")
    ] = "",
    state_dir: StateDir = HERE,
) -> None:
    """Reclaim Spot jobs by chance: the same seed, the same fate."""
    out.print(_ask(state_dir, "spot-market", market=market))


def _introduce(cloud: Any, state_dir: Path, seconds: float) -> None:
    out.print(f"[green]up[/green] in {seconds:.1f} s")
    out.print(f"  API      {cloud.api_url}")
    out.print(f"  bucket   {cloud.outputs.get('BucketName', '-')}")
    out.print(f"  AWS      export AWS_ENDPOINT_URL={cloud.url} (any credentials)")
    out.print("  submit   grpohub submit RUN.yaml --wait", markup=False)
    if cloud.deployment.skipped:
        names = ", ".join(f"{kind} ({n})" for kind, n in sorted(cloud.deployment.skipped.items()))
        out.print(f"  without  {names}", markup=False)
    for line in cloud.deployment.refused:
        out.print(f"  refused  {line}", markup=False)
    # Last: who waits for this note then finds all of the above in the log.
    Running.here(cloud.url, cloud.api_url, REGION, cloud.outputs).write(state_dir)


def _wait_for_the_end() -> None:
    try:
        # In steps: the kernel may hand a signal to any thread, which does not wake this one, and
        # only this one raises KeyboardInterrupt.
        while True:
            time.sleep(WAKE_SECONDS)
    except KeyboardInterrupt:
        # A second Ctrl-C must not leave children behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        out.print("stopping …")


def _start_in_background(state_dir: Path) -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    arguments = arguments[arguments.index("up") :]
    log = state_dir / "local.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "local_aws", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (state_dir / NOTE).is_file():
            out.print(log.read_text(encoding="utf-8"), markup=False)
            return
        time.sleep(0.1)
    _fail(log.read_text(encoding="utf-8"))


def _make(state_dir: Path) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"{state_dir}: {error.strerror}: name another folder with --state-dir")


def _refuse_second(state_dir: Path) -> None:
    try:
        running = Running.find(state_dir)
    except NotRunningError:
        (state_dir / NOTE).unlink(missing_ok=True)
        return
    _fail(f"an embedded cloud already runs here: {running.url} (process {running.pid})")


def _forget(state_dir: Path) -> None:
    with contextlib.suppress(NotRunningError):
        if Running.find(state_dir).pid == os.getpid():
            (state_dir / NOTE).unlink()


def _running(state_dir: Path) -> Running:
    try:
        return Running.find(state_dir)
    except NotRunningError as error:
        _fail(str(error))


def _ask(state_dir: Path, action: str, **settings: Any) -> dict[str, Any]:
    try:
        return _running(state_dir).ask(action, **settings)
    except RefusedError as error:
        _fail(str(error))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _say(text: str) -> None:
    out.print(text, markup=False)


def _fail(text: str) -> NoReturn:
    out.print("[red]error[/red] ", end="")
    out.print(text, markup=False)
    raise typer.Exit(1)
