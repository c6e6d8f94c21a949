"""Cancel, abort, redrive, resume and timeouts: whatever ends a run leaves nothing running."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.states import Outcome, RunState, StageState
from lambdas.hub import hub
from tests.state_machine.cloud import Cloud, stage_layout
from tests.state_machine.holding import held
from tests.state_machine.specs import DEPLOY, run_spec


def _cancel(cloud: Cloud, run_id: str) -> str:
    status, document = cloud.api("POST", f"/v1/runs/{run_id}/cancel")
    assert status == 200, document
    state: str = document["state"]
    return state


@pytest.mark.parametrize("where", ["prepare_run", "plan_attempt", "submit_attempt"])
def test_cancel_while_a_task_is_at_work(cloud: Cloud, where: str) -> None:
    with held(where) as (inside, _):
        run_id = cloud.submit(run_spec())
        assert inside.wait(60)
        _cancel(cloud, run_id)
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.CANCELLED
    assert not folder.live_attempts
    assert not _living_jobs(cloud)
    assert cloud.wait_execution(run_id) == "ABORTED"


def test_cancel_while_training_stops_the_job_first(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    assert _cancel(cloud, run_id) == "CANCELLING"
    assert cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping"
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.CANCELLED
    assert folder.attempts[0].outcome is Outcome.CANCELLED
    assert folder.stages[0].state is StageState.CANCELLED
    assert cloud.wait_execution(run_id) == "ABORTED"
    assert len(cloud.sagemaker.jobs) == 1


def test_cancel_during_a_pause_does_not_wait_for_its_end(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(recovery={"capacity_backoff_seconds": 36000}))
    cloud.sagemaker.refuse("CreateTrainingJob", "CapacityError", "CapacityError: none")
    cloud.sagemaker.until(lambda: "BackOff" in cloud.history(run_id), "the pause")
    _cancel(cloud, run_id)
    assert cloud.wait(run_id).run.state is RunState.CANCELLED  # in a second; the pause is ten hours
    assert cloud.wait_execution(run_id) == "ABORTED"
    assert cloud.reconcile()["attempts"] == 0


def test_cancel_between_an_interruption_and_its_resubmission_wins(cloud: Cloud) -> None:
    """A user's cancel beats a resubmission, whichever comes first."""
    run_id = cloud.submit(run_spec(recovery={"in_place_wait_minutes": 0.0001}))
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.sagemaker.move(name, "InProgress", "Interrupted", at=1.0)
    assert cloud.folder(run_id).attempts[0].stop_reason == "moved"
    _cancel(cloud, run_id)
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.CANCELLED
    assert len(cloud.sagemaker.jobs) == 1


def test_cancel_while_the_endpoint_is_being_made_deletes_it_when_that_is_possible(
    cloud: Cloud,
) -> None:
    run_id = _to_endpoint(cloud)
    _cancel(cloud, run_id)
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.CANCELLED
    assert "demo" in cloud.sagemaker.endpoints  # SageMaker deletes none that is being created.
    cloud.serve("demo")
    cloud.reconcile()
    cloud.reconcile()
    assert not cloud.sagemaker.endpoints
    assert not cloud.sagemaker.configs
    assert not cloud.sagemaker.models


