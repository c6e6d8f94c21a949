"""Cancel at every task, then redrive from it: nothing is left, and nothing is made twice.

moto has no RedriveExecution. What it does is known: the failed or aborted state runs again, with
the input it had, in the same definition, and the context object counts the redrive. `_redrive` does
that in the same interpreter, as an execution of another name; the run's own says RUNNING again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from moto.stepfunctions.parser.api import ExecutionStatus
from moto.stepfunctions.parser.models import stepfunctions_parser_backends

from contracts.events import execution_event
from contracts.states import RunState
from lambdas.hub import hub
from tests.state_machine.cloud import ASL, Cloud, stage_layout
from tests.state_machine.holding import held
from tests.state_machine.sagemaker import ACCOUNT, REGION
from tests.state_machine.specs import DEPLOY, run_spec

_TASKS = {
    name: state["Parameters"]["FunctionName"][2:-len("FunctionArn}")]
    for name, state in json.loads(ASL.read_text())["States"].items()
    if state["Type"] == "Task"
}  # fmt: skip
_ON_THE_WAY = [name for name in _TASKS if name not in ("CleanUp", "ConcludeFailure")]


@pytest.mark.parametrize("state", _ON_THE_WAY)
def test_a_run_cancelled_at_any_task_leaves_nothing_and_can_be_redriven(
    cloud: Cloud, state: str
) -> None:
    with held(_handler(_TASKS[state])) as (inside, release):
        run_id = cloud.submit(run_spec(deploy=DEPLOY))
        _go_on(cloud, run_id, inside.is_set)
        cloud.api("POST", f"/v1/runs/{run_id}/cancel")
        release()
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.CANCELLED, end=True)
    assert cloud.wait_execution(run_id) == "ABORTED"
    _go_on(cloud, run_id, lambda: _without_endpoint(cloud), end=True)
    assert not _living(cloud)
    # A model or configuration that no endpoint ever had costs nothing, and is adopted by what
    # comes next; one that an endpoint had goes with it.
    unused = state in ("CreateEndpointConfig", "CreateOrUpdateEndpoint")
    assert unused or not (cloud.sagemaker.models or cloud.sagemaker.configs)

    _redrive(cloud, run_id, state)
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)
    assert list(cloud.sagemaker.endpoints) == ["demo"]
    assert len(cloud.sagemaker.models) == len(cloud.sagemaker.configs) == 1
    assert not _living(cloud)
    made = [f"{run_id}-0-a{number:03d}" for number in range(1, 3)]
    assert set(cloud.sagemaker.jobs) <= set(made)


def test_a_failed_run_that_is_redriven_makes_one_further_job(cloud: Cloud) -> None:
    run_id, _ = _failed(cloud)
    assert cloud.history(run_id)[-1] == "ConcludeFailure"
    _redrive(cloud, run_id, "ConcludeFailure")
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)
    assert list(cloud.sagemaker.jobs) == [f"{run_id}-0-a001", f"{run_id}-0-a002"]


@pytest.mark.parametrize("status", ["FAILED", "ABORTED", "TIMED_OUT"])
def test_a_late_event_from_before_the_redrive_does_not_end_the_run(
    cloud: Cloud, status: str
) -> None:
    run_id, arn = _failed(cloud)
    _redrive(cloud, run_id, "ConcludeFailure")
    cloud.train(f"{run_id}-0-a002")
    _tell(cloud, run_id, arn, status)
    cloud.reconcile()
    assert cloud.sagemaker.jobs[f"{run_id}-0-a002"]["TrainingJobStatus"] == "InProgress"
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)


def test_an_execution_that_ends_again_after_its_redrive_ends_the_run_as_it_ended_last(
    cloud: Cloud,
) -> None:
    run_id, arn = _failed(cloud)
    _redrive(cloud, run_id, "ConcludeFailure")
    cloud.train(f"{run_id}-0-a002")
    _show(arn, ExecutionStatus.ABORTED)
    _tell(cloud, run_id, arn, "FAILED")
    assert cloud.folder(run_id).run.state is RunState.CANCELLING
    cloud.sagemaker.move(f"{run_id}-0-a002", "Stopped", "Stopped")
    assert cloud.wait(run_id).run.state is RunState.CANCELLED


@pytest.mark.parametrize("effect", range(1, 5))
def test_a_crash_while_the_run_is_reopened_changes_nothing(cloud: Cloud, effect: int) -> None:
    """Its four side effects: the stage's budget, the stage, the run, the timeline."""
    run_id, _ = _failed(cloud)
    cloud.crash_at = cloud.effects + effect
    _redrive(cloud, run_id, "ConcludeFailure")
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)
    assert cloud.invocations["conclude_failure"] == 3
    assert list(cloud.sagemaker.jobs) == [f"{run_id}-0-a001", f"{run_id}-0-a002"]
    kinds = [entry.kind for entry in hub().table.timeline(run_id, 100, None)[0]]
    assert kinds.count("run.redriven") == 1


