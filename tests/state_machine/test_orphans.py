"""Running jobs that nobody waits for any more."""

from __future__ import annotations

from contracts.states import RunState
from lambdas.hub import hub
from tests.state_machine.cloud import Cloud, stage_layout
from tests.state_machine.specs import run_spec


def _start(cloud: Cloud, name: str, stack: str = "GrpoHub") -> None:
    """A job that the control plane did not make, or has forgotten."""
    request = {"TrainingJobName": name, "Tags": [{"Key": "grpohub:stack", "Value": stack}]}
    cloud.sagemaker.call("CreateTrainingJob", request)


def _status(cloud: Cloud, name: str) -> str:
    status: str = cloud.sagemaker.jobs[name]["TrainingJobStatus"]
    return status


def test_a_job_of_ours_without_a_row_is_stopped_and_others_are_left_alone(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    live = f"{run_id}-0-a001"
    cloud.train(live)
    lost, theirs, foreign = f"{run_id}-0-a007", "gone-20260101-abcdef01-0-a001", "their-own-job"
    _start(cloud, lost)
    _start(cloud, theirs, stack="Second")
    _start(cloud, foreign)
    cloud.reconcile()
    assert _status(cloud, lost) == "Stopping"
    assert {_status(cloud, name) for name in (live, theirs, foreign)} == {"InProgress"}
    # Tags are asked for only where the name and the table leave a doubt.
    assert cloud.sagemaker.calls["ListTags"] == 2
    assert cloud.sagemaker.calls["ListTrainingJobs"] == 1


def test_a_job_that_lives_although_its_attempt_has_ended_is_stopped_and_noted(
    cloud: Cloud,
) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.complete(name, stage_layout(run_id))
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    cloud.sagemaker.move(name, "InProgress", "Training", tell=False)
    for _ in range(2):
        cloud.reconcile()
    assert _status(cloud, name) == "Stopping"
    assert cloud.sagemaker.calls["StopTrainingJob"] == 1
    kinds = [entry.kind for entry in hub().table.timeline(run_id, 100, None)[0]]
    assert kinds.count("attempt.orphan_stopped") == 1
    assert cloud.folder(run_id).run.state is RunState.SUCCEEDED
