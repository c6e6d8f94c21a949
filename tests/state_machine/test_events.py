"""Lost, repeated, reordered and foreign events; progress, host reports and Spot warnings."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from contracts import events
from contracts.control import Control
from contracts.states import AttemptState, Outcome, RunState
from lambdas.hub import hub
from lambdas.logic.attempts import observe, stop_attempt
from lambdas.logic.records import AttemptRecord, StopReason
from tests.state_machine.cloud import BUCKET, Cloud, stage_layout
from tests.state_machine.holding import held
from tests.state_machine.specs import DEPLOY, run_spec


def test_with_every_event_lost_the_reconciler_finishes_the_run(cloud: Cloud) -> None:
    cloud.drop_events = True
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.complete(name, stage_layout(run_id))
    cloud.reconcile()  # One period for the job,
    cloud.sagemaker.endpoint("demo")
    cloud.sagemaker.until(lambda: cloud.invocations["await_endpoint"] > 0, "the wait")
    cloud.serve("demo")
    cloud.reconcile()  # and one for the endpoint.
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED


def test_every_event_five_times_makes_one_of_everything(cloud: Cloud) -> None:
    cloud.repeat_events = 5
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.checkpoint(stage_layout(run_id), 5, 1)
    cloud.sagemaker.move(name, "InProgress", "Interrupted")
    cloud.sagemaker.move(name, "InProgress", "Training")
    cloud.complete(name, stage_layout(run_id))
    cloud.sagemaker.endpoint("demo")
    cloud.serve("demo")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert len(folder.attempts) == 1
    made = ("CreateTrainingJob", "CreateModel", "CreateEndpointConfig", "CreateEndpoint")
    assert [cloud.sagemaker.calls[operation] for operation in made] == [1, 1, 1, 1]
    assert cloud.sagemaker.calls["UpdateEndpoint"] == 0
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/timeline")
    kinds = [entry["kind"] for entry in document["entries"]]
    for kind in ("attempt.interrupted", "attempt.ended", "run.succeeded", "stage.succeeded"):
        assert kinds.count(kind) == 1, kinds


@pytest.mark.parametrize("seed", range(3))
def test_events_in_any_order_after_the_fact_lead_to_the_same_end(cloud: Cloud, seed: int) -> None:
    """Completed before InProgress, Stopping after Stopped: the event is a hint, not the truth."""
    cloud.drop_events = True
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.sagemaker.job(name)
    shown = [
        cloud.sagemaker.move(name, "InProgress", "Starting"),
        cloud.sagemaker.move(name, "InProgress", "Training"),
        cloud.sagemaker.move(name, "InProgress", "Interrupted"),
        cloud.sagemaker.move(name, "InProgress", "Training"),
        cloud.sagemaker.move(name, "Stopping", "Stopping"),
    ]
    cloud.export(stage_layout(run_id))
    shown.append(cloud.sagemaker.move(name, "Completed", "Completed"))
    random.Random(seed).shuffle(shown)
    for job in shown:
        cloud.invoke("on_training_event", _event(job))
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert folder.attempts[0].state is AttemptState.ENDED
    assert folder.attempts[0].interruptions == 1


def test_a_late_event_never_rewinds_a_state(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    training = cloud.train(name)
    cloud.complete(name, stage_layout(run_id))
    cloud.wait(run_id)
    table, attempt = hub().table, cloud.folder(run_id).attempts[0]
    assert not table.update_attempt(attempt, AttemptState.RUNNING)
    assert not table.update_attempt(attempt, AttemptState.ENDED), "an end is written once"
    assert not table.update_run(cloud.folder(run_id).run, RunState.TRAINING)
    cloud.invoke("on_training_event", _event(training))
    assert cloud.folder(run_id).attempts[0].outcome is Outcome.COMPLETED
    assert cloud.folder(run_id).run.state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "change",
    [
        {"Tags": None, "HyperParameters": None},
        {"CreationTime": "1696427182554", "TrainingEndTime": None, "FailureReason": None},
        {"CreationTime": 1696427182554, "NewField": {"deep": [1]}},
        {"SecondaryStatusTransitions": None},
    ],
)
def test_events_are_read_in_every_form_they_come_in(cloud: Cloud, change: dict[str, Any]) -> None:
    run_id = cloud.submit(run_spec())
    job = cloud.train(f"{run_id}-0-a001")
    event = _event(job)
    event["detail"] |= change
    cloud.invoke("on_training_event", event)
    assert cloud.folder(run_id).attempts[0].state is AttemptState.RUNNING


@pytest.mark.parametrize("name", ["somebody-elses-job", "other-20260101-abcdef01-0-a001"])
def test_events_of_other_jobs_and_endpoints_are_ignored(cloud: Cloud, name: str) -> None:
    job = {"TrainingJobName": name, "TrainingJobStatus": "Failed", "SecondaryStatus": "Failed"}
    cloud.invoke("on_training_event", events.training_job_event(job))
    endpoint = {"EndpointName": name, "EndpointStatus": "Failed"}
    cloud.invoke("on_endpoint_event", events.endpoint_event(endpoint))
    assert cloud.sagemaker.calls["DescribeTrainingJob"] == 0


def test_a_flag_shows_progress_only_when_the_checkpoint_is_complete(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.drop_events = True
    generation = cloud.checkpoint(layout, 5, 1, hosts=2)
    first = layout.flag(5, generation, 0)
    body = cloud.s3.get_object(Bucket=BUCKET, Key=first)["Body"].read()
    cloud.s3.delete_object(Bucket=BUCKET, Key=first)
    _created(cloud, layout.flag(5, generation, 1))
    assert cloud.folder(run_id).stages[0].newest_step is None
    cloud.s3.put_object(Bucket=BUCKET, Key=first, Body=body)
    for _ in range(2):
        _created(cloud, first)
    folder = cloud.folder(run_id)
    assert (folder.stages[0].newest_step, folder.attempts[0].newest_step) == (5, 5)
    cloud.checkpoint(layout, 3, 1)
    _created(cloud, layout.flag(3, generation, 0))
    assert cloud.folder(run_id).stages[0].newest_step == 5
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/timeline")
    steps = [e["step"] for e in document["entries"] if e["kind"] == "checkpoint.complete"]
    assert set(steps) == {3, 5}


def test_a_spot_warning_asks_for_a_checkpoint_once_and_moves_nothing(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    key = layout.host(1, 0)
    body = {"instance_id": "i-0123456789abcdef0", "host": "algo-1", "generation": "g"}
    cloud.s3.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(body).encode())
    _created(cloud, key)
    warning = events.spot_interruption_event("i-0123456789abcdef0")
    for _ in range(2):
        cloud.invoke("on_spot_warning", warning)
    control = _control(cloud, run_id)
    assert control.checkpoint_request is not None
    etag = cloud.s3.head_object(Bucket=BUCKET, Key=layout.control)["ETag"]
    cloud.invoke("on_spot_warning", warning)
    assert cloud.s3.head_object(Bucket=BUCKET, Key=layout.control)["ETag"] == etag
    assert len(cloud.folder(run_id).attempts) == 1
    assert cloud.sagemaker.calls["StopTrainingJob"] == 0


def test_warnings_for_unknown_instances_and_past_attempts_are_ignored(cloud: Cloud) -> None:
    cloud.invoke("on_spot_warning", events.rebalance_event("i-00000000000000000"))
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    key = layout.host(1, 0)
    cloud.s3.put_object(Bucket=BUCKET, Key=key, Body=b'{"instance_id": "i-1"}')
    _created(cloud, key)
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "InternalServerError")
    cloud.sagemaker.job(f"{run_id}-0-a002")
    cloud.invoke("on_spot_warning", events.rebalance_event("i-1"))
    assert _control(cloud, run_id) == Control(attempt=2)


@pytest.mark.parametrize("many", [8, pytest.param(50, marks=pytest.mark.long)])
def test_many_submissions_at_once_all_start(cloud: Cloud, many: int) -> None:
    """syne-tune/syne-tune#339 (16 at once throttled), apache/airflow#16299 (throttled by List)."""
    cloud.sagemaker.refuse("CreateTrainingJob", "ThrottlingException", "Rate exceeded", times=5)
    futures = [cloud.pool.submit(cloud.submit, run_spec()) for _ in range(many)]
    ids = [future.result() for future in futures]
    assert len(set(ids)) == many
    for run_id in ids:
        cloud.sagemaker.job(f"{run_id}-0-a001", timeout=120)
    assert not [name for name in cloud.sagemaker.calls if name.startswith("ListTrainingJobs")]


