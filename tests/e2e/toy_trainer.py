"""A training container that keeps the contracts and trains nothing: a step is a short sleep and one
small file.

Run by the embedded cloud in place of the real one, so that a test of the control plane takes
seconds. It speaks to S3 exactly as the trainer does: checkpoints with flags, the newest complete
one resumed, a model with its manifest.
"""

import datetime
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import boto3

from contracts.attempt import AttemptConfig
from contracts.checkpoints import Flag, FlagFile, newest_complete, write_flag
from contracts.failures import ExitCode, Failure
from contracts.model_manifest import ManifestFile, ModelManifest

STEP_SECONDS = 0.25
BASE = Path(os.environ["SAGEMAKER_BASE_DIR"])


def read(name: str) -> dict:
    """A file of /opt/ml/input/config."""
    return json.loads((BASE / "input" / "config" / f"{name}.json").read_text())


def fail(code: ExitCode, cause: str) -> None:
    """Write the failure file and exit with the documented code."""
    (BASE / "output" / "failure").write_text(Failure(code, cause).text())
    sys.exit(int(code))


class Trainer:
    """One incarnation."""

    def __init__(self) -> None:
        self.config = AttemptConfig.from_hyperparameters(read("hyperparameters"))
        self.layout, self.bucket = self.config.layout, self.config.bucket
        self.s3 = boto3.client("s3")
        spec = json.loads(self.get(self.layout.run.spec))
        self.steps = spec["stages"][self.config.stage_index]["max_steps"]
        now = datetime.datetime.now(datetime.UTC)
        self.generation = f"{now:%Y%m%dT%H%M%S.%f}Z-toy"

    def get(self, key: str) -> bytes:
        """An object's content."""
        return self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, body: bytes) -> FlagFile:
        """Write an object."""
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=body)
        return FlagFile(key=key, size=len(body), sha256=hashlib.sha256(body).hexdigest())

    def run(self) -> None:
        """Resume, train, export."""
        first = self.resume() + 1
        print(f"toy training from step {first}", flush=True)
        if self.config.stage == "doomed":
            fail(ExitCode.REWARD, "the reward is wrong in line 7")
        for step in range(first, self.steps + 1):
            time.sleep(STEP_SECONDS)
            self.save(step)
            print(f"grpohub-step step={step} loss=0.5", flush=True)
        self.export()

    def resume(self) -> int:
        """The newest complete checkpoint's step; the floor must be met."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.layout.checkpoints_prefix
        )
        listing = {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", ())}
        found = newest_complete(self.layout, listing, self.get)
        step = found.id.step if found else 0
        floor = self.config.resume_floor
        if floor is not None and step < floor.step:
            fail(ExitCode.CHECKPOINT, f"step {floor.step} should be there")
        return step

    def save(self, step: int) -> None:
        """A checkpoint of one host: its file, then its flag."""
        key = f"{self.layout.host_prefix(step, self.generation, 0)}shard"
        flag = Flag(
            run_id=self.config.run_id,
            stage=self.config.stage,
            step=step,
            attempt=self.config.attempt,
            generation=self.generation,
            host_rank=0,
            num_hosts=1,
            world_size=1,
            files=(self.put(key, b"state"),),
        )
        self.put(self.layout.flag(step, self.generation, 0), write_flag(flag))

    def export(self) -> None:
        """The base model as it came (with weights of its own, if it has none) and its manifest."""
        source = BASE / "input" / "data" / "model"
        files = {p.relative_to(source).as_posix(): p for p in source.rglob("*") if p.is_file()}
        bodies = {"model.safetensors": b"weights"}
        bodies |= {name: path.read_bytes() for name, path in files.items()}
        put = {n: self.put(f"{self.layout.model_prefix}{n}", b) for n, b in bodies.items()}
        manifest = ModelManifest(
            run_id=self.config.run_id,
            stage=self.config.stage,
            step=self.steps,
            architecture="Toy",
            parameters=7,
            dtype="float32",
            base_model="toy",
            files=tuple(
                ManifestFile(path=name, size=file.size, sha256=file.sha256)
                for name, file in sorted(put.items())
            ),
        )
        self.put(self.layout.model_manifest, manifest.model_dump_json().encode())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: fail(ExitCode.STOPPED, "stopped on request"))
    Trainer().run()
