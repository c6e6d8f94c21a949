"""What moto does with and without each patch. Run as a program, it prints one JSON object: case ->
both answers.

Patches stay in a process for good, so each answer comes from a process of its own. They are forked
from one that has imported moto already, which makes two dozen of them cheap.
"""

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3
import moto.stepfunctions.parser.models  # noqa: F401  imported here once, for all forks
from moto import mock_aws

from local_aws import moto_patches

ROLE = "arn:aws:iam::123456789012:role/x"
PASS = {"StartAt": "P", "States": {"P": {"Type": "Pass", "End": True}}}
ENDED = ("SUCCEEDED", "FAILED", "ABORTED", "TIMED_OUT")
Case = Callable[[], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under the name of the patch it is about."""
    CASES[function.__name__] = function
    return function


def client(service: str) -> Any:
    """A client of the mocked AWS."""
    return boto3.client(service, region_name="us-east-1")


def create(definition: dict[str, Any], name: str = "m") -> str:
    """Create a state machine and return its ARN."""
    answer = client("stepfunctions").create_state_machine(
        name=name, definition=json.dumps(definition), roleArn=ROLE
    )
    return str(answer["stateMachineArn"])


def start(definition: dict[str, Any]) -> str:
    """Start a machine of this definition and return the execution's ARN."""
    sfn = client("stepfunctions")
    answer = sfn.start_execution(stateMachineArn=create(definition), name="e", input="{}")
    return str(answer["executionArn"])


def result(execution: str, seconds: float = 20.0) -> dict[str, Any]:
    """The execution's description once it has ended, or as it is after `seconds`."""
    sfn = client("stepfunctions")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = sfn.describe_execution(executionArn=execution)
        if found["status"] in ENDED:
            break
        time.sleep(0.05)
    return {k: found[k] for k in ("status", "error", "cause", "output") if k in found}


def start_token_task() -> tuple[str, str]:
    """An execution that waits for a token: its ARN, and the token."""
    sqs = client("sqs")
    url = sqs.create_queue(QueueName="tokens")["QueueUrl"]
    task = {
        "Type": "Task",
        "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
        "Parameters": {"QueueUrl": url, "MessageBody": {"token.$": "$$.Task.Token"}},
        "End": True,
    }
    execution = start({"StartAt": "A", "States": {"A": task}})
    while not (messages := sqs.receive_message(QueueUrl=url).get("Messages")):
        time.sleep(0.05)
    return execution, json.loads(messages[0]["Body"])["token"]


@case
def create_machines_in_executing_backend() -> Any:
    properties = {"DefinitionString": json.dumps(PASS), "RoleArn": ROLE, "StateMachineName": "cfn"}
    machine = {"Type": "AWS::StepFunctions::StateMachine", "Properties": properties}
    template = json.dumps({"Resources": {"M": machine}})
    client("cloudformation").create_stack(StackName="s", TemplateBody=template)
    arn = "arn:aws:states:us-east-1:123456789012:stateMachine:cfn"
    execution = client("stepfunctions").start_execution(stateMachineArn=arn, name="e", input="{}")
    return result(execution["executionArn"])["status"]


@case
def name_unnamed_executions() -> Any:
    sfn, arn = client("stepfunctions"), create(PASS)
    arns = {sfn.start_execution(stateMachineArn=arn)["executionArn"] for _ in range(2)}
    return len(arns)


@case
def keep_failure_cause() -> Any:
    execution, token = start_token_task()
    sfn = client("stepfunctions")
    sfn.send_task_failure(taskToken=token, error="Spot", cause="interrupted")
    found = result(execution)
    return [found.get("error"), found.get("cause")]


@case
def ignore_executions_without_environment() -> Any:
    execution, token = start_token_task()
    [machine] = client("stepfunctions").list_state_machines()["stateMachines"]
    from moto.stepfunctions.parser.models import stepfunctions_parser_backends as backends

    backend = backends["123456789012"]["us-east-1"]
    just_started = SimpleNamespace(name="new", status="RUNNING", exec_worker=None)
    backend.describe_state_machine(machine["stateMachineArn"]).executions.insert(0, just_started)
    client("stepfunctions").send_task_success(taskToken=token, output="{}")
    backend.describe_state_machine(machine["stateMachineArn"]).executions.remove(just_started)
    return result(execution)["status"]


@case
def stop_waiting_executions() -> Any:
    execution, _ = start_token_task()
    client("stepfunctions").stop_execution(executionArn=execution, error="E", cause="C")
    found = result(execution, seconds=3)
    return [found["status"], found.get("error"), found.get("cause")]


@case
def hear_early_answers() -> Any:
    from moto.stepfunctions.parser.asl.eval.callback import callback

    endpoint = callback.CallbackEndpoint("token")
    endpoint.notify(callback.CallbackOutcomeSuccess("token", "{}"))
    return endpoint.setup_heartbeat_endpoint(1).clear_and_wait()


@case
def write_dates_as_text() -> Any:
    client("s3").create_bucket(Bucket="some-bucket")
    states = {
        "List": {
            "Type": "Task",
            "Resource": "arn:aws:states:::aws-sdk:s3:listBuckets",
            "ResultPath": "$.listed",
            "Next": "Start",
        },
        "Start": {
            "Type": "Pass",
            "Parameters": {
                "listed.$": "$.listed.Buckets",
                "at.$": "$$.Execution.StartTime",
            },
            "End": True,
        },
    }
    output = json.loads(result(start({"StartAt": "List", "States": states}))["output"])
    return [output["at"], output["listed"][0]["CreationDate"]]


@case
def spell_sagemaker_errors() -> Any:
    task = {
        "Type": "Task",
        "Resource": "arn:aws:states:::aws-sdk:sagemaker:describeTrainingJob",
        "Parameters": {"TrainingJobName": "nope"},
        "End": True,
    }
    return result(start({"StartAt": "A", "States": {"A": task}}))["error"]


@case
def announce_executions() -> Any:
    seen: list[str] = []
    moto_patches.hooks.execution_changed = [lambda execution: seen.append(execution.status)]
    result(start(PASS))
    deadline = time.monotonic() + 3  # the end is told a moment after it can be read
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


@case
def scale_waits() -> Any:
    moto_patches.hooks.wait_speed = 36_000.0
    failing = {
        "Type": "Task",
        "Resource": "arn:aws:states:::aws-sdk:sagemaker:describeTrainingJob",
        "Parameters": {"TrainingJobName": "nope"},
        "Retry": [{"ErrorEquals": ["States.ALL"], "IntervalSeconds": 3600, "MaxAttempts": 1}],
        "Catch": [{"ErrorEquals": ["States.ALL"], "Next": "W"}],
        "Next": "W",
    }
    wait = {"Type": "Wait", "Seconds": 3600, "End": True}
    return result(start({"StartAt": "A", "States": {"A": failing, "W": wait}}), 4)["status"]


@case
def reuse_clients() -> Any:
    mock.stop()  # real endpoints are what the embedded mode uses
    os.environ["MOTO_PORT"] = "1"
    from moto.stepfunctions.parser.asl.utils.boto_client import boto_client_for

    one, same = boto_client_for("us-east-1", "sqs"), boto_client_for("us-east-1", "sqs")
    boto3.setup_default_session()
    other = boto_client_for("us-east-1", "sqs")
    mock.start()
    return [same is one, other is one]


@case
def parse_definitions_once() -> Any:
    from moto.stepfunctions.parser.asl.parse import asl_parser

    parsed: list[Any] = []
    real = asl_parser.ASLParser
    asl_parser.ASLParser = lambda stream: parsed.append(stream) or real(stream)
    sfn = client("stepfunctions")
    machine = create(PASS)
    for name in ("a", "b"):
        sfn.start_execution(stateMachineArn=machine, name=name, input="{}")
        ended = result(f"{machine.replace(':stateMachine:', ':execution:')}:{name}")
        assert ended["status"] == "SUCCEEDED"
    return len(parsed)


@case
def read_attribute_values_directly() -> Any:
    from moto.core import serialize

    table = {"AttributeName": "k", "KeyType": "HASH"}
    dynamodb = client("dynamodb")
    dynamodb.create_table(
        TableName="t", BillingMode="PAY_PER_REQUEST", KeySchema=[table],
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
    )  # fmt: skip
    item = {"k": {"S": "a"}, "n": {"N": "1"}, "m": {"M": {"l": {"L": [{"BOOL": False}]}}}}
    dynamodb.put_item(TableName="t", Item=item)
    looked: list[str] = []
    real = serialize.get_value
    serialize.get_value = lambda obj, key, default: looked.append(key) or real(obj, key, default)
    same = dynamodb.get_item(TableName="t", Key={"k": {"S": "a"}})["Item"] == item
    return [same, "BOOL" in looked]


@case
def report_object_creation() -> Any:
    told: list[str] = []
    moto_patches.hooks.object_created = [lambda reason, _bucket, _key: told.append(reason)]
    s3 = client("s3")
    s3.create_bucket(Bucket="some-bucket")
    s3.put_object(Bucket="some-bucket", Key="a", Body=b"1")
    s3.put_object_tagging(
        Bucket="some-bucket", Key="a", Tagging={"TagSet": [{"Key": "k", "Value": "v"}]}
    )
    upload = s3.create_multipart_upload(Bucket="some-bucket", Key="b")["UploadId"]
    named = {"Bucket": "some-bucket", "Key": "b", "UploadId": upload}
    etag = s3.upload_part(**named, PartNumber=1, Body=b"2")["ETag"]
    parts = [{"PartNumber": 1, "ETag": etag}]
    s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    s3.copy_object(Bucket="some-bucket", Key="c", CopySource="some-bucket/a")
    return told


@case
def observe_objects() -> Any:
    seen: list[str] = []
    moto_patches.hooks.object_changed = [lambda bucket, key: seen.append(f"{bucket}/{key}")]
    s3 = client("s3")
    s3.create_bucket(Bucket="some-bucket")
    s3.put_object(Bucket="some-bucket", Key="a", Body=b"1")
    s3.delete_objects(Bucket="some-bucket", Delete={"Objects": [{"Key": "a"}]})
    return seen


@case
def filter_logs_by_stream_prefix() -> Any:
    logs = client("logs")
    logs.create_log_group(logGroupName="g")
    now = int(time.time() * 1000)
    for stream, ages in (("a/1", (3, 1)), ("a/2", (2,)), ("b/1", (0,))):
        logs.create_log_stream(logGroupName="g", logStreamName=stream)
        events = [{"timestamp": now - age, "message": f"{stream} {age}"} for age in ages]
        logs.put_log_events(logGroupName="g", logStreamName=stream, logEvents=events)

    def found(prefix: str) -> list[str]:
        answer = logs.filter_log_events(logGroupName="g", logStreamNamePrefix=prefix)
        return [event["message"] for event in answer["events"]]

    return [found("a/"), found("c/")]


mock = mock_aws(config={"stepfunctions": {"execute_state_machine": True}})


def answer(name: str, *, patched: bool, answers: Any) -> None:
    """Run one case in this process and put its answer, or the error it met, into the queue."""
    moto_patches.apply(without=None if patched else name)
    mock.start()
    try:
        value = CASES[name]()
    except Exception as error:  # noqa: BLE001  whatever goes wrong is the answer
        value = f"{type(error).__name__}: {error}"
    answers.put((name, patched, value))


def main() -> None:
    """Answer every case twice."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[key] = "x"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    logging.disable(logging.CRITICAL)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    found: dict[str, dict[str, Any]] = {}
    for name in CASES:
        for patched in (True, False):
            child = context.Process(
                target=answer, args=(name,), kwargs={"patched": patched, "answers": answers}
            )
            child.start()
            _, _, value = answers.get(timeout=60)
            child.join(timeout=1)
            child.kill()  # interpreter threads of unfinished executions keep it alive
            found.setdefault(name, {})["with" if patched else "without"] = value
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
