"""Real GRPO on two hosts in the embedded mode: reclaimed whole, one host lost, shrunk to one."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load

from contracts.attempt import AttemptConfig, CheckpointRef, WeightsFrom
from contracts.checkpoints import complete_checkpoints
from contracts.control import Control
from contracts.layout import RunLayout, StageLayout, job_name
from contracts.run_spec import canonical_json, parse_run_spec
from local_aws.sagemaker.capacity import Interruption
from local_aws.server import LocalCloud
from tests.e2e.small_cloud import image, until, write_assembly
from tests.training import tiny
from training_container.checkpoints.store import Store

pytestmark = pytest.mark.long
STEPS = 16
NAMED = 8
STAGES = ("strict", "again")
REWARDS = [
    {
        "name": "short",
        "function": "length",
        "weight": 1.0,
        "parameters": {"maximum": 20, "slack": 20},
    },
    {"name": "format", "function": "think_answer_format", "weight": 0.5},
]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    folder = tmp_path_factory.mktemp("cloud")
    commands = {"trainer": (sys.executable, "-m", "training_container")}
    assembly = write_assembly(folder / "cdk.out")
    with LocalCloud(assembly, folder / "state", speed=20, commands=commands) as running:
        base = tiny.warm_model(tmp_path_factory.mktemp("warm"))
        rows = tiny.write_jsonl(folder / "train.jsonl", tiny.grpo_rows(tiny.split_pairs()[0][:12]))
        s3, bucket = running.client("s3"), running.outputs["BucketName"]
        s3.upload_file(str(rows), bucket, "inputs/train/train.jsonl")
        for path in base.iterdir():
            s3.upload_file(str(path), bucket, f"inputs/model/{path.name}")
        yield running


class Run:
    """A GRPO stage, and one that starts from a named step of it; `submit` is what the control plane
    does for an attempt."""

    def __init__(self, cloud: LocalCloud, name: str) -> None:
        self.cloud, self.s3 = cloud, cloud.client("s3")
        self.bucket = cloud.outputs["BucketName"]
        self.run_id, self.attempt, self.stage_index = f"{name}-20260101-abc", 0, 0
        stage = tiny.grpo_stage(
            grpo={"group_size": 4, "prompts_per_step": 4, "kl": None},
            rollout={"max_response_length": 32, "log_samples": 0},
            rewards=REWARDS,
            max_steps=STEPS,
        )
        start = {"stage": "strict", "step": NAMED}
        again = {**stage, "name": "again", "start_from": start, "max_steps": 2}
        document = tiny.run_document(stage, again, checkpoint={"every_minutes": 0.001})
        self.spec = canonical_json(parse_run_spec(document)).encode()
        self.weights_from: WeightsFrom | None = None
        self.put(self.layout.run.spec, self.spec)

    @property
    def layout(self) -> StageLayout:
        return RunLayout(self.run_id).stage(self.stage_index, STAGES[self.stage_index])

    def put(self, key: str, body: bytes) -> None:
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=body)

    def second_stage(self) -> Run:
        named = next(c for c in self.complete() if c.step == NAMED)
        ref = CheckpointRef(step=named.step, generation=named.generation)
        later = copy.copy(self)
        later.weights_from = WeightsFrom(stage_index=0, stage="strict", checkpoint=ref)
        later.stage_index, later.attempt = 1, 0
        return later

    def submit(self, *, hosts: int, ranks: int = 1, spot: bool = False) -> str:
        self.attempt += 1
        self.put(self.layout.control, Control(attempt=self.attempt).model_dump_json().encode())
        config = AttemptConfig(
            run_id=self.run_id,
            stage_index=self.stage_index,
            stage=STAGES[self.stage_index],
            attempt=self.attempt,
            weights_from=self.weights_from,
            bucket=self.bucket,
            spec_sha256=hashlib.sha256(self.spec).hexdigest(),
        )
        name = job_name(self.run_id, self.stage_index, self.attempt)
        limits = {"MaxRuntimeInSeconds": 3600, **({"MaxWaitTimeInSeconds": 3600} if spot else {})}
        self.cloud.client("sagemaker").create_training_job(
            TrainingJobName=name,
            RoleArn="arn:aws:iam::123456789012:role/training",
            AlgorithmSpecification={"TrainingImage": image("trainer"), "TrainingInputMode": "File"},
            HyperParameters=config.to_hyperparameters(),
            InputDataConfig=[self.channel("train"), self.channel("model")],
            OutputDataConfig={"S3OutputPath": f"s3://{self.bucket}/{self.layout.prefix}out/"},
            ResourceConfig={
                "InstanceType": "ml.m5.xlarge", "InstanceCount": hosts, "VolumeSizeInGB": 10,
            },
            StoppingCondition=limits,
            EnableManagedSpotTraining=spot,
            Environment={"GRPOHUB_RANKS_PER_HOST": str(ranks), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return name

    def channel(self, name: str) -> dict[str, Any]:
        uri = f"s3://{self.bucket}/inputs/{name}/"
        return {
            "ChannelName": name,
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
        }

    def ended(self, name: str) -> dict[str, Any]:
        client = self.cloud.client("sagemaker")

        def terminal() -> dict[str, Any] | None:
            found = client.describe_training_job(TrainingJobName=name)
            return found if found["TrainingJobStatus"] in ("Completed", "Failed") else None

        return until(terminal, 900)

    def complete(self) -> list[Any]:
        """Coordinates of complete checkpoints, newest first."""
        store = Store(self.bucket, self.s3)
        listing = store.listing(self.layout.checkpoints_prefix)
        reports = complete_checkpoints(self.layout, listing, store.read)
        return [report.id for report in reports if report.complete]

    def generations(self) -> set[str]:
        return {checkpoint.generation for checkpoint in self.complete()}

    def rows(self) -> dict[int, Mapping[str, Any]]:
        """Metrics by step, of the newest generation that has the step."""
        listing = Store(self.bucket, self.s3).listing(self.layout.metrics_prefix)
        found = {}
        for key in sorted(listing):
            body = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            for line in io.BytesIO(body):
                row = json.loads(line)
                found[row["step"]] = {
                    name: value
                    for name, value in row["metrics"].items()
                    if not name.startswith("checkpoint/")
                }
        return tiny.comparable(found)

    def weights(self) -> dict[str, torch.Tensor]:
        key = f"{self.layout.model_prefix}model.safetensors"
        return load(self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read())


@pytest.fixture(scope="module")
def undisturbed(cloud: LocalCloud) -> Run:
    """The same two ranks on one host, uninterrupted."""
    run = Run(cloud, "undisturbed")
    assert run.ended(run.submit(hosts=1, ranks=2))["TrainingJobStatus"] == "Completed"
    return run


@pytest.mark.timeout(1800)
def test_grpo_on_two_hosts_survives_reclaim_and_a_lost_host_to_the_last_bit(
    cloud: LocalCloud, undisturbed: Run
) -> None:
    run = Run(cloud, "hosts")
    name = run.submit(hosts=2, spot=True)
    until(run.complete, 600)
    cloud.sagemaker.interrupt(run.run_id, Interruption(with_notice=False, hold_seconds=0.5))
    until(lambda: len(run.generations()) > 1, 600)
    assert cloud.sagemaker.jobs[name].crash_host(1)
    assert run.ended(name)["TrainingJobStatus"] == "Failed"

    done = run.ended(run.submit(hosts=2, spot=True))
    assert done["TrainingJobStatus"] == "Completed", done.get("FailureReason")
    assert run.rows() == undisturbed.rows()
    expected = undisturbed.weights()
    assert all(torch.equal(weight, expected[n]) for n, weight in run.weights().items())

    later, expected_later = run.second_stage(), undisturbed.second_stage()
    done = later.ended(later.submit(hosts=2))
    assert done["TrainingJobStatus"] == "Completed", done.get("FailureReason")
    expected_later.ended(expected_later.submit(hosts=1, ranks=2))
    assert sorted(later.rows()) == [1, 2]
    assert later.rows() == expected_later.rows()


@pytest.mark.timeout(1800)
def test_the_next_rung_with_one_host_carries_on_within_rounding(
    cloud: LocalCloud, undisturbed: Run
) -> None:
    """`volcengine/verl#2265`: other shapes reshard."""
    run = Run(cloud, "shrunk")
    name = run.submit(hosts=2)
    until(run.complete, 600)
    cloud.sagemaker.jobs[name].crash_host(0)
    assert run.ended(name)["TrainingJobStatus"] == "Failed"
    assert max(run.complete()).step < STEPS
    assert run.ended(run.submit(hosts=1))["TrainingJobStatus"] == "Completed"
    expected = undisturbed.weights()
    for n, weight in run.weights().items():
        torch.testing.assert_close(weight, expected[n], rtol=0, atol=1e-5)
