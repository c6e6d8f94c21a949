"""Training paths of the state machine: success, every outcome, every budget."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections import Counter
from typing import Any

import pytest
from aws_lambda_powertools.metrics import MetricUnit
from botocore.exceptions import ClientError

from contracts.attempt import AttemptConfig
from contracts.failures import ExitCode, Failure
from contracts.states import AttemptState, Outcome, RunState, StageState
from lambdas.adapters import aws
from lambdas.hub import hub
from tests.state_machine.cloud import BUCKET, Cloud, stage_layout
from tests.state_machine.specs import run_spec, sft

SHORT_WAIT = {"in_place_wait_minutes": 0.0001}
CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. "
    "Please retry using a different ML instance type."
)


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


def test_a_resubmission_resumes_from_the_newest_complete_checkpoint(cloud: Cloud) -> None:
    """aws/sagemaker-python-sdk#1040: training started from step 0 after an interruption."""
    run_id = cloud.submit(run_spec(recovery=SHORT_WAIT))
    layout, name = stage_layout(run_id), f"{run_id}-0-a001"
    cloud.train(name)
    cloud.checkpoint(layout, 5, 1)
    generation = cloud.checkpoint(layout, 10, 1, hosts=2)
    cloud.checkpoint(layout, 15, 1, hosts=2, flagged=1)
    cloud.sagemaker.move(name, "InProgress", "Interrupted")
    cloud.sagemaker.until(
        lambda: cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping" or _look(cloud),
        "stop",
    )
    cloud.settle()  # News of the checkpoints' flags read the bucket too.
    cloud.requests.clear()
    cloud.objects_read.clear()
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    second = cloud.sagemaker.job(f"{run_id}-0-a002")
    config = AttemptConfig.from_hyperparameters(second["HyperParameters"])
    assert config.attempt == 2
    assert config.resume_floor is not None
    assert (config.resume_floor.step, config.resume_floor.generation) == (10, generation)
    # One LIST, then the flags of the torn step 15 (one) and of step 10 (two); step 5 is not read.
    assert cloud.requests["ListObjectsV2"] == 1
    assert cloud.requests["HeadObject"] == 0
    read = [key.rpartition("checkpoints/")[2] for key in cloud.objects_read if ".flag" in key]
    assert sorted(key.partition("/")[0] for key in read) == [
        "step-00000010", "step-00000010", "step-00000015",
    ]  # fmt: skip
    attempts = cloud.folder(run_id).attempts
    assert attempts[0].outcome is Outcome.INTERRUPTED
    _finish(cloud, run_id, "a002")
    # Four transitions for the resubmission: PlanAttempt, RoutePlan, SubmitAttempt, RouteOutcome.
    assert cloud.transitions(run_id) == 11 + 4


def test_managed_spot_that_restarts_in_place_is_left_alone(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    cloud.sagemaker.move(name, "InProgress", "Interrupted")
    assert cloud.folder(run_id).attempts[0].state is AttemptState.INTERRUPTED
    cloud.reconcile()
    cloud.sagemaker.move(name, "InProgress", "Starting")
    cloud.sagemaker.move(name, "InProgress", "Training")
    _finish(cloud, run_id, "a001")
    folder = cloud.folder(run_id)
    assert len(folder.attempts) == 1
    assert folder.attempts[0].interruptions == 1
    assert cloud.sagemaker.calls["StopTrainingJob"] == 0


def test_stages_run_one_after_another_and_start_from_each_other(cloud: Cloud) -> None:
    strict = sft("strict", start_from={"stage": "smooth", "step": 10})
    run_id = cloud.submit(run_spec(stages=[sft("smooth"), strict]))
    first = stage_layout(run_id, 0, "smooth")
    cloud.train(f"{run_id}-0-a001")
    generation = cloud.checkpoint(first, 10, 1)
    cloud.checkpoint(first, 20, 1)
    cloud.complete(f"{run_id}-0-a001", first)
    second = cloud.train(f"{run_id}-1-a001")
    config = AttemptConfig.from_hyperparameters(second["HyperParameters"])
    assert config.weights_from is not None
    assert config.weights_from.checkpoint.step == 10
    assert config.weights_from.checkpoint.generation == generation
    assert config.resume_floor is None
    channels = {c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
                for c in second["InputDataConfig"]}  # fmt: skip
    assert channels["model"] == f"s3://{BUCKET}/{first.model_prefix}"
    cloud.complete(f"{run_id}-1-a001", stage_layout(run_id, 1, "strict"))
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.SUCCEEDED
    assert [stage.state for stage in folder.stages] == [StageState.SUCCEEDED] * 2


def test_a_named_checkpoint_that_does_not_exist_fails_the_run_before_a_job_is_paid(
    cloud: Cloud,
) -> None:
    strict = sft("strict", start_from={"stage": "smooth", "step": 7})
    run_id = cloud.submit(run_spec(stages=[sft("smooth"), strict]))
    cloud.train(f"{run_id}-0-a001")
    cloud.checkpoint(stage_layout(run_id, 0, "smooth"), 20, 1)
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id, 0, "smooth"))
    folder = cloud.wait(run_id)
    assert folder.run.error == "NamedCheckpointMissing"
    assert "it has [20]" in (folder.run.cause or "")
    assert f"{run_id}-1-a001" not in cloud.sagemaker.jobs


