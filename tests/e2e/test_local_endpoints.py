"""Endpoints of the embedded SageMaker: from a model in S3 to answers, blue/green, streaming,
failures.
"""

import datetime
import json
import sys

import pytest

from contracts.events import EndpointEvent, parse_event
from local_aws.sagemaker.capacity import Shortage
from local_aws.server import LocalCloud
from local_aws.synth import REPOSITORY
from tests.e2e.small_cloud import image, streamed_text, until, write_assembly
from tests.inference.tiny_model import write_model

ROLE = "arn:aws:iam::123456789012:role/hosting"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The small cloud with one exported model in its bucket."""
    folder = tmp_path_factory.mktemp("endpoints")
    with LocalCloud(write_assembly(folder / "cdk.out"), folder / "state", speed=60) as running:
        for key in ("model/config.json", "model/model.safetensors"):
            running.client("s3").put_object(
                Bucket=running.outputs["BucketName"], Key=key, Body=b"{}"
            )
        yield running


def make_config(cloud, name, *, prefix="model/", server=None, **environment):
    """A model and an endpoint configuration of one name."""
    client = cloud.client("sagemaker")
    uri = f"s3://{cloud.outputs['BucketName']}/{prefix}"
    source = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {
        "Image": server or image("server"),
        "ModelDataSource": {"S3DataSource": source},
        "Environment": environment,
    }
    client.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer=container)
    variant = {
        "VariantName": "primary",
        "ModelName": name,
        "InstanceType": "ml.g5.xlarge",
        "InitialInstanceCount": 1,
        "ContainerStartupHealthCheckTimeoutInSeconds": 120,
    }
    client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])


def deploy(cloud, name, **settings):
    """Create an endpoint with a configuration of its own and wait until that is settled."""
    make_config(cloud, name, **settings)
    cloud.client("sagemaker").create_endpoint(EndpointName=name, EndpointConfigName=name)
    return settled(cloud, name)


def settled(cloud, name):
    """DescribeEndpoint once nothing is under way."""
    client = cloud.client("sagemaker")
    done = ("InService", "Failed", "OutOfService")
    return until(
        lambda: (d := client.describe_endpoint(EndpointName=name))["EndpointStatus"] in done and d
    )


def ask(cloud, name, body=b"hello"):
    """InvokeEndpoint; the answer as the container gave it."""
    answer = cloud.client("sagemaker-runtime").invoke_endpoint(
        EndpointName=name, ContentType="application/json", Body=body
    )
    assert answer["ContentType"] == "application/json"
    return json.loads(answer["Body"].read())


def statuses(cloud, name):
    """EndpointStatus of each event an endpoint sent, as events spell it."""
    kind = "SageMaker Endpoint State Change"
    sent = [event for event in cloud.bus.recent if event["detail-type"] == kind]
    mine = [event for event in sent if event["detail"]["EndpointName"] == name]
    assert all(isinstance(parse_event(event), EndpointEvent) for event in mine)
    return [event["detail"]["EndpointStatus"] for event in mine]


def test_an_endpoint_serves_the_model_it_was_given(cloud):
    description = deploy(cloud, "serves", VERSION="1")
    assert description["EndpointStatus"] == "InService"
    assert description["ProductionVariants"][0]["VariantName"] == "primary"
    assert ask(cloud, "serves") == {
        "files": ["config.json", "model.safetensors"],
        "version": "1",
        "argv": ["serve"],
        "echo": "hello",
    }
    assert statuses(cloud, "serves") == ["CREATING", "IN_SERVICE"]


def test_invocations_are_counted_where_idle_endpoints_are_looked_for(cloud):
    deploy(cloud, "counted")
    ask(cloud, "counted")
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)

    def invocations():
        answer = cloud.client("cloudwatch").get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName="Invocations",
            Dimensions=[
                {"Name": "EndpointName", "Value": "counted"},
                {"Name": "VariantName", "Value": "primary"},
            ],
            StartTime=now - hour,
            EndTime=now + hour,
            Period=86400,
            Statistics=["Sum"],
        )
        return [point["Sum"] for point in answer["Datapoints"]]

    assert until(invocations) == [1.0]


def test_a_streamed_answer_arrives_part_by_part(cloud):
    deploy(cloud, "streams")
    answer = cloud.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName="streams", ContentType="application/json", Body=b"stream"
    )
    assert answer["ContentType"] == "text/event-stream"
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    assert len(parts) > 1
    assert b"".join(parts) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_the_real_container_answers_whole_and_in_a_stream(cloud, tmp_path):
    """The hub's own inference container with a real model, and no more between than SageMaker."""
    model = write_model(tmp_path / "model")
    for file in model.iterdir():
        key = f"real/{file.name}"
        cloud.client("s3").upload_file(str(file), cloud.outputs["BucketName"], key)
    command = [sys.executable, "-m", "inference_container"]
    cloud.sagemaker.engine.images.add("real", command, REPOSITORY)
    server = f"{image('server').rpartition(':')[0]}:real"
    description = deploy(cloud, "real", prefix="real/", server=server, GRPOHUB_DEPLOY="{}")
    assert description["EndpointStatus"] == "InService", description
    question = [{"role": "user", "content": "How to move from (0,0) to (4,4)?"}]
    fields = {"messages": question, "temperature": 0.0, "max_tokens": 12}
    whole = ask(cloud, "real", json.dumps(fields))["choices"][0]["message"]["content"]
    assert whole
    answer = cloud.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName="real",
        ContentType="application/json",
        Body=json.dumps({**fields, "stream": True}),
    )
    assert streamed_text(answer) == whole
    client = cloud.client("sagemaker-runtime")
    with pytest.raises(client.exceptions.ModelError) as caught:
        client.invoke_endpoint_with_response_stream(
            EndpointName="real", ContentType="application/json", Body='{"stream": true}'
        )
    assert caught.value.response["OriginalStatusCode"] == 400
    assert "neither `messages` nor `prompt`" in caught.value.response["OriginalMessage"]


