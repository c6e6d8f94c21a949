"""One container, from SageMaker's files to an exit code: PID 1 of a training job's host.

    read settings and run file -> join the other hosts -> fetch user files and model -> open the
    checkpoint to resume from -> start the uploader and one process per rank -> wait -> flush
    uploads -> agree on the outcome -> publish the model

`python -m training_container [train] [--dry-run]`. Exit codes are `contracts.failures.ExitCode`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.failures import ExitCode, Failure
from training_container.checkpoints.fence import read_control
from training_container.checkpoints.generation import mint_generation
from training_container.checkpoints.open import HostShape, open_checkpoint
from training_container.checkpoints.spool import Spool
from training_container.checkpoints.stop import StopSignal
from training_container.checkpoints.store import Store
from training_container.checkpoints.uploader import UploaderConfig
from training_container.cluster.addresses import free_port
from training_container.cluster.beacon import ProgressReader
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.many_hosts import ManyHosts
from training_container.cluster.peers import OneHost, Peers
from training_container.dry_run import describe
from training_container.failure import StageError, failure_of, write_failure_file
from training_container.host import Host, rank_config, uploader_config
from training_container.inputs import (
    AttemptInputs,
    fetch_code,
    fetch_hub_model,
    load_attempt,
)
from training_container.instance_id import report_host
from training_container.logs import set_up_logging
from training_container.publish import publish_model
from training_container.sagemaker_env import SageMakerEnv, read_sagemaker_env
from training_container.supervisor import Child, Supervisor, outcome_of_ranks

__all__ = ["main"]

log = logging.getLogger("grpohub")

LEAVING_SECONDS = 5.0
"""Of the grace after SIGTERM, kept for the failure file and for leaving."""
DRAIN_SECONDS = 3600.0
"""For uploads still under way when training has ended well."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a caller of `main` may set."""

    environ: Mapping[str, str]
    rank_module: str
    limits: ClusterLimits


def main(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    rank_module: str = "training_container.rank",
    limits: ClusterLimits | None = None,
) -> int:
    """Run the container; the exit code of the job."""
    parser = argparse.ArgumentParser(prog="python -m training_container")
    parser.add_argument("verb", nargs="?", choices=["train"], default="train")
    parser.add_argument(
        "--dry-run", action="store_true", help="resolve and print everything, train nothing"
    )
    options = parser.parse_args(argv)
    set_up_logging(environ)
    output = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "output"
    _leave_at_once_on_sigterm(output)
    failure: Failure | None
    try:
        env = read_sagemaker_env(environ)
        inputs = load_attempt(env)
        if options.dry_run:
            print(describe(env, inputs))
            return int(ExitCode.OK)
        with _scratch(env.base) as work:
            settings = Settings(environ, rank_module, limits or ClusterLimits())
            failure = run_job(env, inputs, work, settings)
    except Exception as error:
        log.exception("the container failed")
        failure = failure_of(error)
    if failure is None:
        return int(ExitCode.OK)
    log.error("%s", failure.text())
    write_failure_file(output, failure)
    return int(failure.code)


def run_job(
    env: SageMakerEnv, inputs: AttemptInputs, work: Path, settings: Settings
) -> Failure | None:
    """This host's part of the job; None when the model is published, else what happened. All hosts
    of a job come to the same.
    """
    store, supervisor = Store(inputs.config.bucket), Supervisor()
    peers: Peers = OneHost(settings.limits)
    if env.num_hosts > 1:
        peers = ManyHosts(
            env,
            store,
            inputs.layout,
            inputs.config.attempt,
            supervisor=supervisor,
            work=work,
            environ=settings.environ,
            limits=settings.limits,
        )

    def train() -> Failure | None:
        peers.join()
        with peers.guard(env.output):
            host = prepare(env, inputs, store, work, peers)
        return run_host(host, peers, supervisor, settings)

    def publish() -> None:
        manifest = publish_model(store, inputs.layout, work / "export", inputs.config.attempt)
        log.info("the model is published: %d files, %d bytes", len(manifest.files), manifest.size)

    try:
        failure = peers.outcome(_named(train))
        if failure is None and env.is_leader:
            failure = _named(publish)
        peers.announce(failure)
    finally:
        peers.close()
    return failure


