"""A training job as SageMaker would start it: the /opt/ml tree, S3 objects, containers as
processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.attempt import AttemptConfig, CheckpointRef, WeightsFrom
from contracts.checkpoints import CheckpointReport, complete_checkpoints
from contracts.control import Control
from contracts.layout import RunLayout, StageLayout
from contracts.run_spec import canonical_json, parse_run_spec
from tests.training.s3 import BUCKET, S3Server
from tests.training.tiny import run_document, sft_stage
from training_container.checkpoints.store import Store

ROOT = Path(__file__).resolve().parents[2]
TOY = "tests.reliability.toy_container"
REAL = "training_container"


@dataclass
class Job:
    """One stage of one run in ``folder`` and S3; `start` runs one incarnation of its container."""

    server: S3Server
    folder: Path
    document: dict[str, Any]
    run_id: str = "tiny-20260101-abc"
    stage_index: int = 0
    ranks: int = 1
    module: str = TOY
    attempt: int = 1
    floor: CheckpointRef | None = None
    weights_from: WeightsFrom | None = None
    environ: dict[str, str] = field(default_factory=dict)
    channels: dict[str, Path] = field(default_factory=dict)

    @property
    def layout(self) -> StageLayout:
        name = self.document["stages"][self.stage_index]["name"]
        return RunLayout(self.run_id).stage(self.stage_index, name)

    @property
    def base(self) -> Path:
        return self.folder / "opt-ml"

    def prepare(self) -> None:
        """What the control plane and the platform do before the container starts."""
        spec = canonical_json(parse_run_spec(self.document)).encode()
        client = self.server.client()
        client.put_object(Bucket=BUCKET, Key=self.layout.run.spec, Body=spec)
        self.put_control()
        config = AttemptConfig(
            run_id=self.run_id, stage_index=self.stage_index, stage=self.layout.name,
            attempt=self.attempt, bucket=BUCKET, spec_sha256=hashlib.sha256(spec).hexdigest(),
            resume_floor=self.floor, weights_from=self.weights_from,
        )  # fmt: skip
        self.write_config("hyperparameters", config.to_hyperparameters())
        self.write_config("resourceconfig", {
            "current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"
        })  # fmt: skip
        for name in ("train", "model"):
            source = self.channels.get(name)
            target = self.base / "input/data" / name
            target.mkdir(parents=True, exist_ok=True)
            if source is None:
                (target / "rows.jsonl").write_text('{"problem": "p", "answer": "a"}\n')
            else:
                shutil.copytree(source, target, dirs_exist_ok=True)
        channels = {name: {"TrainingInputMode": "File"} for name in ("train", "model")}
        self.write_config("inputdataconfig", channels)

    def write_config(self, name: str, value: Any) -> None:
        folder = self.base / "input/config"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(value))

    def put_control(self, **fields: Any) -> None:
        body = Control(**{"attempt": self.attempt, **fields}).model_dump_json().encode()
        self.server.client().put_object(Bucket=BUCKET, Key=self.layout.control, Body=body)

    def start(self, *arguments: str) -> Container:
        """Start the container; a former incarnation's processes must be gone."""
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
            **self.server.environ(),
            "SAGEMAKER_BASE_DIR": str(self.base),
            "GRPOHUB_RANKS_PER_HOST": str(self.ranks),
            "AWS_EC2_METADATA_DISABLED": "true",
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            **self.environ,
        }
        log = (self.folder / "container.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", self.module, *arguments],
            cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        log.close()
        return Container(self, process)

    def run(self) -> int:
        """One incarnation to its end; the exit code."""
        return self.start().wait()

    @property
    def log(self) -> str:
        return (self.folder / "container.log").read_text(errors="replace")

    @property
    def failure(self) -> str:
        return (self.base / "output/failure").read_text()

    def complete(self) -> list[CheckpointReport]:
        """Complete checkpoints, newest first."""
        store = Store(BUCKET, self.server.client())
        listing = store.listing(self.layout.checkpoints_prefix)
        reports = complete_checkpoints(self.layout, listing, store.read)
        return [report for report in reports if report.complete]

    def rows(self) -> dict[int, Mapping[str, Any]]:
        """Metrics rows by step; a later generation supersedes an earlier one."""
        client, found = self.server.client(), {}
        for key in sorted(self.server.keys(self.layout.metrics_prefix)):
            body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for line in body.splitlines():
                row = json.loads(line)
                found[row["step"]] = row
        return found

    def model(self) -> bytes:
        """The published weights."""
        key = f"{self.layout.model_prefix}model.safetensors"
        assert self.layout.model_manifest in self.server.keys(self.layout.model_prefix)
        return self.server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()


@dataclass
class Container:
    """One running incarnation."""

    job: Job
    process: subprocess.Popen[bytes]

    def wait(self, seconds: float = 800) -> int:
        return self.process.wait(seconds)

    def sigterm(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def sigkill(self) -> None:
        """As a host that vanishes: children die with PID 1."""
        self.process.kill()
        self.process.wait()

    def wait_for(self, condition: Any, seconds: float = 800) -> None:
        """Wait until ``condition()`` holds; fails when the container ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"container ended early:\n{self.job.log[-3000:]}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.job.log[-3000:]}"
            time.sleep(0.05)


def toy_job(
    server: S3Server, folder: Path, *, steps: int = 20, tags: dict[str, str] | None = None,
    every_minutes: float = 0.001, **options: Any,
) -> Job:  # fmt: skip
    """A prepared job of `toy_rank`."""
    document = run_document(
        sft_stage(max_steps=steps),
        checkpoint={"every_minutes": every_minutes},
        tags=tags or {},
    )
    job = Job(server, folder, document, **options)
    job.prepare()
    return job
