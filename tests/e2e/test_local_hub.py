"""The whole hub in the embedded cloud, driven over HTTP and S3 as users drive it."""

import json

import pytest
from typer.testing import CliRunner

from client.cli import app
from client.hub import ApiError
from contracts.states import RunState
from local_aws.sagemaker.capacity import Interruption, Shortage
from tests.e2e.small_cloud import until
from tests.e2e.toy_hub import (
    SECONDS,
    TYPES,
    at_step,
    finished,
    first_steps,
    hub_of,
    jobs_of,
    point_commands_at,
    put_inputs,
    spec,
    start,
)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The hub, with a model and data where runs may read them."""
    with start(tmp_path_factory.mktemp("hub")) as running:
        put_inputs(running)
        yield running


@pytest.fixture(autouse=True)
def _no_faults(cloud):
    yield
    cloud.bus.faults.drop = cloud.bus.faults.duplicate = False
    cloud.sagemaker.engine.capacity.shortages.clear()


@pytest.mark.long
def test_a_run_survives_both_kinds_of_interruption_and_ends_as_an_endpoint(cloud):
    hub = hub_of(cloud)
    document = spec(cloud, name="whole", steps=60, deploy={"instance_type": "ml.g5.xlarge"})
    run_id = hub.create_run(document).run_id
    at_step(hub, run_id, 3)
    # Capacity returns at once: managed Spot restarts the same job in place.
    cloud.sagemaker.interrupt(run_id, Interruption(with_notice=True, hold_seconds=0.1))
    until(lambda: hub.attempts(run_id)[0].interruptions == 1, SECONDS)
    at_step(hub, run_id, (hub.run(run_id).stages[0].step or 0) + 2)
    # Capacity stays away for longer than the run waits: the hub moves to a new job.
    cloud.sagemaker.interrupt(run_id, Interruption(with_notice=False, hold_seconds=300))
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert jobs_of(cloud, run_id) == ["Stopped/Stopped", "Completed/Completed"]
    first, second = hub.attempts(run_id)
    assert first.interruptions == 2
    assert second.attempt == 2
    steps = first_steps(cloud, run_id)
    assert len(steps) == 3
    assert steps[0] == 1
    assert 3 < steps[1] < steps[2]
    answer = cloud.client("sagemaker-runtime").invoke_endpoint(
        EndpointName=run.endpoint_name, Body=b'{"messages": []}', ContentType="application/json"
    )
    assert "model.safetensors" in answer["Body"].read().decode()


@pytest.mark.long
def test_with_every_event_lost_the_reconciler_finishes_the_run(cloud):
    hub = hub_of(cloud)
    cloud.bus.faults.drop = True
    run_id = hub.create_run(spec(cloud, name="silent")).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert cloud.bus.faults.dropped > 0


@pytest.mark.long
def test_every_event_twice_makes_nothing_happen_twice(cloud):
    hub = hub_of(cloud)
    cloud.bus.faults.duplicate = True
    run_id = hub.create_run(spec(cloud, name="echo")).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert len(jobs_of(cloud, run_id)) == 1
    kinds = [entry.kind for entry in hub.timeline(run_id)]
    assert kinds.count("attempt.ended") == kinds.count("model.published") == 1


@pytest.mark.long
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


@pytest.mark.long
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
    paths = {problem.path for problem in caught.value.problem.problems}
    assert paths == {"stages[0].methd", "compute.ladder"}


def test_a_bad_reward_file_is_refused_at_submit_with_its_line(cloud):
    hub = hub_of(cloud)
    document = spec(cloud, name="bad-reward")
    stage = document["stages"][0]
    stage.update(method="grpo", name="rl")
    stage["rewards"] = [{"name": "r", "file": "r.py", "function": "score", "weight": 1.0}]
    stage["data"].update(problem="problem", answer="answer")
    text = "def score(completions, **columns):\n    return [1.0 for c in completions\n"
    with pytest.raises(ApiError) as caught:
        hub.create_run(document, {"r.py": text})
    [problem] = caught.value.problem.problems
    assert problem.path == "stages[0].rewards[0].file"
    assert "line 2" in problem.reason
    assert not [run for run in hub.runs() if run.run_id.startswith("bad-reward-")]


def test_a_data_file_uploaded_for_a_recipe_starts_it_once(cloud, tmp_path, monkeypatch):
    point_commands_at(cloud, monkeypatch)
    hub = hub_of(cloud)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(json.dumps(spec(cloud, name="recipe", steps=2)))
    data = tmp_path / "new rows.jsonl"
    data.write_text('{"problem": "2+2?", "answer": "4"}\n')
    put = CliRunner().invoke(app, ["recipes", "put", "nightly", str(recipe)])
    assert put.exit_code == 0, put.output
    cloud.bus.faults.duplicate = True
    sent = CliRunner().invoke(app, ["upload", str(data), "--recipe", "nightly", "--wait", "200"])
    assert sent.exit_code == 0, sent.output
    [summary] = [run for run in hub.runs() if run.run_id.startswith("recipe-")]
    assert f"started {summary.run_id}" in sent.stdout
    run = finished(hub, summary.run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    uploaded = f"s3://{cloud.outputs['BucketName']}/uploads/nightly/new rows.jsonl"
    assert run.spec["stages"][0]["data"]["train"] == uploaded


@pytest.mark.long
def test_a_bad_file_in_the_inbox_is_answered_beside_it(cloud):
    s3, bucket = cloud.client("s3"), cloud.outputs["BucketName"]
    body = json.dumps({**spec(cloud), "stages": []}).encode()
    s3.put_object(Bucket=bucket, Key="uploads/bad/run.yaml", Body=body)
    answer = "uploads/bad/run.yaml.error.json"
    until(lambda: s3.list_objects_v2(Bucket=bucket, Prefix=answer).get("Contents"), SECONDS)
    report = json.load(s3.get_object(Bucket=bucket, Key=answer)["Body"])
    assert "stages" in report["problems"][0]["path"]


@pytest.mark.long
def test_an_uploaded_run_file_starts_its_run_with_what_lies_beside_it(cloud, tmp_path, monkeypatch):
    point_commands_at(cloud, monkeypatch)
    hub = hub_of(cloud)
    document = spec(cloud, name="uploaded", steps=2)
    document["stages"][0]["data"]["train"] = "train.jsonl"
    document["stages"][0]["prompt"] = {"template_file": "prompt.jinja"}
    (tmp_path / "train.jsonl").write_text('{"problem": "2+2?", "answer": "4"}\n')
    (tmp_path / "prompt.jinja").write_text("Reckon: {{ content }}")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(document))
    sent = CliRunner().invoke(app, ["upload", str(file), "--wait", "200"])
    assert sent.exit_code == 0, sent.output
    [summary] = [run for run in hub.runs() if run.run_id.startswith("uploaded-")]
    assert f"started {summary.run_id}" in sent.stdout
    run = finished(hub, summary.run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    code = cloud.client("s3").get_object(
        Bucket=cloud.outputs["BucketName"], Key=f"runs/{run.run_id}/code/prompt.jinja"
    )
    assert code["Body"].read() == b"Reckon: {{ content }}"


@pytest.mark.long
def test_an_endpoint_without_instances_keeps_the_model_for_another_type(cloud):
    """aws/deep-learning-containers#6411"""
    hub = hub_of(cloud)
    cloud.sagemaker.engine.capacity.fail("ml.p4d.24xlarge", Shortage.CAPACITY)
    document = spec(cloud, name="undeployed", steps=2, deploy={"instance_type": "ml.p4d.24xlarge"})
    run_id = hub.create_run(document).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.ENDPOINT_FAILED
    assert "InsufficientInstanceCapacity" in run.reason
    assert run.model is not None
    assert "undeployed" not in cloud.sagemaker.endpoints
    hub.deploy(run_id, {"instance_type": "ml.g5.xlarge", "endpoint_name": "second"})
    run = finished(hub, run_id)
    assert (run.state, run.endpoint_name) == (RunState.SUCCEEDED, "second"), run.reason


@pytest.mark.long
def test_a_container_that_does_not_come_up_is_quoted_and_its_endpoint_removed(cloud):
    hub = hub_of(cloud)
    deploy = {"instance_type": "ml.g5.xlarge", "engine": {"reasoning_parser": "qwen3"}}
    run_id = hub.create_run(spec(cloud, name="mute", steps=2, deploy=deploy)).run_id
    run = finished(hub, run_id)
    assert run.state is RunState.ENDPOINT_FAILED
    assert "this toy parses no reasoning" in run.reason
    until(lambda: "mute" not in cloud.sagemaker.endpoints)
    assert run.model is not None
