"""Every path of the state machine, in the real interpreter."""

from __future__ import annotations

from contracts.states import Outcome, RunState, StageState
from tests.state_machine.cloud import Cloud, stage_layout
from tests.state_machine.specs import DEPLOY, run_spec, sft


def test_one_stage_without_deployment_succeeds_in_few_transitions(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert folder.stages[0].state is StageState.SUCCEEDED
    assert folder.attempts[0].outcome is Outcome.COMPLETED
    assert folder.run.published is not None
    assert folder.run.published.step == 20
    assert cloud.wait_execution(run_id) == "SUCCEEDED"
    assert cloud.history(run_id) == [
        "PrepareRun", "RoutePrepared", "PlanAttempt", "RoutePlan", "SubmitAttempt", "RouteOutcome",
        "FinishStage", "RouteStage", "PublishModel", "DeployWanted", "FinishRun",
    ]  # fmt: skip
