"""From a published model to a tested endpoint, in the real interpreter."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import Any

import pytest

from contracts.states import EndpointState, RunState
from lambdas.adapters.aws import client
from lambdas.errors import ConflictError
from lambdas.hub import hub
from lambdas.logic.endpoints import delete_endpoint, observe_endpoint
from tests.state_machine.cloud import BUCKET, Cloud, stage_layout
from tests.state_machine.sagemaker import policy_arn
from tests.state_machine.specs import DEPLOY, run_spec

TO_ZERO = {**DEPLOY, "autoscaling": {"min_instances": 0, "max_instances": 1}}


def _trained(cloud: Cloud, deploy: dict[str, Any], step: int = 20) -> str:
    run_id = cloud.submit(run_spec(deploy=deploy))
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id), step)
    return run_id


def _deployed(cloud: Cloud, deploy: dict[str, Any], step: int = 20) -> str:
    run_id = _trained(cloud, deploy, step)
    cloud.sagemaker.endpoint("demo")
    cloud.serve("demo")
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    return run_id


def _nothing_is_left(cloud: Cloud) -> None:
    """Of endpoint `demo` and of all that was made for it."""
    assert not cloud.sagemaker.endpoints
    assert not cloud.sagemaker.configs
    assert not cloud.sagemaker.models
    assert not cloud.sagemaker.components
    assert not cloud.sagemaker.targets
    assert _alarms("demo") == _wake_alarms() == []
    assert cloud.api("GET", "/v1/endpoints/demo")[0] == 404


def _alarms(endpoint: str) -> list[str]:
    """Names of the alarms on an endpoint's own 5xx answers."""
    wanted = {"EndpointName": endpoint, "VariantName": "primary"}
    return [
        alarm["AlarmName"]
        for alarm in client("cloudwatch").describe_alarms()["MetricAlarms"]
        if alarm["MetricName"] == "Invocation5XXErrors"
        and {item["Name"]: item["Value"] for item in alarm["Dimensions"]} == wanted
    ]


def _wake_alarms() -> list[dict[str, Any]]:
    """Alarms on requests that found no copy of an inference component."""
    return [
        alarm
        for alarm in client("cloudwatch").describe_alarms()["MetricAlarms"]
        if alarm["MetricName"] == "NoCapacityInvocationFailures"
    ]


def test_a_run_ends_with_an_endpoint_that_answered_a_real_question(cloud: Cloud) -> None:
    run_id = _deployed(cloud, DEPLOY)
    assert cloud.transitions(run_id) == 11 + 6
    assert cloud.history(run_id)[-8:] == [
        "DeployWanted", "CreateModel", "CreateEndpointConfig", "CreateOrUpdateEndpoint",
        "AwaitEndpoint", "RouteEndpoint", "SmokeTest", "FinishRun",
    ]  # fmt: skip
    [model] = cloud.sagemaker.models.values()
    source = model["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert source == {
        "S3Uri": f"s3://{BUCKET}/{stage_layout(run_id).model_prefix}",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    [asked] = cloud.sagemaker.asked
    assert asked["messages"] == [{"role": "user", "content": "3+3?"}]
    _, view = cloud.api("GET", f"/v1/runs/{run_id}")
    assert view["smoke_test"]["answer"] == "right, down"
    assert view["smoke_test"]["source"] == "validation data"
    assert view["endpoint_name"] == "demo"
    _, endpoint = cloud.api("GET", "/v1/endpoints/demo")
    assert endpoint["state"] == "IN_SERVICE"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_longer_than_the_answer_may_be_is_an_answer(cloud: Cloud, name: str) -> None:
    message = {"role": "assistant", "content": None, name: "first I go"}
    cloud.sagemaker.answer = lambda _: {"choices": [{"message": message}]}
    run_id = _deployed(cloud, DEPLOY)
    _, view = cloud.api("GET", f"/v1/runs/{run_id}")
    assert view["smoke_test"]["answer"] == "first I go"


def test_the_prompt_that_the_trainer_left_is_asked(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec(deploy=DEPLOY))
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "rendered"}]
    body = json.dumps({"messages": messages}).encode()
    cloud.s3.put_object(Bucket=BUCKET, Key=layout.sample_prompt, Body=body)
    cloud.complete(f"{run_id}-0-a001", layout)
    cloud.sagemaker.endpoint("demo")
    cloud.serve("demo")
    cloud.wait(run_id)
    assert cloud.sagemaker.asked[0]["messages"] == messages


