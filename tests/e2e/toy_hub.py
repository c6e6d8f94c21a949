"""The whole hub in the embedded cloud, as tests use it: the synthesised stack with its Lambdas and
state machine, driven by the client.

Only the containers are stand-ins (toy_trainer.py, toy_server.py), so that a run takes seconds.
"""

import json
import sys
from pathlib import Path

import boto3

from client.hub import Hub
from client.settings import Settings
from contracts.states import is_terminal
from local_aws.server import LocalCloud
from local_aws.synth import REPOSITORY, current_assembly
from tests.e2e.small_cloud import until

HERE = Path(__file__).parent
TRAINER = {"training_container": [sys.executable, str(HERE / "toy_trainer.py")]}
SERVER = {"inference_container": [sys.executable, str(HERE / "toy_server.py")]}
SECONDS = 250  # for one run on a busy machine
TYPES = ("ml.g5.xlarge", "ml.g6.xlarge", "ml.g5.2xlarge")


def start(state, commands=None, **settings):
    """A cloud in which minutes of AWS are a second; the reconciler comes every five seconds."""
    assembly = current_assembly(REPOSITORY / "build" / "e2e-cdk")
    commands = {**TRAINER, **SERVER} if commands is None else commands
    return LocalCloud(assembly, state, speed=60, commands=commands, **settings)


def put_inputs(cloud, model=None):
    """A data set and a base model (files of a folder, or hardly anything) under inputs/."""
    row = json.dumps({"problem": "1+1?", "answer": "2"}).encode()
    objects = {"train.jsonl": row, "val.jsonl": row}
    if model is None:
        objects["model/config.json"] = b"{}"
    else:
        files = [file for file in model.rglob("*") if file.is_file()]
        objects |= {f"model/{file.relative_to(model)}": file.read_bytes() for file in files}
    for key, body in objects.items():
        bucket = cloud.outputs["BucketName"]
        cloud.client("s3").put_object(Bucket=bucket, Key=f"inputs/{key}", Body=body)


def hub_of(cloud):
    """The client, as a user has it."""
    session = boto3.Session(
        aws_access_key_id="local", aws_secret_access_key="local", region_name="us-east-1"
    )
    return Hub(settings=Settings(cloud.api_url, "us-east-1", session, cloud.url))


def point_commands_at(cloud, monkeypatch):
    """Let `grpohub …` in this process find the cloud, as the variables of a shell would."""
    for name, value in {"GRPOHUB_API_URL": cloud.api_url, **cloud.environment}.items():
        monkeypatch.setenv(name, value)


def spec(cloud, *, name="toy", stage="sft", steps=6, rungs=1, **more):
    """A run file of one SFT stage on Spot."""
    bucket = cloud.outputs["BucketName"]
    data = {"train": f"s3://{bucket}/inputs/train.jsonl"}
    data["validation"] = f"s3://{bucket}/inputs/val.jsonl"
    return {
        "name": name,
        "model": {"source": f"s3://{bucket}/inputs/model/"},
        "stages": [{"name": stage, "method": "sft", "data": data, "max_steps": steps}],
        "compute": {
            "ladder": [{"instance_type": kind, "spot": True} for kind in TYPES[:rungs]],
            "max_runtime_hours": 10,
        },
        "recovery": {
            "in_place_wait_minutes": 0.02,
            "capacity_backoff_seconds": 1,
            "failure_backoff_seconds": 1,
        },
        **more,
    }


def finished(hub, run_id):
    """The run once it is terminal."""
    return until(lambda: is_terminal((run := hub.run(run_id)).state) and run, SECONDS)


def at_step(hub, run_id, step):
    """Wait until the run shows a step."""
    until(lambda: (hub.run(run_id).stages[0].step or 0) >= step, SECONDS)


def jobs_of(cloud, run_id):
    """Status and secondary status of a run's jobs, in order."""
    records = [job.record for job in cloud.sagemaker.jobs_of(run_id)]
    return [f"{r['TrainingJobStatus']}/{r['SecondaryStatus']}" for r in records]


def first_steps(cloud, run_id):
    """The step that each incarnation of a run's training began with, in order."""
    group = "/aws/sagemaker/TrainingJobs"
    events = cloud.client("logs").filter_log_events(logGroupName=group)["events"]
    lines = [e["message"] for e in events if e["logStreamName"].startswith(run_id)]
    return [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("toy training from")]