def _named(work: Callable[[], Failure | None]) -> Failure | None:
    """What ``work`` comes to, an exception as the failure that it means: other hosts must hear."""
    try:
        return work()
    except Exception as error:
        log.exception("this host failed")
        return failure_of(error)


def prepare(
    env: SageMakerEnv, inputs: AttemptInputs, store: Store, work: Path, peers: Peers
) -> Host:
    """Everything that must be on the disk before a rank starts.

    Raises:
        StageError: with the documented code of whatever is missing or wrong.
    """
    config, layout = inputs.config, inputs.layout
    control = read_control(store, layout.control)
    if not control.allows(config.attempt):
        raise StageError(ExitCode.FENCED, f"attempt {control.attempt} of this stage has taken over")
    (work / "spec.json").write_text(inputs.spec_text)
    fetch_code(store, layout.run, work / "code")
    env.channel("train")
    if inputs.stage.data.validation is not None:
        env.channel("validation")
    if "model" in env.channels:
        model = env.channel("model")
    else:
        model = fetch_hub_model(inputs, work / "model", weights=env.host_rank == 0)
    shape = HostShape(env.host_rank, env.num_hosts, env.world_size)
    resume = open_checkpoint(
        store,
        layout,
        work / "resume",
        shape=shape,
        floor=config.resume_floor,
        agreement=peers.agreement,
    )
    weights = None
    if config.weights_from is not None:
        source = config.weights_from
        weights = open_checkpoint(
            store,
            layout.run.stage(source.stage_index, source.stage),
            work / "weights",
            shape=shape,
            exact=source.checkpoint,
            whole=True,
            agreement=peers.agreement,
        )
    for opened, what in ((resume, "resuming after"), (weights, "continuing from")):
        if opened is not None:
            log.info("%s %s, %d bytes", what, opened.id, opened.downloaded_bytes)
    generation = peers.settle(
        "generation",
        mint_generation(dt.datetime.now(dt.UTC), after=resume.id.generation if resume else None),
    )
    report_host(
        store,
        layout,
        attempt=config.attempt,
        host_rank=env.host_rank,
        host=env.current_host,
        generation=generation,
    )
    return Host(env, inputs, store, work, generation, model, resume, weights)


def run_host(
    host: Host, peers: Peers, supervisor: Supervisor, settings: Settings
) -> Failure | None:
    """Train on this host's ranks and flush their uploads; None when all went well."""
    stop = StopSignal()
    stop.install()
    uploader_file, rank_file = host.work / "uploader.json", host.work / "rank.json"
    uploads = uploader_config(host)
    uploads.write(uploader_file)
    rank_config(host).write(rank_file)
    notes = host.work / "notes"
    notes.mkdir()
    uploader = supervisor.start(
        "uploader",
        [sys.executable, "-m", "training_container.checkpoints.uploader", str(uploader_file)],
        settings.environ,
    )
    master = peers.settle("master", [peers.address, free_port(peers.address)])
    first, local = host.env.host_rank * host.env.ranks_per_host, host.env.ranks_per_host
    peers.train(stop, ProgressReader(notes, range(first, first + local)))
    ranks = [
        supervisor.start(
            f"rank {variables['RANK']}",
            [sys.executable, "-m", settings.rank_module, str(rank_file)],
            {**settings.environ, **variables},
        )
        for variables in rank_variables(host.env, settings.environ, master, peers.interface)
    ]
    failure: Failure | None = None

    def every_turn() -> None:
        nonlocal failure
        if not uploader.running:
            supervisor.restart(uploader)
        failure = failure or peers.look()
        if failure is not None:
            supervisor.kill(ranks)

    try:
        supervisor.watch_ranks(ranks, stop, every_turn=every_turn)
    except StageError:
        supervisor.kill([*ranks, uploader])
        raise
    failure = failure or outcome_of_ranks(ranks, notes, stopping=stop.requested)
    if failure is not None:
        peers.report(failure)
    _drain(supervisor, uploader, stop, lambda: peers.hurry() and settings.limits.drain)
    return failure or _unfinished_uploads(uploader, uploads, stop)


