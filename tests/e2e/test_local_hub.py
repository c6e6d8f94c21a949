"""The whole hub in the embedded cloud: the synthesised stack, its Lambdas and state machine, driven
by the client.

Only the containers are stand-ins (toy_trainer.py, toy_server.py), so that a run takes seconds.
"""

import json
import sys
from pathlib import Path

import boto3
import pytest

from client.hub import ApiError, Hub
from client.settings import Settings
from contracts.states import RunState, is_terminal
from local_aws.sagemaker.capacity import Interruption, Shortage
from local_aws.server import LocalCloud
from local_aws.synth import REPOSITORY, current_assembly
from tests.e2e.small_cloud import until

# Eight real runs with their cold functions: minutes, not seconds.
pytestmark = pytest.mark.long
HERE = Path(__file__).parent
COMMANDS = {
    "training_container": [sys.executable, str(HERE / "toy_trainer.py")],
    "inference_container": [sys.executable, str(HERE / "toy_server.py")],
}
SECONDS = 250  # for one run on a busy machine
TYPES = ("ml.g5.xlarge", "ml.g6.xlarge", "ml.g5.2xlarge")


@pytest.fixture(scope="module")
def assembly():
    """The real stack, synthesised when its sources have changed."""
    return current_assembly(REPOSITORY / "build" / "e2e-cdk")


def start(assembly, state):
    """A cloud in which minutes of AWS are a second; the reconciler comes every five seconds."""
    return LocalCloud(assembly, state, speed=60, commands=COMMANDS)


@pytest.fixture(scope="module")
def cloud(assembly, tmp_path_factory):
    """The hub, with a model and data where runs may read them."""
    with start(assembly, tmp_path_factory.mktemp("hub")) as running:
        put_inputs(running)
        yield running


@pytest.fixture(autouse=True)
def _no_faults(request):
    yield
    if "cloud" in request.fixturenames:
        running = request.getfixturevalue("cloud")
        running.bus.faults.drop = False
        running.sagemaker.engine.capacity.shortages.clear()


def put_inputs(cloud):
    """A base model and a data set under inputs/."""
    row = json.dumps({"problem": "1+1?", "answer": "2"}).encode()
    for key, body in {
        "inputs/model/config.json": b"{}",
        "inputs/train.jsonl": row,
        "inputs/val.jsonl": row,
    }.items():
        cloud.client("s3").put_object(Bucket=cloud.outputs["BucketName"], Key=key, Body=body)


def hub_of(cloud):
    """The client, as a user has it."""
    session = boto3.Session(
        aws_access_key_id="local", aws_secret_access_key="local", region_name="us-east-1"
    )
    return Hub(settings=Settings(cloud.api_url, "us-east-1", session, cloud.url))


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


def test_a_run_survives_both_kinds_of_interruption_and_ends_as_an_endpoint(cloud):
    hub = hub_of(cloud)
    document = spec(cloud, name="whole", steps=30, deploy={"instance_type": "ml.g5.xlarge"})
    run_id = hub.create_run(document).run_id
    at_step(hub, run_id, 3)
    # Capacity returns at once: managed Spot restarts the same job in place.
    cloud.sagemaker.interrupt(run_id, Interruption(with_notice=True, hold_seconds=0.1))
    at_step(hub, run_id, 6)
    # Capacity stays away for longer than the run waits: the hub moves to a new job.
    cloud.sagemaker.interrupt(run_id, Interruption(with_notice=False, hold_seconds=300))
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert jobs_of(cloud, run_id) == ["Stopped/Stopped", "Completed/Completed"]
    first, second = hub.attempts(run_id)
    assert first.interruptions == 2
    assert second.attempt == 2
    group = "/aws/sagemaker/TrainingJobs"
    events = cloud.client("logs").filter_log_events(logGroupName=group)["events"]
    starts = [
        e["message"] for e in events if run_id in e["logStreamName"] and "toy" in e["message"]
    ]
    steps = [int(text.rsplit(" ", 1)[1]) for text in starts]
    assert len(steps) == 3
    assert steps[0] == 1
    assert 3 < steps[1] < steps[2]
    answer = cloud.client("sagemaker-runtime").invoke_endpoint(
        EndpointName=run.endpoint_name, Body=b'{"messages": []}', ContentType="application/json"
    )
    assert "model.safetensors" in answer["Body"].read().decode()