def test_an_error_of_the_container_is_a_model_error_with_its_status_and_words(cloud):
    deploy(cloud, "errs")
    client = cloud.client("sagemaker-runtime")
    with pytest.raises(client.exceptions.ModelError) as caught:
        client.invoke_endpoint(EndpointName="errs", Body=b"bad")
    assert caught.value.response["OriginalStatusCode"] == 400
    assert "bad body" in caught.value.response["OriginalMessage"]


def test_an_unknown_endpoint_cannot_be_invoked(cloud):
    client = cloud.client("sagemaker-runtime")
    with pytest.raises(client.exceptions.ClientError, match=r"ValidationError.*not found"):
        client.invoke_endpoint(EndpointName="nobody", Body=b"x")


def test_an_update_moves_traffic_to_the_new_container(cloud):
    deploy(cloud, "updated", VERSION="1")
    make_config(cloud, "updated-2", VERSION="2")
    client = cloud.client("sagemaker")
    client.update_endpoint(EndpointName="updated", EndpointConfigName="updated-2")
    with pytest.raises(client.exceptions.ClientError, match="in-progress endpoint"):
        client.update_endpoint(EndpointName="updated", EndpointConfigName="updated-2")
    description = settled(cloud, "updated")
    assert description["EndpointConfigName"] == "updated-2"
    assert ask(cloud, "updated")["version"] == "2"
    assert statuses(cloud, "updated") == ["CREATING", "IN_SERVICE", "UPDATING", "IN_SERVICE"]


def test_an_update_that_never_gets_healthy_rolls_back_and_says_why(cloud):
    deploy(cloud, "rolled", VERSION="1")
    make_config(cloud, "rolled-2", FAULT="exit")
    client = cloud.client("sagemaker")
    client.update_endpoint(EndpointName="rolled", EndpointConfigName="rolled-2")
    description = settled(cloud, "rolled")
    assert description["EndpointStatus"] == "InService"
    assert description["EndpointConfigName"] == "rolled"
    assert "ping health check" in description["FailureReason"]
    assert ask(cloud, "rolled")["version"] == "1"


def test_a_container_that_exits_fails_the_endpoint_and_its_words_are_logged(cloud):
    description = deploy(cloud, "exits", FAULT="exit")
    assert description["EndpointStatus"] == "Failed"
    assert "ping health check" in description["FailureReason"]
    group = "/aws/sagemaker/Endpoints/exits"
    logs = cloud.client("logs")
    events = until(lambda: logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"])
    assert events
    messages = until(lambda: logs.filter_log_events(logGroupName=group)["events"])
    assert messages[0]["message"] == "no such weights"
    assert statuses(cloud, "exits") == ["CREATING", "FAILED"]


def test_missing_model_data_fails_the_endpoint(cloud):
    description = deploy(cloud, "no-data", prefix="nothing/")
    assert description["EndpointStatus"] == "Failed"
    assert description["FailureReason"].startswith("Could not find model data at s3://")


def test_an_endpoint_without_instances_fails_with_the_capacity_words(cloud):
    """aws/deep-learning-containers#6411"""
    cloud.sagemaker.engine.capacity.fail("ml.g5.xlarge", Shortage.CAPACITY, count=1)
    description = deploy(cloud, "no-instances")
    assert description["EndpointStatus"] == "Failed"
    assert description["FailureReason"].startswith("InsufficientInstanceCapacity")


def test_an_endpoint_cannot_be_deleted_while_it_is_created_and_is_gone_afterwards(cloud):
    """aws/amazon-sagemaker-examples#3432"""
    client = cloud.client("sagemaker")
    make_config(cloud, "deleted", FAULT="unhealthy")
    client.create_endpoint(EndpointName="deleted", EndpointConfigName="deleted")
    with pytest.raises(client.exceptions.ClientError, match="in-progress endpoint"):
        client.delete_endpoint(EndpointName="deleted")
    make_config(cloud, "deleted-2")
    client.create_endpoint(EndpointName="deleted-2", EndpointConfigName="deleted-2")
    settled(cloud, "deleted-2")
    client.delete_endpoint(EndpointName="deleted-2")
    until(lambda: "deleted-2" not in cloud.sagemaker.endpoints)
    with pytest.raises(client.exceptions.ClientError, match='Could not find endpoint "arn:aws'):
        client.describe_endpoint(EndpointName="deleted-2")


def test_names_are_used_once_and_missing_parts_are_named(cloud):
    client = cloud.client("sagemaker")
    make_config(cloud, "once")
    with pytest.raises(client.exceptions.ClientError, match="already existing model"):
        make_config(cloud, "once")
    variant = {"VariantName": "A", "ModelName": "none", "InstanceType": "ml.g5.xlarge"}
    variant["InitialInstanceCount"] = 1
    with pytest.raises(client.exceptions.ClientError, match='Could not find model "arn:aws'):
        client.create_endpoint_config(EndpointConfigName="x", ProductionVariants=[variant])
    with pytest.raises(
        client.exceptions.ClientError, match="Could not find endpoint configuration"
    ):
        client.create_endpoint(EndpointName="x", EndpointConfigName="none")
    client.delete_endpoint_config(EndpointConfigName="once")
    client.delete_model(ModelName="once")
    with pytest.raises(client.exceptions.ClientError, match="Could not find model"):
        client.describe_model(ModelName="once")