def test_a_queue_of_commands_to_an_attempt_whose_job_was_deleted_does_not_hang(
    cloud: Cloud,
) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.sagemaker.move(name, "Deleting", "Stopped")
    assert cloud.wait(run_id).run.state is RunState.CANCELLED


def _event(job: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in job.items() if not k.endswith("Time")}
    return events.training_job_event(plain, tags={"grpohub:stack": "GrpoHub"})


def test_a_row_that_was_read_before_the_stop_does_not_make_it_a_users(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two handlers look at once: the slower has read the row before the other stopped the job, and
    sees it Stopped. Taken for a stop in the console it would cancel the run."""
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.drop_events = True
    table = hub().table
    early = cloud.folder(run_id)
    stop_attempt(hub(), early.attempts[0], StopReason.MOVED, "not restarted in time")
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    reads = iter([early])
    load = table.load
    monkeypatch.setattr(table, "load", lambda run_id: next(reads, None) or load(run_id))
    seen = observe(hub(), run_id, 0, 1)
    assert seen is not None
    assert (seen.outcome, seen.reason) == (Outcome.INTERRUPTED, "not restarted in time")


def test_a_row_that_was_read_before_its_token_still_tells_the_execution(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.drop_events = True
    with held("submit_attempt") as (inside, _):
        run_id = cloud.submit(run_spec())
        assert inside.wait(60)
        early = cloud.folder(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.sagemaker.until(
        lambda: cloud.folder(run_id).attempts[0].token is not None, "the task's token"
    )
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    table = hub().table
    reads = iter([early])
    load = table.load
    monkeypatch.setattr(table, "load", lambda run_id: next(reads, None) or load(run_id))
    observe(hub(), run_id, 0, 1)
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED


def test_an_end_whose_write_got_no_answer_is_told_all_the_same(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK tries again, and finds its own write there."""
    table = hub().table
    write = table.update_attempt

    def answer_lost(attempt: AttemptRecord, state: AttemptState | None = None, **more: Any) -> bool:
        if state is AttemptState.ENDED:
            write(attempt, state, **more)
        return write(attempt, state, **more)

    monkeypatch.setattr(table, "update_attempt", answer_lost)
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED


def _created(cloud: Cloud, key: str) -> None:
    event = events.object_created_event(BUCKET, key, size=1, etag="e")
    cloud.invoke("on_object_created", event)


def _control(cloud: Cloud, run_id: str) -> Control:
    body = cloud.s3.get_object(Bucket=BUCKET, Key=stage_layout(run_id).control)["Body"].read()
    return Control.model_validate_json(body)