def test_a_redriven_run_that_fails_again_says_why_it_failed_the_second_time(
    cloud: Cloud,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub().table, "put_attempt", _fail)
        run_id = cloud.submit(run_spec())
        assert cloud.wait(run_id).run.error == "ZeroDivisionError"
        assert cloud.wait_execution(run_id) == "FAILED"
    _redrive(cloud, run_id, "ConcludeFailure")
    cloud.train(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "ClientError: no such column")
    cloud.sagemaker.until(lambda: cloud.folder(run_id).run.error, "the second failure")
    run = cloud.folder(run_id).run
    assert (run.error, run.cause) == ("UserFailure", "ClientError: no such column")


def test_a_failed_endpoint_that_is_redriven_is_made_once_more_and_nothing_is_trained(
    cloud: Cloud,
) -> None:
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    _go_on(cloud, run_id, lambda: "demo" in cloud.sagemaker.endpoints)
    cloud.sagemaker.until(lambda: cloud.invocations["await_endpoint"] > 0, "the wait")
    cloud.sagemaker.move_endpoint("demo", "Failed", "did not pass the ping health check")
    assert cloud.wait(run_id).run.state is RunState.ENDPOINT_FAILED
    assert cloud.wait_execution(run_id) == "FAILED"
    _redrive(cloud, run_id, "ConcludeFailure")
    _go_on(cloud, run_id, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)
    assert list(cloud.sagemaker.jobs) == [f"{run_id}-0-a001"]
    assert list(cloud.sagemaker.endpoints) == ["demo"]
    assert len(cloud.sagemaker.models) == len(cloud.sagemaker.configs) == 1


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def _failed(cloud: Cloud) -> tuple[str, str]:
    """A run that has failed, and its execution's ARN; every event of it has been dealt with."""
    run_id = cloud.submit(run_spec(recovery={"max_failures": 0}))
    cloud.train(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "InternalServerError")
    assert cloud.wait(run_id).run.error == "FailureBudgetSpent"
    assert cloud.wait_execution(run_id) == "FAILED"
    cloud.settle()
    arn = cloud.folder(run_id).run.execution_arn
    assert arn is not None
    return run_id, arn


def _tell(cloud: Cloud, run_id: str, arn: str, status: str) -> None:
    detail = {"executionArn": arn, "stateMachineArn": cloud.machine_arn, "name": run_id}
    cloud.invoke("on_execution_status", execution_event({**detail, "status": status}))


def _show(arn: str, status: ExecutionStatus) -> None:
    """What Step Functions says of an execution from now on."""
    backend = stepfunctions_parser_backends[ACCOUNT][REGION]
    backend.describe_execution(arn).exec_status = status


def _redrive(cloud: Cloud, run_id: str, state: str) -> None:
    """Run the definition from ``state`` on, with the input it was last entered with."""
    arn = cloud.folder(run_id).run.execution_arn
    events = cloud.states.get_execution_history(executionArn=arn, maxResults=1000)["events"]
    entered = [event.get("stateEnteredEventDetails", {}) for event in events]
    [*_, given] = [item["input"] for item in entered if item.get("name") == state]

    def from_here(definition: dict[str, Any]) -> None:
        definition["StartAt"] = state
        payload = definition["States"]["ConcludeFailure"]["Parameters"]["Payload"]
        del payload["execution.$"]
        payload["execution"] = {"Id": arn, "RedriveCount": 1}

    machine = cloud.create_machine(from_here)
    _show(arn, ExecutionStatus.RUNNING)
    cloud.states.start_execution(stateMachineArn=machine, name=f"{run_id}-redriven", input=given)


def _go_on(cloud: Cloud, run_id: str, until: Callable[[], bool], *, end: bool = False) -> None:
    """SageMaker does its work until something holds: jobs train and complete (or stop, with
    ``end``), endpoints come up."""

    def step() -> bool:
        for name, job in list(cloud.sagemaker.jobs.items()):
            if job["TrainingJobStatus"] == "Stopping":
                cloud.sagemaker.move(name, "Stopped", "Stopped")
            elif job["TrainingJobStatus"] == "InProgress" and not end:
                cloud.complete(name, stage_layout(run_id))
        for name, endpoint in list(cloud.sagemaker.endpoints.items()):
            if endpoint["EndpointStatus"] == "Creating":
                cloud.serve(name)
        return until()

    cloud.sagemaker.until(step, "what was waited for")


def _without_endpoint(cloud: Cloud) -> bool:
    cloud.reconcile()
    return not cloud.sagemaker.endpoints


def _living(cloud: Cloud) -> list[str]:
    return [
        name
        for name, job in cloud.sagemaker.jobs.items()
        if job["TrainingJobStatus"] in ("InProgress", "Stopping")
    ]


def _handler(construct_id: str) -> str:
    """`PrepareRun` -> `prepare_run`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in construct_id)[1:]
