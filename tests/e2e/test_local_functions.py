"""Lambda, the HTTP API and the deployer of the embedded cloud, through boto3 and HTTP as a user
would.
"""

import base64
import json
import urllib.error
import urllib.request

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from local_aws.server import LocalCloud
from tests.e2e.small_cloud import until, write_assembly


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The small cloud, everything sixty times faster."""
    folder = tmp_path_factory.mktemp("functions")
    with LocalCloud(write_assembly(folder / "cdk.out"), folder / "state", speed=60) as running:
        yield running


def invoke(cloud, function, payload=b"{}"):
    """Invoke by logical id; the answer and AWS's mark of a failed function."""
    name = cloud.resources[function]
    answer = cloud.client("lambda").invoke(FunctionName=name, Payload=payload)
    return json.loads(answer["Payload"].read()), answer.get("FunctionError")


def call(url, *, method="GET", body=None, headers=None, sign=True):
    """One HTTP request, signed for API Gateway; the response even when it is an error."""
    request = AWSRequest(method, url, data=body, headers=headers or {})
    if sign:
        SigV4Auth(Credentials("alice", "secret"), "execute-api", "us-east-1").add_auth(request)
    prepared = urllib.request.Request(url, body, dict(request.headers.items()), method=method)
    try:
        return urllib.request.urlopen(prepared)
    except urllib.error.HTTPError as error:
        return error


def test_a_worker_serves_again_and_a_timed_out_one_is_replaced(cloud):
    first, _ = invoke(cloud, "Slow")
    assert invoke(cloud, "Slow") == (first, None)
    late, mark = invoke(cloud, "Slow", b'{"seconds": 30}')
    assert mark == "Unhandled"
    assert late["errorType"] == "Sandbox.Timedout"
    assert late["errorMessage"].endswith("Task timed out after 2.00 seconds")
    second, _ = invoke(cloud, "Slow")
    assert second != first


def test_a_handler_that_raises_answers_as_lambda_does(cloud):
    error, mark = invoke(cloud, "Boom", b'{"n": 7}')
    assert mark == "Unhandled"
    assert error["errorType"] == "RuntimeError"
    assert error["errorMessage"] == "boom 7"


def test_a_function_that_cannot_start_says_why(cloud):
    error, mark = invoke(cloud, "Broken")
    assert mark == "Unhandled"
    assert error["errorType"] == "Runtime.HandlerNotFound"
    assert "no_such_handler" in error["errorMessage"]


def test_an_unknown_function_is_not_found(cloud):
    client = cloud.client("lambda")
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.invoke(FunctionName="nope", Payload=b"{}")


def test_an_asynchronous_invocation_is_tried_three_times_and_then_buried(cloud):
    name = cloud.resources["Boom"]
    payload = b'{"n": "buried"}'
    cloud.client("lambda").invoke(FunctionName=name, Payload=payload, InvocationType="Event")
    queue = cloud.resources["DeadLetters"]
    sqs = cloud.client("sqs")
    asked = {"QueueUrl": queue, "MessageAttributeNames": ["All"]}
    [letter] = until(lambda: sqs.receive_message(**asked).get("Messages"))
    assert json.loads(letter["Body"]) == {"n": "buried"}
    assert letter["MessageAttributes"]["ErrorMessage"]["StringValue"] == "boom buried"


def test_output_of_functions_is_in_cloudwatch_logs(cloud):
    invoke(cloud, "Boom", b'{"n": "logged"}')
    logs = cloud.client("logs")
    group = f"/aws/lambda/{cloud.resources['Boom']}"

    def found():
        streams = logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"]
        events = logs.filter_log_events(logGroupName=group)["events"] if streams else []
        return any("boom logged" in event["message"] for event in events)

    until(found)