def test_a_failed_endpoint_is_deleted_and_the_model_stays_published(cloud: Cloud) -> None:
    run_id = _trained(cloud, DEPLOY)
    cloud.sagemaker.endpoint("demo")
    group = "/aws/sagemaker/Endpoints/demo"
    logs = hub().telemetry._logs
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName="primary/i-1")
    now = int(dt.datetime.now().timestamp() * 1000)
    logs.put_log_events(
        logGroupName=group, logStreamName="primary/i-1",
        logEvents=[{"timestamp": now, "message": "start failure: weights do not match"}],
    )  # fmt: skip
    cloud.sagemaker.move_endpoint("demo", "Failed", "did not pass the ping health check")
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.ENDPOINT_FAILED
    assert "ping health check" in (folder.run.cause or "")
    assert "weights do not match" in (folder.run.cause or "")
    assert folder.run.published is not None
    assert not cloud.sagemaker.endpoints
    assert not cloud.sagemaker.models
    assert cloud.wait_execution(run_id) == "FAILED"


def test_no_capacity_tries_the_next_type_and_other_failures_do_not(cloud: Cloud) -> None:
    """aws/deep-learning-containers#6411."""
    deploy = {**DEPLOY, "fallback_instance_types": ["ml.g6.xlarge"]}
    run_id = _trained(cloud, deploy)
    cloud.sagemaker.endpoint("demo")
    first = cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]
    cloud.sagemaker.move_endpoint("demo", "Failed", "InsufficientInstanceCapacity: no g5")
    cloud.sagemaker.endpoint("demo")
    second = cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]
    assert first != second
    variant = cloud.sagemaker.configs[second]["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.g6.xlarge"
    cloud.serve("demo")
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "message", ["account-level service limit", "You have reached the limit for endpoints."]
)
def test_a_ladder_without_any_capacity_fails_the_endpoint(cloud: Cloud, message: str) -> None:
    cloud.sagemaker.refuse("CreateEndpoint", "ResourceLimitExceeded", message, times=400)
    run_id = _trained(cloud, {**DEPLOY, "fallback_instance_types": ["ml.g6.xlarge"]})
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.ENDPOINT_FAILED
    assert folder.run.error == "NoCapacityError"
    assert message in (folder.run.cause or "")
    assert cloud.sagemaker.calls["CreateEndpoint"] == 2


def test_a_failure_that_only_sounds_like_capacity_ends_the_deployment(cloud: Cloud) -> None:
    run_id = _trained(cloud, {**DEPLOY, "fallback_instance_types": ["ml.g6.xlarge"]})
    cloud.sagemaker.endpoint("demo")
    cloud.sagemaker.move_endpoint("demo", "Failed", "The KV cache's Capacity is too small")
    folder = cloud.wait(run_id)
    assert (folder.run.state, folder.run.error) == (RunState.ENDPOINT_FAILED, "EndpointFailed")
    assert cloud.sagemaker.calls["CreateEndpoint"] == 1


