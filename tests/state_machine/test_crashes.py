"""Kill a handler after each of its side effects and go on as AWS would: same end, one job each."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from contracts.states import RunState
from lambdas.hub import hub
from tests.state_machine.cloud import Cloud, stage_layout
from tests.state_machine.specs import DEPLOY, run_spec

SPEC = {"recovery": {"in_place_wait_minutes": 0.0001}, "deploy": DEPLOY}
# No more side effects than this has the run below; the first test holds it.
EFFECTS = 68


def _whole_run(cloud: Cloud) -> str:
    """Submit, be interrupted, be moved and resumed, complete, deploy, be served."""
    run_id = _submit(cloud)
    first, second = f"{run_id}-0-a001", f"{run_id}-0-a002"
    cloud.train(first)
    cloud.checkpoint(stage_layout(run_id), 5, 1)
    cloud.sagemaker.move(first, "InProgress", "Interrupted", at=1.0)
    _until_stopping(cloud, first)
    cloud.sagemaker.move(first, "Stopped", "Stopped")
    _until_job(cloud, second)
    cloud.sagemaker.move(second, "InProgress", "Training")
    cloud.complete(second, stage_layout(run_id))
    _until(cloud, lambda: "demo" in cloud.sagemaker.endpoints)
    cloud.serve("demo")
    _until(cloud, lambda: cloud.folder(run_id).run.state is RunState.SUCCEEDED)
    return run_id


def _submit(cloud: Cloud) -> str:
    """Through the API, again with the same key when the answer did not come."""
    from tests.state_machine.cloud import CrashError

    for _ in range(3):
        try:
            _, document = cloud.api(
                "POST", "/v1/runs", {"spec": run_spec(**SPEC)}, headers={"Idempotency-Key": "k"}
            )
            run_id: str = document["run_id"]
            return run_id
        except CrashError:
            continue
    raise AssertionError("submit crashed more than once")


def _until(cloud: Cloud, condition: Any) -> None:
    for _ in range(100):
        # A pass of the reconciler costs more than the step that it would find already done.
        pause = time.monotonic() + 0.2
        while time.monotonic() < pause:
            if condition():
                return
            time.sleep(0.02)
        cloud.deliver("reconcile", {})
    raise AssertionError("it does not come, whatever the reconciler does")


def _until_stopping(cloud: Cloud, name: str) -> None:
    _until(cloud, lambda: cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping")


def _until_job(cloud: Cloud, name: str) -> None:
    _until(cloud, lambda: name in cloud.sagemaker.jobs)


def _check(cloud: Cloud, run_id: str) -> None:
    folder = cloud.folder(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert cloud.wait_execution(run_id) == "SUCCEEDED"
    assert list(cloud.sagemaker.jobs) == [f"{run_id}-0-a001", f"{run_id}-0-a002"]
    assert [a.outcome and a.outcome.value for a in folder.attempts] == ["interrupted", "completed"]
    assert list(cloud.sagemaker.endpoints) == ["demo"]
    assert len(cloud.sagemaker.models) == len(cloud.sagemaker.configs) == 1
    assert len(hub().table.list_runs(10, None, None)[0]) == 1
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/timeline")
    kinds = Counter(entry["kind"] for entry in document["entries"])
    for kind in ("attempt.ended", "attempt.planned"):
        assert kinds[kind] == 2, kinds


def test_the_run_has_as_many_side_effects_as_are_tried(cloud: Cloud) -> None:
    cloud.recording = []
    run_id = _whole_run(cloud)
    _check(cloud, run_id)
    assert EFFECTS - 10 < len(cloud.recording) <= EFFECTS, Counter(cloud.recording)


@pytest.mark.parametrize("effect", [*range(2, 60, 8)])
def test_a_crash_after_a_side_effect_changes_nothing(cloud: Cloud, effect: int) -> None:
    cloud.crash_at = effect
    _check(cloud, _whole_run(cloud))


@pytest.mark.long
@pytest.mark.parametrize("effect", range(1, EFFECTS + 1))
def test_a_crash_after_any_side_effect_changes_nothing(cloud: Cloud, effect: int) -> None:
    """aws-samples/serverless-coffee#13: a handler died between its write and its message."""
    cloud.crash_at = effect
    _check(cloud, _whole_run(cloud))
