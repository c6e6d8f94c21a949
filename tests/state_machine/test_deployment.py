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
from tests.state_machine.specs import DEPLOY, run_spec


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
    assert not cloud.sagemaker.targets
    assert _alarms("demo") == []
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


def test_a_ladder_without_any_capacity_fails_the_endpoint(cloud: Cloud) -> None:
    cloud.sagemaker.refuse("CreateEndpoint", "ResourceLimitExceeded", "account-level service limit")
    run_id = _trained(cloud, DEPLOY)
    folder = cloud.wait(run_id)
    assert folder.run.state is RunState.ENDPOINT_FAILED
    assert folder.run.error == "NoCapacityError"
    assert "account-level service limit" in (folder.run.cause or "")


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
    scaling = {"min_instances": 0, "max_instances": 3}
    _deployed(cloud, {**DEPLOY, "autoscaling": scaling})
    [component] = cloud.sagemaker.components
    [config] = cloud.sagemaker.configs.values()
    variant = config["ProductionVariants"][0]
    assert variant["ManagedInstanceScaling"]["MinInstanceCount"] == 0
    assert "ModelName" not in variant
    [target] = cloud.sagemaker.targets.values()
    assert target["ResourceId"] == f"inference-component/{component}"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (0, 3)
    status, document = cloud.api("DELETE", "/v1/endpoints/demo")
    assert (status, document["remaining"]) == (202, [])
    assert not cloud.sagemaker.components
    assert not cloud.sagemaker.targets


def test_an_endpoint_scales_by_its_invocations(cloud: Cloud) -> None:
    scaling = {"min_instances": 1, "max_instances": 4, "target_invocations_per_minute": 60}
    _deployed(cloud, {**DEPLOY, "autoscaling": scaling})
    resource = "endpoint/demo/variant/primary"
    target = cloud.sagemaker.targets[resource]
    assert target["ScalableDimension"] == "sagemaker:variant:DesiredInstanceCount"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    policy = cloud.sagemaker.policies[resource]["TargetTrackingScalingPolicyConfiguration"]
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
    status, document = cloud.api("POST", "/v1/endpoints/demo/chat", {**body, "stream": True})
    assert status == 422
    assert "does not stream" in document["detail"]
    assert cloud.api("POST", "/v1/endpoints/none/chat", body)[0] == 404
