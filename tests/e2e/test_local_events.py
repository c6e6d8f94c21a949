"""EventBridge, S3 and Step Functions of the embedded cloud: who hears of what, and what goes wrong
on demand.
"""

import json

import pytest

from contracts.events import ExecutionEvent, ObjectCreatedEvent, parse_event
from local_aws.events import rate_seconds
from local_aws.server import LocalCloud
from tests.e2e.small_cloud import until, write_assembly


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The small cloud; its five-minute schedule ticks every five seconds."""
    folder = tmp_path_factory.mktemp("events")
    with LocalCloud(write_assembly(folder / "cdk.out"), folder / "state", speed=60) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_faults(cloud):
    yield
    cloud.bus.faults.drop = cloud.bus.faults.duplicate = cloud.bus.faults.reorder = False


def recorded(cloud, detail_type, needle=""):
    """Events that the function behind the rules was given, oldest first."""
    answer = cloud.client("dynamodb").query(
        TableName=cloud.resources["Table"],
        KeyConditionExpression="pk = :pk",
        ExpressionAttributeValues={":pk": {"S": "event"}},
        ConsistentRead=True,
    )
    events = [json.loads(item["event"]["S"]) for item in answer["Items"]]
    found = [event for event in events if event["detail-type"] == detail_type]
    return [event for event in found if needle in json.dumps(event["detail"])]


def put(cloud, key, body=b"x"):
    """Write an object."""
    cloud.client("s3").put_object(Bucket=cloud.outputs["BucketName"], Key=key, Body=body)


def test_an_object_is_announced_with_its_real_key_version_and_an_id_of_its_own(cloud):
    put(cloud, "uploads/a b+c.txt", b"12345")
    put(cloud, "uploads/a b+c.txt", b"12345")  # another version of the same content
    events = until(lambda: (e := recorded(cloud, "Object Created", "a b+c"))[1:] and e)
    parsed = [parse_event(event) for event in events]
    assert all(isinstance(event, ObjectCreatedEvent) for event in parsed)
    assert {event.detail.object.key for event in parsed} == {"uploads/a b+c.txt"}
    assert [event.detail.object.size for event in parsed] == [5, 5]
    assert len({event.id for event in parsed}) == 2
    assert len({event.detail.identity for event in parsed}) == 2
    assert {event.detail.reason for event in parsed} == {"PutObject"}


def test_a_multipart_upload_and_a_copy_are_announced_once_each(cloud):
    s3, bucket = cloud.client("s3"), cloud.outputs["BucketName"]
    named = {"Bucket": bucket, "Key": "big.bin"}
    upload = s3.create_multipart_upload(**named)["UploadId"]
    parts = []
    for number in (1, 2):
        body = bytes(5 * 1024 * 1024)
        part = s3.upload_part(**named, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    s3.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": parts})
    s3.copy_object(Bucket=bucket, Key="copy.bin", CopySource=f"{bucket}/big.bin")
    until(lambda: recorded(cloud, "Object Created", "copy.bin"))
    [big] = recorded(cloud, "Object Created", "big.bin")
    assert big["detail"]["reason"] == "CompleteMultipartUpload"
    assert big["detail"]["object"]["size"] == 10 * 1024 * 1024
    [copy] = recorded(cloud, "Object Created", "copy.bin")
    assert copy["detail"]["reason"] == "CopyObject"


def test_an_execution_runs_its_definition_from_a_file_and_announces_itself(cloud):
    sfn, table = cloud.client("stepfunctions"), cloud.resources["Table"]
    arn = sfn.start_execution(
        stateMachineArn=cloud.outputs["MachineArn"], name="run-1", input="{}"
    )["executionArn"]
    key = {"pk": {"S": "token"}, "sk": {"S": "run-1"}}
    dynamodb = cloud.client("dynamodb")
    item = until(lambda: dynamodb.get_item(TableName=table, Key=key).get("Item"))
    sfn.send_task_success(taskToken=item["event"]["S"], output='{"ok": true}')
    until(lambda: sfn.describe_execution(executionArn=arn)["status"] == "SUCCEEDED")
    kind = "Step Functions Execution Status Change"
    until(lambda: len(recorded(cloud, kind, "run-1")) == 2)
    parsed = [parse_event(event) for event in recorded(cloud, kind, "run-1")]
    assert all(isinstance(event, ExecutionEvent) for event in parsed)
    assert {event.detail.status for event in parsed} == {"RUNNING", "SUCCEEDED"}
    assert {event.detail.execution_arn for event in parsed} == {arn}


def test_an_aborted_execution_is_announced_with_its_reason(cloud):
    sfn = cloud.client("stepfunctions")
    arn = sfn.start_execution(
        stateMachineArn=cloud.outputs["MachineArn"], name="run-2", input="{}"
    )["executionArn"]
    sfn.stop_execution(executionArn=arn, error="Cancelled", cause="by a test")
    kind = "Step Functions Execution Status Change"
    [event] = until(lambda: recorded(cloud, kind, "by a test"))
    assert event["detail"]["status"] == "ABORTED"
    assert event["detail"]["error"] == "Cancelled"


def test_a_schedule_fires_again_and_again(cloud):
    until(lambda: len(recorded(cloud, "Scheduled Event")) >= 2)


def test_events_put_by_a_program_reach_matching_rules_only(cloud):
    def send(source, number):
        entry = {"Source": source, "DetailType": "Told", "Detail": json.dumps({"n": number})}
        answer = cloud.client("events").put_events(Entries=[entry])
        assert answer["FailedEntryCount"] == 0

    send("somebody.else", "unheard")
    send("aws.sagemaker", "heard")
    until(lambda: recorded(cloud, "Told", "heard"))
    assert not recorded(cloud, "Told", "unheard")


def test_dropped_events_are_counted_and_reach_nobody(cloud):
    before = cloud.bus.faults.dropped
    cloud.bus.faults.drop = True
    put(cloud, "dropped.txt")
    cloud.bus.faults.drop = False
    put(cloud, "after-the-drop.txt")
    until(lambda: recorded(cloud, "Object Created", "after-the-drop.txt"))
    assert not recorded(cloud, "Object Created", "dropped.txt")
    assert cloud.bus.faults.dropped == before + 1


def test_duplicated_events_come_twice_with_one_id(cloud):
    cloud.bus.faults.duplicate = True
    put(cloud, "twice.txt")
    cloud.bus.faults.duplicate = False
    until(lambda: len(recorded(cloud, "Object Created", "twice.txt")) == 2)
    assert len({event["id"] for event in recorded(cloud, "Object Created", "twice.txt")}) == 1


def test_reordered_events_all_arrive_in_another_order(cloud):
    cloud.bus.faults.reorder = True
    sent = [f"reordered-{number}.txt" for number in range(6)]
    for key in sent:
        put(cloud, key)
    until(lambda: len(recorded(cloud, "Object Created", "reordered-")) == len(sent))
    events = recorded(cloud, "Object Created", "reordered-")
    assert [event["detail"]["object"]["key"] for event in events] != sent


@pytest.mark.parametrize(
    ("expression", "seconds"),
    [("rate(5 minutes)", 300), ("rate(1 hour)", 3600), ("cron(0 12 * * ? *)", None)],
)
def test_rates_are_read_and_crons_are_refused(expression, seconds):
    assert rate_seconds(expression) == seconds