def test_capacity_goes_down_the_ladder_and_uses_no_failure_budget(cloud: Cloud) -> None:
    """DIAGNijmegen/rse-grand-challenge#2631, skypilot-org/skypilot#10021."""
    run_id = cloud.submit(run_spec(rungs=2, recovery={"max_failures": 0}))
    cloud.sagemaker.refuse("CreateTrainingJob", "CapacityError", CAPACITY, times=3)
    cloud.train(f"{run_id}-0-a004")
    _finish(cloud, run_id, "a004")
    attempts = cloud.folder(run_id).attempts
    assert [a.outcome for a in attempts[:3]] == [Outcome.OUT_OF_CAPACITY] * 3
    assert [a.instance_type for a in attempts] == ["ml.g5.xlarge", "ml.g6.xlarge"] * 2
    # At once to the next rung; a pause only when the whole ladder had nothing.
    assert [a.pause_seconds for a in attempts] == [0, 0, 1, 0]


def test_a_failed_job_without_capacity_is_resubmitted(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(rungs=2))
    cloud.sagemaker.job(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", CAPACITY)
    cloud.train(f"{run_id}-0-a002")
    _finish(cloud, run_id, "a002")
    assert cloud.folder(run_id).attempts[0].outcome is Outcome.OUT_OF_CAPACITY


def test_a_used_up_quota_waits_with_a_visible_reason(cloud: Cloud) -> None:
    """aws-solutions/deepracer-on-aws#88: the flow went on without a job and crashed in a Choice."""
    reason = (
        "The account-level service limit 'ml.g5.xlarge for training job usage' is 0 Instances, "
        "with current utilization of 0 Instances and a request delta of 1 Instances."
    )
    run_id = cloud.submit(run_spec(recovery={"capacity_backoff_seconds": 60}))
    cloud.sagemaker.refuse("CreateTrainingJob", "ResourceLimitExceeded", reason)
    folder = cloud.wait(run_id, RunState.WAITING_QUOTA)
    assert "account-level service limit" in (folder.run.reason or "")
    cloud.train(f"{run_id}-0-a002")
    assert cloud.wait(run_id, RunState.TRAINING).run.reason is None
    _finish(cloud, run_id, "a002")
    assert cloud.folder(run_id).attempts[0].outcome is Outcome.OUT_OF_QUOTA
    # Five transitions for a resubmission after a pause: BackOff comes between.
    assert cloud.transitions(run_id) == 11 + 5


def test_a_spot_job_without_instances_is_moved_to_the_next_rung(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(rungs=2, recovery={"capacity_wait_minutes": 0.0001}))
    name = f"{run_id}-0-a001"
    cloud.sagemaker.job(name)
    cloud.sagemaker.move(name, "InProgress", "Pending")
    cloud.sagemaker.until(
        lambda: cloud.sagemaker.jobs[name]["TrainingJobStatus"] == "Stopping" or _look(cloud),
        "stop",
    )
    cloud.sagemaker.move(name, "Stopped", "Stopped")
    second = cloud.train(f"{run_id}-0-a002")
    assert second["ResourceConfig"]["InstanceType"] == "ml.g6.xlarge"
    assert cloud.folder(run_id).attempts[0].outcome is Outcome.OUT_OF_CAPACITY


def test_max_wait_exceeded_is_resubmitted_and_max_runtime_only_while_the_budget_lasts(
    cloud: Cloud,
) -> None:
    run_id = cloud.submit(run_spec(rungs=2, max_runtime_hours=1))
    cloud.sagemaker.job(f"{run_id}-0-a001")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Stopped", "MaxWaitTimeExceeded")
    cloud.train(f"{run_id}-0-a002")
    cloud.checkpoint(stage_layout(run_id), 4, 2)
    cloud.sagemaker.move(
        f"{run_id}-0-a002", "Stopped", "MaxRuntimeExceeded", TrainingTimeInSeconds=3000
    )
    third = cloud.train(f"{run_id}-0-a003")
    assert third["StoppingCondition"]["MaxRuntimeInSeconds"] == 600
    cloud.sagemaker.move(
        f"{run_id}-0-a003", "Stopped", "MaxRuntimeExceeded", TrainingTimeInSeconds=600
    )
    folder = cloud.wait(run_id)
    assert [a.outcome for a in folder.attempts] == [
        Outcome.OUT_OF_CAPACITY, Outcome.TIMED_OUT, Outcome.TIMED_OUT,
    ]  # fmt: skip
    assert (folder.run.state, folder.run.error) == (RunState.FAILED, "RuntimeBudgetSpent")


def test_infrastructure_failures_end_the_run_when_their_budget_is_spent(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(recovery={"max_failures": 1, "max_stalled_attempts": 9}))
    for attempt in ("a001", "a002"):
        cloud.sagemaker.job(f"{run_id}-0-{attempt}")
        cloud.sagemaker.move(
            f"{run_id}-0-{attempt}", "Failed", "Failed",
            "InternalServerError: We encountered an internal error. Please try again.",
        )  # fmt: skip
    folder = cloud.wait(run_id)
    assert folder.run.error == "FailureBudgetSpent"
    assert "internal error" in (folder.run.cause or "")
    assert len(folder.attempts) == 2
    assert cloud.wait_execution(run_id) == "FAILED"
    assert cloud.history(run_id)[-2:] == ["CleanUp", "ConcludeFailure"]


def test_a_run_that_only_waits_ends_when_its_time_is_spent(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(recovery={"capacity_backoff_seconds": 60}, max_wait_hours=12))
    cloud.sagemaker.refuse("CreateTrainingJob", "CapacityError", CAPACITY, times=99)
    waiting = cloud.wait(run_id, RunState.WAITING_CAPACITY)
    begun = dt.datetime.now(dt.UTC) - dt.timedelta(hours=12)
    hub().table.update_run(waiting.run, budget_since=begun)
    folder = cloud.wait(run_id)
    assert (folder.run.state, folder.run.error) == (RunState.FAILED, "WaitBudgetSpent")
    assert "max_wait_hours (12)" in (folder.run.cause or "")
    assert not cloud.sagemaker.jobs


def test_metrics_tell_what_an_interruption_cost_and_what_spot_saved(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lambdas.observability import metrics  # Reads the environment that the cloud sets.

    sums: Counter[str] = Counter()

    def add(_self: object, name: str, unit: MetricUnit, value: float) -> None:
        sums[name] += value

    monkeypatch.setattr(type(metrics), "add_metric", add)
    run_id = cloud.submit(run_spec(recovery=SHORT_WAIT))
    layout, first = stage_layout(run_id), f"{run_id}-0-a001"
    begun = time.time()
    cloud.sagemaker.job(first)
    cloud.sagemaker.move(first, "InProgress", "Training", at=begun)
    cloud.checkpoint(layout, 5, 1)
    last = [{"MetricName": "step", "Value": 8.0, "Timestamp": begun}]
    cloud.sagemaker.move(first, "InProgress", "Interrupted", at=begun, FinalMetricDataList=last)
    cloud.sagemaker.until(
        lambda: cloud.sagemaker.jobs[first]["TrainingJobStatus"] == "Stopping" or _look(cloud),
        "stop",
    )
    cloud.sagemaker.move(
        first, "Stopped", "Stopped", at=begun + 100,
        TrainingTimeInSeconds=90, BillableTimeInSeconds=30,
    )  # fmt: skip
    second = f"{run_id}-0-a002"
    cloud.sagemaker.job(second)
    cloud.sagemaker.move(second, "InProgress", "Training", at=begun + 160)
    _finish(cloud, run_id, "a002")
    wanted = {
        "Interruptions": 1, "Resubmissions": 1, "AttemptsEnded": 2, "Attempts_interrupted": 1,
        "StepsLost": 8 - 5, "SpotSavedInstanceSeconds": 60 + 70, "SpotInstanceSeconds": 90 + 100,
    }  # fmt: skip
    assert {name: sums[name] for name in wanted} == wanted
    assert sums["RecoverySeconds"] == pytest.approx(60, abs=1)


def test_attempts_without_a_new_checkpoint_end_a_crash_loop(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(recovery={"max_failures": 9, "max_stalled_attempts": 2}))
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.checkpoint(layout, 5, 1)
    for attempt in ("a001", "a002", "a003"):
        cloud.sagemaker.job(f"{run_id}-0-{attempt}")
        cloud.sagemaker.move(f"{run_id}-0-{attempt}", "Failed", "Failed", "AlgorithmError: boom")
    folder = cloud.wait(run_id)
    assert folder.run.error == "NoProgress"
    assert len(folder.attempts) == 3


def test_a_users_fault_is_not_resubmitted_and_says_its_cause(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    words = Failure(ExitCode.DATA, "train.jsonl line 3: no column `problem`").text()
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", f"AlgorithmError: {words}")
    folder = cloud.wait(run_id)
    assert folder.run.error == "UserFailure"
    assert folder.run.cause == "train.jsonl line 3: no column `problem`"
    assert folder.attempts[0].failure_code == "data"
    assert folder.stages[0].state is StageState.FAILED
    assert len(cloud.sagemaker.jobs) == 1


def test_a_refused_request_fails_the_run_with_sagemakers_words(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.sagemaker.refuse("CreateTrainingJob", "ValidationException", "no such role")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.FAILED
    assert "no such role" in (folder.run.cause or "")


def test_throttling_is_tried_again(cloud: Cloud) -> None:
    """aws/sagemaker-python-sdk#645, syne-tune/syne-tune#339."""
    run_id = cloud.submit(run_spec())
    cloud.sagemaker.refuse("CreateTrainingJob", "ThrottlingException", "Rate exceeded", times=2)
    cloud.train(f"{run_id}-0-a001")
    _finish(cloud, run_id, "a001")
    assert len(cloud.folder(run_id).attempts) == 1


@pytest.mark.parametrize(
    "reason", ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"]
)
def test_a_planned_attempt_that_meets_another_write_is_planned_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    client = aws.resource("dynamodb").meta.client
    write, met = client.transact_write_items, []

    def transact(**request: Any) -> Any:
        if not met and any("ConditionCheck" in item for item in request["TransactItems"]):
            met.append(request)
            reasons = [{"Code": "None"}, {"Code": reason}, {"Code": "None"}]
            answer: Any = {
                "Error": {"Code": "TransactionCanceledException", "Message": f"[{reason}]"},
                "CancellationReasons": reasons,
            }
            raise ClientError(answer, "TransactWriteItems")
        return write(**request)

    monkeypatch.setattr(client, "transact_write_items", transact)
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    _finish(cloud, run_id, "a001")
    assert met


def test_a_job_that_completed_without_a_whole_model_is_a_failure(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.export(layout)
    cloud.s3.delete_object(Bucket=BUCKET, Key=f"{layout.model_prefix}weights")
    cloud.sagemaker.move(f"{run_id}-0-a001", "Completed", "Completed")
    cloud.train(f"{run_id}-0-a002")
    first = cloud.folder(run_id).attempts[0]
    assert first.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert "weights is missing" in (first.reason or "")
    _finish(cloud, run_id, "a002")


def test_a_job_name_of_another_owner_fails_loudly(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    with cloud.sagemaker.lock:  # Somebody else takes the next name.
        cloud.sagemaker.jobs[f"{run_id}-0-a002"] = {**cloud.sagemaker.jobs[name], "Tags": []}
    cloud.sagemaker.move(name, "Failed", "Failed", "InternalServerError")
    folder = cloud.wait(run_id)
    assert folder.run.error == "UserFailure"
    assert "another owner" in (folder.run.cause or "")


def test_a_missing_input_fails_the_run_before_a_job_is_paid(cloud: Cloud) -> None:
    spec = run_spec()
    spec["stages"][0]["data"]["train"] = "s3://run-bucket/inputs/nothing.jsonl"
    run_id = cloud.submit(spec)
    folder = cloud.wait(run_id)
    assert folder.run.error == "InputMissingError"
    assert "nothing.jsonl: nothing is there" in (folder.run.cause or "")
    assert not cloud.sagemaker.jobs


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (None, "s3://run-bucket/inputs/model/: no config.json, so no Hugging Face model folder"),
        (b"[]", "s3://run-bucket/inputs/model/config.json: is no JSON object"),
        (b"{cut off", "s3://run-bucket/inputs/model/config.json: Expecting property name"),
    ],
)
def test_a_folder_that_is_no_model_fails_the_run_before_a_job_is_paid(
    cloud: Cloud, body: bytes | None, cause: str
) -> None:
    cloud.s3.put_object(Bucket=BUCKET, Key="inputs/model/weights.safetensors", Body=b"0" * 64)
    cloud.s3.delete_object(Bucket=BUCKET, Key="inputs/model/config.json")
    if body is not None:
        cloud.s3.put_object(Bucket=BUCKET, Key="inputs/model/config.json", Body=body)
    folder = cloud.wait(cloud.submit(run_spec()))
    assert folder.run.error == "InputMissingError"
    assert cause in (folder.run.cause or "")
    assert not cloud.sagemaker.jobs


def test_instances_that_look_too_small_are_told_before_a_job_is_paid(cloud: Cloud) -> None:
    config = {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "vocab_size": 32_000,
        "dtype": "float16",
    }
    cloud.s3.put_object(
        Bucket=BUCKET, Key="inputs/model/config.json", Body=json.dumps(config).encode()
    )
    cloud.s3.put_object(Bucket=BUCKET, Key="inputs/model/a.safetensors", Body=bytes(1_000_000))
    spec = run_spec()
    spec["stages"][0]["micro_batch_tokens"] = 10_000_000
    run_id = cloud.submit(spec)
    cloud.train(f"{run_id}-0-a001")
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/timeline")
    doubts = [entry["text"] for entry in document["entries"] if entry["kind"] == "memory.doubt"]
    kinds = [rung["instance_type"] for rung in spec["compute"]["ladder"]]
    assert len(doubts) == len(kinds)
    for text, instance_type in zip(doubts, kinds, strict=True):
        assert text.startswith(f"{instance_type} may be too small for ")
        assert ": activations " in text


def test_a_checkpoint_that_vanished_is_an_error_and_never_a_fresh_start(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    generation = cloud.checkpoint(layout, 10, 1)
    cloud.sagemaker.until(lambda: cloud.folder(run_id).stages[0].newest_step == 10, "progress")
    cloud.s3.delete_object(Bucket=BUCKET, Key=layout.flag(10, generation, 0))
    cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "InternalServerError")
    folder = cloud.wait(run_id)
    assert folder.run.error == "CheckpointLost"
    assert len(folder.attempts) == 1


@pytest.mark.parametrize("reason", ["AccessDenied", "ServiceUnavailable"])
def test_an_s3_error_is_never_taken_for_no_checkpoint(cloud: Cloud, reason: str) -> None:
    """Defect D4 of the first seed: AccessDenied read as "nothing found" restarted from step 0."""
    from lambdas.adapters.aws import client

    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    broken = {"on": True}

    def refuse(**_: object) -> None:
        if broken["on"]:
            from botocore.exceptions import ClientError

            raise ClientError({"Error": {"Code": reason, "Message": reason}}, "ListObjectsV2")

    events = client("s3").meta.events
    events.register("before-call.s3.ListObjectsV2", refuse)
    try:
        cloud.sagemaker.move(f"{run_id}-0-a001", "Failed", "Failed", "InternalServerError")
        if reason == "AccessDenied":
            folder = cloud.wait(run_id)
            assert folder.run.state is RunState.FAILED
            assert "AccessDenied" in (folder.run.cause or "")
            assert len(cloud.sagemaker.jobs) == 1
        else:
            cloud.sagemaker.until(lambda: cloud.invocations["plan_attempt"] >= 3, "retries")
            broken["on"] = False
            cloud.sagemaker.job(f"{run_id}-0-a002")
    finally:
        events.unregister("before-call.s3.ListObjectsV2", refuse)


def _look(cloud: Cloud) -> bool:
    cloud.reconcile()
    return False


def _finish(cloud: Cloud, run_id: str, attempt: str) -> None:
    cloud.complete(f"{run_id}-0-{attempt}", stage_layout(run_id))
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    assert cloud.wait_execution(run_id) == "SUCCEEDED"