def rank_variables(
    env: SageMakerEnv, environ: Mapping[str, str], master: Sequence[Any], interface: str
) -> list[dict[str, str]]:
    """The variables that torchrun would set, for each rank of this host.

    ``master``: address and port of rank 0's store. The interface is pinned, because NCCL and Gloo
    have been seen to choose a link-local or the loopback one.
    """
    local = env.ranks_per_host
    # Exactness needs the same number of threads in every incarnation, so it is never left open. One
    # core is left to the uploader: a pool of threads is as slow as the one that waits for a core.
    threads = environ.get("OMP_NUM_THREADS", str(max(1, ((os.cpu_count() or 1) - 1) // local)))
    common = {
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": str(master[0]),
        "MASTER_PORT": str(master[1]),
        "GLOO_SOCKET_IFNAME": interface,
        **({"NCCL_SOCKET_IFNAME": interface} if env.num_hosts > 1 else {}),
        "OMP_NUM_THREADS": threads,
        # A thread that spins at a barrier takes the core that the uploader or a peer needs.
        "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    first = env.host_rank * local
    return [{**common, "RANK": str(first + r), "LOCAL_RANK": str(r)} for r in range(local)]


def _drain(
    supervisor: Supervisor, uploader: Child, stop: StopSignal, hurry: Callable[[], float | bool]
) -> None:
    """Let the uploader finish: until nothing is left, until the grace after SIGTERM ends, or for
    the seconds that ``hurry`` answers when a host is lost.
    """
    supervisor.signal([uploader], signal.SIGTERM)
    deadline = time.monotonic() + DRAIN_SECONDS
    while uploader.running and time.monotonic() < deadline:
        if stop.requested and stop.grace_left() < LEAVING_SECONDS:
            break
        if seconds := hurry():
            deadline = min(deadline, time.monotonic() + seconds)
        supervisor.wait(uploader, time.monotonic() + 0.5)
    supervisor.kill([uploader])


def _unfinished_uploads(
    uploader: Child, config: UploaderConfig, stop: StopSignal
) -> Failure | None:
    """A checkpoint that a later stage starts from must be in S3 before this stage counts as
    done.
    """
    status = Spool(Path(config.spool), config.local_ranks).status()
    if status.fenced_by:
        return Failure(ExitCode.FENCED, f"attempt {status.fenced_by} of this stage has taken over")
    if stop.requested and uploader.code != 0:
        return Failure(ExitCode.STOPPED, "stopped while the last uploads were under way")
    lost = sorted(set(status.abandoned) & set(config.pinned_steps))
    if lost or uploader.code != 0:
        return Failure(
            ExitCode.STORAGE,
            f"uploads did not finish (steps {lost}, uploader {uploader.code}): {status.last_error}",
        )
    return None


@contextmanager
def _scratch(base: Path) -> Iterator[Path]:
    """An empty folder of this container on its scratch volume, `/tmp` on SageMaker.

    Not under `/opt/ml/checkpoints`, which SageMaker mirrors file by file. What an incarnation that
    was killed left there is removed: only S3 counts.
    """
    name = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"grpohub-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave_at_once_on_sigterm(output: Path) -> None:
    """While inputs are being fetched there is nothing to save: a stop request ends it there."""

    def leave(_number: int, _frame: Any) -> None:
        write_failure_file(output, Failure(ExitCode.STOPPED, "stopped before training began"))
        os._exit(int(ExitCode.STOPPED))

    signal.signal(signal.SIGTERM, leave)