def test_a_refused_endpoint_is_not_taken_for_one_deleted_by_hand(cloud: Cloud) -> None:
    """The reconciler looks between the refusal and the wait for the endpoint."""
    cloud.sagemaker.refuse("CreateEndpoint", "ResourceLimitExceeded", "the limit is 0")
    real = cloud.invoke

    def look_first(name: str, event: dict[str, Any]) -> Any:
        if name == "await_endpoint":
            observe_endpoint(hub(), "demo")
        return real(name, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloud, "invoke", look_first)
        run_id = _trained(cloud, {**DEPLOY, "fallback_instance_types": ["ml.g6.xlarge"]})
        cloud.sagemaker.endpoint("demo")
    [config] = [cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]]
    variant = cloud.sagemaker.configs[config]["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.g6.xlarge"
    cloud.serve("demo")
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED


def test_a_model_that_shows_late_is_waited_for(cloud: Cloud) -> None:
    """SageMaker reads what was just created eventually consistently."""
    cloud.sagemaker.refuse(
        "CreateEndpointConfig", "ValidationException", 'Could not find model "arn:model/demo".'
    )
    _deployed(cloud, DEPLOY)


def test_a_second_run_updates_the_endpoint_blue_green(cloud: Cloud) -> None:
    first = _deployed(cloud, DEPLOY)
    old = cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]
    second = _trained(cloud, DEPLOY, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    assert cloud.sagemaker.calls["UpdateEndpoint"] == 1
    guard = cloud.sagemaker.endpoints["demo"]["_guard"]["AutoRollbackConfiguration"]
    assert [item["AlarmName"] for item in guard["Alarms"]] == _alarms("demo")
    # The old configuration still shows for a moment: that is no rollback.
    cloud.reconcile()
    cloud.serve("demo")
    assert cloud.wait(second).run.state is RunState.SUCCEEDED
    assert old not in cloud.sagemaker.configs
    assert len(cloud.sagemaker.models) == 1
    row = hub().table.get_endpoint("demo")
    assert row is not None
    assert (row.run_id, row.owned, row.previous_config) == (second, False, None)
    assert first != second


def test_an_update_that_was_rolled_back_leaves_the_old_model_serving(cloud: Cloud) -> None:
    _deployed(cloud, DEPLOY)
    old = cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]
    second = _trained(cloud, DEPLOY, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.sagemaker.move_endpoint("demo", "RollingBack")
    cloud.sagemaker.move_endpoint("demo", "InService", config=old)
    folder = cloud.wait(second)
    assert folder.run.state is RunState.ENDPOINT_FAILED
    assert cloud.sagemaker.endpoints["demo"]["EndpointStatus"] == "InService"
    row = hub().table.get_endpoint("demo")
    assert row is not None
    assert row.config_name == old


def test_an_update_that_fails_its_smoke_test_is_taken_back(cloud: Cloud) -> None:
    _deployed(cloud, DEPLOY)
    old = cloud.sagemaker.endpoints["demo"]["EndpointConfigName"]
    cloud.sagemaker.answer = lambda _: {"choices": [{"message": {"content": "  "}}]}
    second = _trained(cloud, DEPLOY, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.serve("demo")
    folder = cloud.wait(second)
    assert (folder.run.state, folder.run.error) == (
        RunState.ENDPOINT_FAILED, "SmokeTestFailedError",
    )  # fmt: skip
    assert cloud.sagemaker.calls["UpdateEndpoint"] == 2
    cloud.serve("demo")
    assert cloud.sagemaker.endpoints["demo"]["EndpointConfigName"] == old
    row = hub().table.get_endpoint("demo")
    assert row is not None
    assert (row.state, row.config_name) == (EndpointState.IN_SERVICE, old)


def test_an_endpoint_of_another_owner_is_left_alone(cloud: Cloud) -> None:
    with cloud.sagemaker.lock:
        cloud.sagemaker.endpoints["demo"] = {
            "EndpointName": "demo", "EndpointArn": "arn:aws:sagemaker:x:1:endpoint/demo",
            "EndpointConfigName": "theirs", "EndpointStatus": "InService", "Tags": [],
            "CreationTime": 1.0, "LastModifiedTime": 1.0,
        }  # fmt: skip
    run_id = _trained(cloud, DEPLOY)
    folder = cloud.wait(run_id)
    assert folder.run.error == "EndpointTakenError"
    assert cloud.sagemaker.endpoints["demo"]["EndpointConfigName"] == "theirs"


def test_autoscaling_and_scale_to_zero_are_set_up_and_forgotten(cloud: Cloud) -> None:
    _deployed(cloud, {**DEPLOY, "autoscaling": {"min_instances": 0, "max_instances": 3}})
    [component] = cloud.sagemaker.components
    [config] = cloud.sagemaker.configs.values()
    variant = config["ProductionVariants"][0]
    assert variant["ManagedInstanceScaling"]["MinInstanceCount"] == 0
    assert "ModelName" not in variant
    [target] = cloud.sagemaker.targets.values()
    assert target["ResourceId"] == f"inference-component/{component}"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (0, 3)
    tracking, waking = cloud.sagemaker.policies.values()
    assert tracking["PolicyType"] == "TargetTrackingScaling"
    assert waking["PolicyType"] == "StepScaling"
    [step] = waking["StepScalingPolicyConfiguration"]["StepAdjustments"]
    assert step == {"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}
    # One request that finds no copy is enough.
    [alarm] = _wake_alarms()
    assert alarm["Dimensions"] == [{"Name": "InferenceComponentName", "Value": component}]
    assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (
        1, "GreaterThanOrEqualToThreshold",
    )  # fmt: skip
    assert alarm["AlarmActions"] == [policy_arn(target["ResourceId"], waking["PolicyName"])]
    status, document = cloud.api("DELETE", "/v1/endpoints/demo")
    assert (status, document["remaining"]) == (202, [])
    _nothing_is_left(cloud)


def _ask_component(cloud: Cloud) -> str | None:
    """The component that clients are told to ask."""
    component: str | None = cloud.api("GET", "/v1/endpoints/demo")[1]["inference_component"]
    return component


def test_a_component_serves_until_its_successor_is_announced(cloud: Cloud) -> None:
    _deployed(cloud, TO_ZERO)
    [old] = cloud.sagemaker.components
    run_id = _trained(cloud, TO_ZERO, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    assert _ask_component(cloud) == old
    config = cloud.sagemaker.configs[cloud.sagemaker.endpoints["demo"]["_next"]]
    # The new one is placed beside the old one.
    scaling = config["ProductionVariants"][0]["ManagedInstanceScaling"]
    assert scaling["MaxInstanceCount"] == 2
    cloud.serve("demo")
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    [new] = cloud.sagemaker.components
    assert new != old
    assert _ask_component(cloud) == new
    assert list(cloud.sagemaker.targets) == [f"inference-component/{new}"]
    assert {key[0] for key in cloud.sagemaker.policies} == set(cloud.sagemaker.targets)
    [alarm] = _wake_alarms()
    assert new in alarm["AlarmName"]
    assert cloud.api("DELETE", "/v1/endpoints/demo")[1]["remaining"] == []
    _nothing_is_left(cloud)


def test_a_component_that_cannot_go_yet_goes_later_and_before_the_next_deployment(
    cloud: Cloud,
) -> None:
    _deployed(cloud, TO_ZERO)
    cloud.sagemaker.refuse(
        "DeleteInferenceComponent", "ValidationException",
        "Cannot delete inference component while it is in state UPDATE_RC_IN_PROGRESS", times=2,
    )  # fmt: skip
    run_id = _trained(cloud, TO_ZERO, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.serve("demo")
    assert cloud.wait(run_id).run.state is RunState.SUCCEEDED
    assert len(cloud.sagemaker.components) == 2
    assert len(cloud.sagemaker.targets) == 1
    third = _trained(cloud, TO_ZERO, step=60)
    cloud.sagemaker.until(lambda: cloud.invocations["create_or_update_endpoint"] > 3, "a retry")
    assert cloud.sagemaker.endpoints["demo"]["EndpointStatus"] == "InService"
    cloud.reconcile()
    assert len(cloud.sagemaker.components) == 2
    cloud.reconcile()
    assert len(cloud.sagemaker.components) == 1
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.serve("demo")
    assert cloud.wait(third).run.state is RunState.SUCCEEDED
    assert len(cloud.sagemaker.components) == len(cloud.sagemaker.models) == 1


def test_a_component_that_fails_its_smoke_test_goes_and_the_old_one_serves_on(
    cloud: Cloud,
) -> None:
    _deployed(cloud, TO_ZERO)
    [old] = cloud.sagemaker.components
    cloud.sagemaker.answer = lambda _: {"choices": [{"message": {"content": "  "}}]}
    run_id = _trained(cloud, TO_ZERO, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.serve("demo")
    assert cloud.wait(run_id).run.error == "SmokeTestFailedError"
    cloud.serve("demo")
    assert list(cloud.sagemaker.components) == [old]
    assert list(cloud.sagemaker.targets) == [f"inference-component/{old}"]
    assert len(_wake_alarms()) == 1
    assert _ask_component(cloud) == old
    row = hub().table.get_endpoint("demo")
    assert row is not None
    assert (row.state, row.components) == (EndpointState.IN_SERVICE, (old,))


def test_deleting_an_endpoint_deletes_both_its_components(cloud: Cloud) -> None:
    _deployed(cloud, TO_ZERO)
    cloud.sagemaker.refuse("DeleteInferenceComponent", "ValidationException", "in state X")
    run_id = _trained(cloud, TO_ZERO, step=40)
    cloud.sagemaker.endpoint("demo", "Updating")
    cloud.serve("demo")
    cloud.wait(run_id)
    assert len(cloud.sagemaker.components) == 2
    _, document = cloud.api("DELETE", "/v1/endpoints/demo")
    assert len([what for what in document["deleted"] if "inference component" in what]) == 2
    _nothing_is_left(cloud)


def test_an_endpoint_scales_by_its_invocations(cloud: Cloud) -> None:
    scaling = {"min_instances": 1, "max_instances": 4, "target_invocations_per_minute": 60}
    _deployed(cloud, {**DEPLOY, "autoscaling": scaling})
    resource = "endpoint/demo/variant/primary"
    target = cloud.sagemaker.targets[resource]
    assert target["ScalableDimension"] == "sagemaker:variant:DesiredInstanceCount"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    [request] = cloud.sagemaker.policies.values()
    policy = request["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 60
    assert policy["PredefinedMetricSpecification"] == {
        "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
    }
    assert cloud.api("DELETE", "/v1/endpoints/demo")[0] == 202
    assert not cloud.sagemaker.targets


def test_deleting_says_what_was_deleted_and_what_remains(cloud: Cloud) -> None:
    _deployed(cloud, DEPLOY)
    assert len(_alarms("demo")) == 1
    with cloud.sagemaker.lock:
        cloud.sagemaker.endpoints["demo"]["EndpointStatus"] = "Updating"
    status, document = cloud.api("DELETE", "/v1/endpoints/demo")
    assert (status, document["deleted"]) == (202, [])
    assert "endpoint demo" in document["remaining"]
    cloud.sagemaker.move_endpoint("demo", "InService", tell=False)
    cloud.reconcile()
    cloud.reconcile()
    _nothing_is_left(cloud)
    assert cloud.api("GET", "/v1/endpoints")[1]["endpoints"] == []


def test_what_an_endpoint_deleted_by_hand_leaves_is_deleted_too(cloud: Cloud) -> None:
    scaling = {"min_instances": 1, "max_instances": 4, "target_invocations_per_minute": 60}
    _deployed(cloud, {**DEPLOY, "autoscaling": scaling})
    with cloud.sagemaker.lock:
        del cloud.sagemaker.endpoints["demo"]
    for _ in range(2):  # "Deleting" and "Deleted"
        observe_endpoint(hub(), "demo")
    cloud.reconcile()
    _nothing_is_left(cloud)


def test_a_deletion_meant_for_an_older_deployment_spares_the_new_one(cloud: Cloud) -> None:
    _deployed(cloud, DEPLOY)
    row = hub().table.get_endpoint("demo")
    assert row is not None
    older = dataclasses.replace(row, config_name="demo-of-an-earlier-run")
    with pytest.raises(ConflictError, match="deployed anew"):
        delete_endpoint(hub(), older)
    assert "demo" in cloud.sagemaker.endpoints


@pytest.mark.parametrize("used", [True, False])
def test_an_idle_endpoint_is_deleted_and_one_in_use_is_not(cloud: Cloud, used: bool) -> None:
    _deployed(cloud, {**DEPLOY, "idle_ttl_hours": 1.0})
    row = hub().table.get_endpoint("demo")
    assert row is not None
    past = dt.datetime.now(dt.UTC) - dt.timedelta(hours=3)
    hub().table.update_endpoint(row, updated_at=past)
    if used:
        hub().telemetry._cloudwatch.put_metric_data(
            Namespace="AWS/SageMaker",
            MetricData=[
                {
                    "MetricName": "Invocations",
                    "Dimensions": [
                        {"Name": "EndpointName", "Value": "demo"},
                        {"Name": "VariantName", "Value": "primary"},
                    ],
                    "Value": 1.0,
                    "Timestamp": dt.datetime.now(dt.UTC) - dt.timedelta(minutes=5),
                }
            ],
        )
    cloud.reconcile()
    assert ("demo" in cloud.sagemaker.endpoints) is used


def test_a_model_can_be_deployed_later_with_other_settings(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    cloud.complete(f"{run_id}-0-a001", stage_layout(run_id))
    cloud.wait(run_id)
    status, document = cloud.api("POST", f"/v1/runs/{run_id}/deploy", {})
    assert status == 422
    assert document["problems"][0]["path"] == "deploy"
    section = {"instance_type": "ml.g5.2xlarge", "endpoint_name": "other"}
    status, document = cloud.api("POST", f"/v1/runs/{run_id}/deploy", {"deploy": section})
    assert (status, document["state"]) == (202, "DEPLOYING")
    cloud.sagemaker.endpoint("other")
    cloud.serve("other")
    folder = cloud.wait(run_id)
    assert (folder.run.state, folder.run.endpoint_name) == (RunState.SUCCEEDED, "other")


def test_chat_passes_the_endpoints_own_answer_and_refuses_to_stream(cloud: Cloud) -> None:
    _deployed(cloud, DEPLOY)
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    status, answer = cloud.api("POST", "/v1/endpoints/demo/chat", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "right, down")
    assert cloud.sagemaker.asked[-1] == body
    asleep = "Inference Component has no capacity to process this request."
    cloud.sagemaker.refuse("InvokeEndpoint", "ValidationError", asleep)
    assert cloud.api("POST", "/v1/endpoints/demo/chat", body)[0] == 503
    status, document = cloud.api("POST", "/v1/endpoints/demo/chat", {**body, "stream": True})
    assert status == 422
    assert "does not stream" in document["detail"]
    assert cloud.api("POST", "/v1/endpoints/none/chat", body)[0] == 404