def test_the_api_hands_on_path_query_headers_body_and_caller(cloud):
    url = f"{cloud.api_url}/v1/runs/a%20b?tag=x&tag=y&page=2"
    headers = {"Content-Type": "application/json", "Cookie": "a=1; b=2", "X-Thing": "t"}
    answer = call(url, method="POST", body=b'{"k": "\xc3\xa9"}', headers=headers)
    event = json.load(answer)
    assert answer.headers["Content-Type"] == "application/json"
    assert event["version"] == "2.0"
    assert event["routeKey"] == "ANY /v1/{proxy+}"
    assert event["rawPath"] == "/v1/runs/a b"
    assert event["rawQueryString"] == "tag=x&tag=y&page=2"
    assert event["queryStringParameters"] == {"tag": "x,y", "page": "2"}
    assert event["pathParameters"] == {"proxy": "runs/a b"}
    assert event["cookies"] == ["a=1", "b=2"]
    assert "cookie" not in event["headers"]
    assert event["headers"]["x-thing"] == "t"
    assert event["body"] == '{"k": "é"}'
    assert event["isBase64Encoded"] is False
    assert event["requestContext"]["http"]["method"] == "POST"
    assert event["requestContext"]["authorizer"]["iam"]["accessKey"] == "alice"
    assert event["requestContext"]["authorizer"]["iam"]["userArn"].endswith(":user/alice")


def test_binary_bodies_travel_as_base64_both_ways(cloud):
    headers = {"Content-Type": "application/octet-stream"}
    sent = b"\xff\xfe\x00"
    event = json.load(call(f"{cloud.api_url}/v1/x", method="PUT", body=sent, headers=headers))
    assert event["isBase64Encoded"] is True
    assert base64.b64decode(event["body"]) == sent
    pot = call(f"{cloud.api_url}/v1/teapot")
    assert pot.status == 418
    assert pot.read() == b"\x00\x01\x02"
    assert pot.headers["X-Kind"] == "pot"
    assert pot.headers.get_all("Set-Cookie") == ["a=1", "b=2"]


def test_a_route_with_iam_refuses_an_unsigned_request_and_an_open_one_does_not(cloud):
    refused = call(f"{cloud.api_url}/v1/runs", sign=False)
    assert refused.status == 403
    assert json.load(refused) == {"message": "Forbidden"}
    served = json.load(call(f"{cloud.api_url}/items/7", sign=False))
    assert served["pathParameters"] == {"item_id": "7"}
    assert "authorizer" not in served["requestContext"]


def test_an_unknown_route_is_not_found(cloud):
    assert call(f"{cloud.api_url}/items").status == 404
    assert call(f"{cloud.api_url}/items/1", method="DELETE").status == 404


def test_a_web_page_of_another_origin_is_refused(cloud):
    headers = {"Origin": "https://evil.example"}
    assert call(f"{cloud.url}/_local/status", headers=headers, sign=False).status == 403
    assert call(f"{cloud.url}/_local/status", sign=False).status == 200


def test_deployment_says_what_it_left_out_and_resolves_the_rest(cloud):
    assert cloud.deployment.skipped == {"AWS::S3::BucketPolicy": 1, "AWS::CloudWatch::Alarm": 1}
    assert cloud.outputs["ApiUrl"] == cloud.api_url
    assert cloud.outputs["BucketName"] == cloud.resources["Bucket"]


def test_dynamodb_conditions_hold_under_concurrency(cloud):
    client = cloud.client("dynamodb")
    item = {"pk": {"S": "race"}, "sk": {"S": "1"}}

    def put(_):
        try:
            client.put_item(
                TableName=cloud.resources["Table"],
                Item=item,
                ConditionExpression="attribute_not_exists(pk)",
            )
        except client.exceptions.ConditionalCheckFailedException:
            return 0
        return 1

    assert sum(cloud.site.pool.map(put, range(40))) == 1


def test_conditional_writes_of_objects_hold_under_concurrency(cloud):
    client, bucket = cloud.client("s3"), cloud.outputs["BucketName"]

    def put(number):
        body = str(number).encode()
        try:
            client.put_object(Bucket=bucket, Key="race", Body=body, IfNoneMatch="*")
        except client.exceptions.ClientError as error:
            return error.response["Error"]["Code"]
        return "written"

    answers = list(cloud.site.pool.map(put, range(40)))
    assert answers.count("written") == 1
    assert answers.count("PreconditionFailed") == 39