def test_with_every_event_lost_the_reconciler_finishes_the_run(cloud):
    hub = hub_of(cloud)
    cloud.bus.faults.drop = True
    run_id = hub.create_run(spec(cloud, name="silent")).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert cloud.bus.faults.dropped > 0


def test_a_type_without_capacity_sends_the_run_down_the_ladder(cloud):
    """DIAGNijmegen/rse-grand-challenge#2631: CapacityError does not use up the failure budget."""
    cloud.sagemaker.engine.capacity.fail(TYPES[0], Shortage.CAPACITY)
    cloud.sagemaker.engine.capacity.fail(TYPES[1], Shortage.QUOTA)
    hub = hub_of(cloud)
    run_id = hub.create_run(spec(cloud, name="ladder", rungs=3)).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    used = [job.record["ResourceConfig"]["InstanceType"] for job in cloud.sagemaker.jobs_of(run_id)]
    assert used[0] == TYPES[0]
    assert used[-1] == TYPES[2]


def test_cancelling_stops_the_job_and_ends_the_run(cloud):
    hub = hub_of(cloud)
    run_id = hub.create_run(spec(cloud, name="cancelled", steps=500)).run_id
    at_step(hub, run_id, 1)
    hub.cancel(run_id)
    assert finished(hub, run_id).state is RunState.CANCELLED
    assert jobs_of(cloud, run_id) == ["Stopped/Stopped"]


def test_a_failure_of_the_user_ends_the_run_with_the_containers_words(cloud):
    hub = hub_of(cloud)
    run_id = hub.create_run(spec(cloud, name="wrong", stage="doomed")).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.FAILED
    assert "the reward is wrong in line 7" in run.reason
    assert len(jobs_of(cloud, run_id)) == 1


def test_a_bad_run_file_is_refused_with_every_problem(cloud):
    hub = hub_of(cloud)
    document = spec(cloud, name="bad")
    document["stages"][0]["methd"] = document["stages"][0].pop("method")
    document["compute"]["ladder"] = []
    with pytest.raises(ApiError) as caught:
        hub.create_run(document)
    assert caught.value.problem.status in (400, 422)
    assert len(caught.value.problem.problems) >= 2


def test_an_uploaded_run_file_starts_its_run(cloud):
    hub = hub_of(cloud)
    body = json.dumps(spec(cloud, name="uploaded", steps=2)).encode()
    cloud.client("s3").put_object(
        Bucket=cloud.outputs["BucketName"], Key="uploads/team/run.yaml", Body=body
    )
    found = until(lambda: [run for run in hub.runs() if run.run_id.startswith("uploaded-")])
    assert len(found) == 1
    assert finished(hub, found[0].run_id).state is RunState.SUCCEEDED


def test_an_endpoint_without_instances_fails_the_deployment_and_keeps_the_model(cloud):
    hub = hub_of(cloud)
    cloud.sagemaker.engine.capacity.fail("ml.p4d.24xlarge", Shortage.CAPACITY)
    document = spec(cloud, name="undeployed", steps=2, deploy={"instance_type": "ml.p4d.24xlarge"})
    run_id = hub.create_run(document).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.FAILED
    assert run.endpoint_name is None or run.endpoint_name not in cloud.sagemaker.endpoints
    keys = cloud.client("s3").list_objects_v2(
        Bucket=cloud.outputs["BucketName"], Prefix=f"runs/{run_id}/stages/0-sft/model/"
    )
    assert keys["KeyCount"] == 2
