"""Faults of our own functions: no path of the machine leaves a job or hides what went wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from contracts.states import RunState
from tests.state_machine.cloud import Cloud, stage_layout
from tests.state_machine.specs import DEPLOY, run_spec


def _raise(_: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def _say(_: Any) -> Any:
    return {"next": "somewhere else"}


@pytest.mark.parametrize(
    ("name", "fault", "state", "error"),
    [
        ("prepare_run", _raise, RunState.FAILED, "ZeroDivisionError"),
        ("plan_attempt", _say, RunState.FAILED, "Unknown"),
        ("finish_stage", _raise, RunState.FAILED, "ZeroDivisionError"),
        ("finish_stage", _say, RunState.FAILED, "completed"),
        ("publish_model", _raise, RunState.FAILED, "ZeroDivisionError"),
        ("publish_model", _say, RunState.FAILED, "Unknown"),
        ("create_model", _raise, RunState.ENDPOINT_FAILED, "ZeroDivisionError"),
    ],
)
def test_a_task_that_fails_or_says_something_unknown_ends_the_run_and_cleans_up(
    cloud: Cloud, name: str, fault: Callable[[Any], Any], state: RunState, error: str
) -> None:
    with _instead(name, fault):
        run_id = cloud.submit(run_spec(deploy=DEPLOY))
        if name not in ("prepare_run", "plan_attempt"):
            cloud.train(f"{run_id}-0-a001")
            cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
        folder = cloud.wait(run_id)
    assert (folder.run.state, folder.run.error) == (state, error)
    assert cloud.wait_execution(run_id) == "FAILED"
    assert cloud.history(run_id)[-2:] == ["CleanUp", "ConcludeFailure"]
    assert not cloud.sagemaker.endpoints
    assert not folder.live_attempts
    status, _ = cloud.api("POST", f"/v1/runs/{run_id}/resume")
    assert status == 200


def test_a_conclusion_that_nobody_understands_is_concluded_again(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    with _instead("conclude_failure", _say, times=1):
        cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "ClientError: no")
        assert cloud.wait_execution(run_id) == "FAILED"
    assert cloud.history(run_id)[-5:] == [
        "CleanUp", "ConcludeFailure", "RouteConcluded", "CleanUp", "ConcludeFailure",
    ]  # fmt: skip


@pytest.mark.parametrize("heard", [True, False])
def test_when_the_clean_up_itself_fails_the_end_of_the_execution_cleans_up(
    cloud: Cloud, heard: bool
) -> None:
    cloud.drop_events = not heard
    with _instead("clean_up", _raise):
        run_id = cloud.submit(run_spec())
        name = f"{run_id}-0-a001"
        cloud.train(name)
        cloud.sagemaker.until(lambda: cloud.folder(run_id).attempts[0].token, "the token")
        token = cloud.folder(run_id).attempts[0].token
        cloud.states.send_task_failure(taskToken=token, error="Odd", cause="out of the blue")
        assert cloud.wait_execution(run_id) == "FAILED"
    if not heard:
        cloud.reconcile()
    cloud.sagemaker.until(
        lambda: cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping", "the stop"
    )
    folder = cloud.wait(run_id)
    assert (folder.run.state, folder.run.error) == (RunState.FAILED, "ZeroDivisionError")


@contextmanager
def _instead(name: str, fault: Callable[[Any], Any], times: int = 1000) -> Iterator[None]:
    """Let a fault take a handler's place for its next invocations."""
    module = importlib.import_module(f"lambdas.handlers.{name}")
    real, left = module.handler, [times]

    def handler(event: Any, context: Any) -> Any:
        left[0] -= 1
        return fault(event) if left[0] >= 0 else real(event, context)

    module.handler = handler
    try:
        yield
    finally:
        module.handler = real
