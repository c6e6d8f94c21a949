"""One container, from SageMaker's files to an exit code: PID 1 of a training job's host.

    read settings and run file -> fetch user files and model -> open the checkpoint to resume from
    -> start the uploader and one process per rank -> wait -> flush uploads -> publish the model

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
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.failures import ExitCode, Failure
from training_container.checkpoints.fence import read_control
from training_container.checkpoints.generation import mint_generation
from training_container.checkpoints.open import HostShape, OpenedCheckpoint, open_checkpoint
from training_container.checkpoints.spool import Spool
from training_container.checkpoints.stop import StopSignal
from training_container.checkpoints.store import Store
from training_container.checkpoints.uploader import UploaderConfig
from training_container.dry_run import describe
from training_container.failure import StageError, failure_of, write_failure_file
from training_container.inputs import (
    AttemptInputs,
    fetch_code,
    fetch_hub_model,
    load_attempt,
    pinned_steps,
)
from training_container.instance_id import report_host
from training_container.logs import set_up_logging
from training_container.publish import publish_model
from training_container.rank import RankConfig
from training_container.sagemaker_env import SageMakerEnv, read_sagemaker_env
from training_container.supervisor import Child, Supervisor, outcome_of_ranks

__all__ = ["main"]

log = logging.getLogger("grpohub")

LEAVING_SECONDS = 5.0
"""Of the grace after SIGTERM, kept for the failure file and for leaving."""
DRAIN_SECONDS = 3600.0
"""For uploads still under way when training has ended well."""


@dataclass(frozen=True, slots=True)
class Host:
    """What this container has prepared before its processes start."""

    env: SageMakerEnv
    inputs: AttemptInputs
    store: Store
    work: Path
    generation: str
    model: Path
    resume: OpenedCheckpoint | None
    weights: OpenedCheckpoint | None


def main(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    rank_module: str = "training_container.rank",
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
            failure = run_host(prepare(env, inputs, work), environ, rank_module)
    except Exception as error:
        log.exception("the container failed")
        failure = failure_of(error)
    if failure is None:
        return int(ExitCode.OK)
    log.error("%s", failure.text())
    write_failure_file(output, failure)
    return int(failure.code)


def prepare(env: SageMakerEnv, inputs: AttemptInputs, work: Path) -> Host:
    """Everything that must be on the disk before a rank starts.

    Raises:
        StageError: with the documented code of whatever is missing or wrong.
    """
    config, layout = inputs.config, inputs.layout
    store = Store(config.bucket)
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
        model = fetch_hub_model(inputs, work / "model")
    shape = HostShape(env.host_rank, env.num_hosts, env.world_size)
    resume = open_checkpoint(store, layout, work / "resume", shape=shape, floor=config.resume_floor)
    weights = None
    if config.weights_from is not None:
        source = config.weights_from
        weights = open_checkpoint(
            store,
            layout.run.stage(source.stage_index, source.stage),
            work / "weights",
            shape=shape,
            exact=source.checkpoint,
        )
    for opened, what in ((resume, "resuming after"), (weights, "continuing from")):
        if opened is not None:
            log.info("%s %s, %d bytes", what, opened.id, opened.downloaded_bytes)
    generation = mint_generation(
        dt.datetime.now(dt.UTC), after=resume.id.generation if resume else None
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


def run_host(host: Host, environ: Mapping[str, str], rank_module: str) -> Failure | None:
    """Train on this host's ranks; None when the model is published, else what happened."""
    stop = StopSignal()
    stop.install()
    supervisor = Supervisor()
    uploader_file, rank_file = host.work / "uploader.json", host.work / "rank.json"
    uploader_config = _uploader_config(host)
    uploader_config.write(uploader_file)
    _rank_config(host).write(rank_file)
    (host.work / "notes").mkdir()
    uploader = supervisor.start(
        "uploader",
        [sys.executable, "-m", "training_container.checkpoints.uploader", str(uploader_file)],
        environ,
    )
    ranks = [
        supervisor.start(
            f"rank {variables['RANK']}",
            [sys.executable, "-m", rank_module, str(rank_file)],
            {**environ, **variables},
        )
        for variables in rank_variables(host.env, environ)
    ]

    def keep_uploader() -> None:
        if not uploader.running:
            supervisor.restart(uploader)

    try:
        supervisor.watch_ranks(ranks, stop, every_turn=keep_uploader)
    except StageError:
        supervisor.kill([*ranks, uploader])
        raise
    failure = outcome_of_ranks(ranks, host.work / "notes", stopping=stop.requested)
    _drain(supervisor, uploader, stop)
    if failure is None:
        failure = _unfinished_uploads(uploader, uploader_config)
    if failure is None and host.env.is_leader:
        manifest = publish_model(
            host.store, host.inputs.layout, host.work / "export", host.inputs.config.attempt
        )
        log.info("the model is published: %d files, %d bytes", len(manifest.files), manifest.size)
    return failure