def test_cancelling_twice_or_after_the_end_is_harmless(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    _cancel(cloud, run_id)
    _cancel(cloud, run_id)
    cloud.sagemaker.move(f"{run_id}-0-a001", "Stopped", "Stopped")
    cloud.wait(run_id)
    assert _cancel(cloud, run_id) == "CANCELLED"


def test_a_finished_run_cannot_be_cancelled(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    cloud.wait(run_id)
    status, document = cloud.api("POST", f"/v1/runs/{run_id}/cancel")
    assert (status, document["type"]) == (409, "urn:grpohub:problem:conflict")


@pytest.mark.parametrize("heard", [True, False])
def test_an_execution_aborted_in_the_console_stops_its_job(cloud: Cloud, heard: bool) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.drop_events = not heard
    arn = cloud.folder(run_id).run.execution_arn
    cloud.states.stop_execution(executionArn=arn, error="Me", cause="by hand")
    assert cloud.wait_execution(run_id) == "ABORTED"
    if not heard:
        cloud.reconcile()
    cloud.sagemaker.until(
        lambda: cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping", "the stop"
    )
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    if not heard:
        cloud.reconcile()
    assert cloud.wait(run_id).run.state is RunState.CANCELLED


def test_a_job_stopped_in_sagemaker_cancels_the_run_and_publishes_nothing(cloud: Cloud) -> None:
    """apache/airflow#42423: Stopped counted as success."""
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    cloud.export(stage_layout(run_id))
    cloud.train(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Stopping", "Stopping")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Stopped", "Stopped")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.CANCELLED
    assert len(cloud.sagemaker.jobs) == 1
    assert cloud.wait_execution(run_id) == "FAILED"
    assert folder.run.published is None
    assert not cloud.sagemaker.endpoints


def test_cancelling_a_job_that_has_just_stopped_by_itself_does_not_hang(cloud: Cloud) -> None:
    """awslabs/benchmark-ai#928: StopTrainingJob of a stopped job is a ValidationException."""
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.drop_events = True
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    _cancel(cloud, run_id)
    cloud.reconcile()
    assert cloud.wait(run_id).run.state is RunState.CANCELLED
    hub().jobs.stop(name)
    assert cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopped"


def test_a_late_event_of_an_earlier_execution_does_not_end_a_resumed_run(cloud: Cloud) -> None:
    """aws-solutions-library-samples/accelerated-intelligent-document-processing-on-aws#989."""
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "ClientError: no")
    cloud.wait(run_id)
    first = cloud.folder(run_id).run.execution_arn
    assert cloud.wait_execution(run_id) == "FAILED"
    status, document = cloud.api("POST", f"/v1/runs/{run_id}/resume")
    assert (status, document["state"]) == (200, "TRAINING")
    cloud.train(f"{run_id}-0-a002")
    event = {
        "version": "0", "detail-type": "Step Functions Execution Status Change",
        "source": "aws.states",
        "detail": {"executionArn": first, "stateMachineArn": cloud.machine_arn, "name": run_id,
                   "status": "FAILED"},
    }  # fmt: skip
    cloud.invoke("on_execution_status", event)
    assert cloud.folder(run_id).run.state is RunState.TRAINING
    cloud.complete(f"{run_id}-0-a002", stage_layout(run_id))
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert (folder.run.execution_arn or "").endswith(f":{run_id}-r1")


def test_redrive_goes_on_where_the_run_stopped_with_fresh_budgets(cloud: Cloud) -> None:
    """A redrive runs the failed task again, which is ConcludeFailure with a RedriveCount of 1."""
    run_id = cloud.submit(run_spec(recovery={"max_failures": 0}))
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.checkpoint(layout, 6, 1)
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "InternalServerError")
    folder = cloud.wait(run_id)
    assert folder.run.error == "FailureBudgetSpent"
    assert cloud.wait_execution(run_id) == "FAILED"
    execution = {"Id": folder.run.execution_arn, "RedriveCount": 0}
    with pytest.raises(Exception, match="FailureBudgetSpent"):
        cloud.invoke("conclude_failure", {"run_id": run_id, "execution": execution})
    execution["RedriveCount"] = 1
    answer = cloud.invoke("conclude_failure", {"run_id": run_id, "execution": execution})
    assert answer == {"next": "train"}
    plan = cloud.invoke("plan_attempt", {"run_id": run_id})
    assert (plan["next"], plan["attempt"]) == ("submit", 2)
    attempt = cloud.folder(run_id).attempts[1]
    assert attempt.resume_floor is not None
    assert attempt.resume_floor.step == 6
    # The same task run again is not another redrive.
    before = cloud.folder(run_id)
    assert cloud.invoke("conclude_failure", {"run_id": run_id, "execution": execution}) == answer
    assert cloud.folder(run_id) == before


def test_every_task_survives_being_run_twice_after_a_redrive_of_an_abort(cloud: Cloud) -> None:
    """A redrive of an aborted execution runs SubmitAttempt again for a run that is cancelled."""
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    _cancel(cloud, run_id)
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    folder = cloud.wait(run_id)
    cloud.invoke("submit_attempt", {"run_id": run_id, "token": "t" * 20})
    assert len(cloud.sagemaker.jobs) == 1
    cloud.invoke("clean_up", {"run_id": run_id, "state": {"run_id": run_id}})
    assert cloud.folder(run_id).run.state is RunState.CANCELLED
    execution = {"Id": folder.run.execution_arn, "RedriveCount": 1}
    answer = cloud.invoke("conclude_failure", {"run_id": run_id, "execution": execution})
    assert answer == {"next": "train"}
    assert cloud.folder(run_id).stages[0].state is StageState.RUNNING


def test_a_lost_heartbeat_makes_the_task_run_again_and_find_its_job(cloud: Cloud) -> None:
    def short(definition: dict[str, Any]) -> None:
        definition["States"]["SubmitAttempt"]["HeartbeatSeconds"] = 2

    cloud.use_machine(cloud.create_machine(short))
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.sagemaker.until(lambda: cloud.invocations["submit_attempt"] >= 2, "the task again")
    cloud.complete(name, stage_layout(run_id))
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    assert len(cloud.sagemaker.jobs) == 1


def test_an_endpoint_that_never_comes_up_fails_the_endpoint_and_not_the_model(
    cloud: Cloud,
) -> None:
    """aws/amazon-sagemaker-examples#3432: stuck in Creating for hours, and not to be deleted."""

    def short(definition: dict[str, Any]) -> None:
        definition["States"]["AwaitEndpoint"]["TimeoutSeconds"] = 2

    cloud.use_machine(cloud.create_machine(short))
    run_id = _to_endpoint(cloud)
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.ENDPOINT_FAILED
    assert folder.run.error == "States.Timeout"
    assert folder.run.published is not None
    assert "demo" in cloud.sagemaker.endpoints
    cloud.sagemaker.move_endpoint("demo", "Failed", "it failed at last", tell=False)
    cloud.reconcile()
    cloud.reconcile()
    assert not cloud.sagemaker.endpoints


def test_the_executions_input_stays_small(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.sagemaker.job(f"{run_id}-0-a001")
    arn = cloud.folder(run_id).run.execution_arn
    text = cloud.states.describe_execution(executionArn=arn)["input"]
    assert json.loads(text) == {"run_id": run_id}


def _to_endpoint(cloud: Cloud) -> str:
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    cloud.sagemaker.endpoint("demo")
    cloud.sagemaker.until(lambda: cloud.invocations["await_endpoint"] > 0, "the wait")
    return run_id


def _living_jobs(cloud: Cloud) -> list[str]:
    living = []
    for name, job in cloud.sagemaker.jobs.items():
        if job["TrainingJobStatus"] == "InProgress":
            living.append(name)
        elif job["TrainingJobStatus"] == "Stopping":
            cloud.sagemaker.move(name, "Stopped", "Stopped")
    return living