def rank_variables(env: SageMakerEnv, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that torchrun would set, for each rank of this host."""
    local = env.ranks_per_host
    # Exactness needs the same number of threads in every incarnation, so it is never left open.
    threads = environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))
    common = {
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    first = env.host_rank * local
    return [{**common, "RANK": str(first + r), "LOCAL_RANK": str(r)} for r in range(local)]


def _drain(supervisor: Supervisor, uploader: Child, stop: StopSignal) -> None:
    """Let the uploader finish: until nothing is left, or until the grace after SIGTERM ends."""
    supervisor.signal([uploader], signal.SIGTERM)
    started = time.monotonic()
    while uploader.running and time.monotonic() - started < DRAIN_SECONDS:
        if stop.requested and stop.grace_left() < LEAVING_SECONDS:
            break
        supervisor.wait(uploader, time.monotonic() + 0.5)
    supervisor.kill([uploader])


def _unfinished_uploads(uploader: Child, config: UploaderConfig) -> Failure | None:
    """A checkpoint that a later stage starts from must be in S3 before this stage counts as
    done.
    """
    status = Spool(Path(config.spool), config.local_ranks).status()
    if status.fenced_by:
        return Failure(ExitCode.FENCED, f"attempt {status.fenced_by} of this stage has taken over")
    lost = sorted(set(status.abandoned) & set(config.pinned_steps))
    if lost or uploader.code != 0:
        return Failure(
            ExitCode.STORAGE,
            f"uploads did not finish (steps {lost}, uploader {uploader.code}): {status.last_error}",
        )
    return None


def _uploader_config(host: Host) -> UploaderConfig:
    config, spec, env = host.inputs.config, host.inputs.spec, host.env
    best = spec.checkpoint.keep_best
    return UploaderConfig(
        bucket=config.bucket,
        run_id=config.run_id,
        stage_index=config.stage_index,
        stage=config.stage,
        attempt=config.attempt,
        generation=host.generation,
        host_rank=env.host_rank,
        num_hosts=env.num_hosts,
        world_size=env.world_size,
        local_ranks=env.ranks_per_host,
        spool=str(host.work / "spool"),
        outputs=str(host.work / "output"),
        keep=spec.checkpoint.keep,
        pinned_steps=tuple(sorted(pinned_steps(host.inputs))),
        best_metric=best.metric if best else None,
        best_mode=best.mode if best else "max",
    )


def _rank_config(host: Host) -> RankConfig:
    config, spec, env, work = host.inputs.config, host.inputs.spec, host.env, host.work
    best = spec.checkpoint.keep_best
    validates = host.inputs.stage.data.validation is not None
    return RankConfig(
        bucket=config.bucket,
        run_id=config.run_id,
        stage_index=config.stage_index,
        stage=config.stage,
        attempt=config.attempt,
        generation=host.generation,
        local_ranks=env.ranks_per_host,
        spec=str(work / "spec.json"),
        model=str(host.model),
        train=str(env.channel("train")),
        validation=str(env.channel("validation")) if validates else None,
        code=str(work / "code"),
        output=str(work / "output"),
        export=str(work / "export"),
        spool=str(work / "spool"),
        notes=str(work / "notes"),
        resume=str(host.resume.folder) if host.resume else None,
        weights=str(host.weights.folder) if host.weights else None,
        interval_seconds=spec.checkpoint.every_minutes * 60,
        pinned_steps=tuple(sorted(pinned_steps(host.inputs))),
        best_metric=best.metric if best else None,
    )


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
