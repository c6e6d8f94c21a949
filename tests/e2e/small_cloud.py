"""A small cloud assembly, written by hand as the CDK would write it: every resource kind the
deployer serves.

Synthesising the real stack takes ten seconds and more; these tests are about the embedded cloud, so
they bring a template of one screen, handlers of a few lines, and containers that do exactly what a
test needs.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANDLERS = '''
import json, os, time, boto3

def record(event, context):
    """Keep every event, one item each."""
    table = boto3.resource("dynamodb").Table(os.environ["TABLE"])
    table.put_item(Item={"pk": "event", "sk": f"{time.time_ns()}", "event": json.dumps(event)})

def api(event, context):
    """Show the caller what the function was given."""
    if event["rawPath"] == "/v1/teapot":
        return {"statusCode": 418, "headers": {"X-Kind": "pot"}, "cookies": ["a=1", "b=2"],
                "body": "AAEC", "isBase64Encoded": True}
    return {"statusCode": 200, "headers": {"Content-Type": "application/json"},
            "body": json.dumps(event)}

def boom(event, context):
    raise RuntimeError(f"boom {event.get('n')}")

def slow(event, context):
    time.sleep(event.get("seconds", 0))
    return os.getpid()

def keep_token(event, context):
    """What a .waitForTaskToken task calls."""
    table = boto3.resource("dynamodb").Table(os.environ["TABLE"])
    table.put_item(Item={"pk": "token", "sk": event["run_id"], "event": event["token"]})
'''

TRAIN = '''
"""A training container: what it does is in its hyperparameters."""
import json, os, signal, socket, subprocess, sys, time, urllib.request
base = os.environ["SAGEMAKER_BASE_DIR"]
config = lambda name: json.load(open(f"{base}/input/config/{name}.json"))
hp, resources = config("hyperparameters"), config("resourceconfig")
rank = resources["hosts"].index(resources["current_host"])

def on_term(*_):
    print("SIGTERM")
    with open(f"{base}/model/saved-on-term", "w") as f:
        f.write("1")
    if hp.get("ignore_term") != "1":
        sys.exit(int(hp.get("term_code", "0")))

signal.signal(signal.SIGTERM, on_term)

print("argv", *sys.argv[1:], "rank", rank, "job", os.environ["TRAINING_JOB_NAME"])
print("addresses", *[socket.gethostbyname(h) for h in resources["hosts"]])
token = urllib.request.Request(os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
                               + "latest/api/token", method="PUT")
urllib.request.urlopen(token).read()
print("instance", urllib.request.urlopen(os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
                                         + "latest/meta-data/instance-id").read().decode())
for name in sorted(os.listdir(f"{base}/input/data")):
    folder = f"{base}/input/data/{name}"
    found = sorted(os.path.relpath(os.path.join(d, f), folder)
                   for d, _, fs in os.walk(folder) for f in fs)
    print("channel", name, *found)
started = f"{base}/checkpoints/incarnations"
with open(started, "a") as f:
    f.write("x")
print("incarnation", os.path.getsize(started))
if "loss" in hp:
    print("loading: 0%\\rloading: 100%")
    print(f"loss={hp['loss']};")
if hp.get("daemon"):  # leaves the session, as `ray start` does
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                     start_new_session=True)
if hp.get("fail_rank") == str(rank):
    while not os.path.exists(f"{base}/../algo-1/checkpoints/incarnations"):
        time.sleep(0.05)  # from then on the first host hears SIGTERM
    with open(f"{base}/output/failure", "w") as f:
        f.write(hp.get("failure", ""))
    sys.exit(int(hp.get("code", "1")))
deadline = time.time() + float(hp.get("seconds", "0"))
while time.time() < deadline:
    time.sleep(0.05)
with open(f"{base}/model/weights.bin", "w") as f:
    f.write("w" * 1000)
'''

SERVE = '''
"""An inference container: the hosting contract, and faults by environment."""
import http.server, json, os, sys, time
base, fault = os.environ["SAGEMAKER_BASE_DIR"], os.environ.get("FAULT", "")
if fault == "exit":
    sys.exit("no such weights")
files = sorted(os.listdir(f"{base}/model"))

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(503 if fault == "unhealthy" else 200, b"")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if body == b"bad":
            return self.answer(400, b'{"error": "bad body"}')
        if body == b"stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for n in range(3):
                self.wfile.write(f"data: {n}\\n\\n".encode())
                self.wfile.flush()
                time.sleep(0.05)
            return
        self.answer(200, json.dumps({"files": files, "version": os.environ.get("VERSION"),
                                     "argv": sys.argv[1:], "echo": body.decode()}).encode())

port = int(os.environ["SAGEMAKER_BIND_TO_PORT"])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''

MACHINE = {
    "StartAt": "Ask",
    "States": {
        "Ask": {
            "Type": "Task",
            "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
            "Parameters": {
                "FunctionName": "${KeepTokenArn}",
                "Payload": {"token.$": "$$.Task.Token", "run_id.$": "$$.Execution.Name"},
            },
            "Next": "Pause",
        },
        "Pause": {"Type": "Wait", "Seconds": 20, "End": True},
    },
}
IMAGES = {"trainer": "t" * 16, "server": "s" * 16}


def image(name: str) -> str:
    """The address of one of the assembly's images."""
    return f"123456789012.dkr.ecr.us-east-1.amazonaws.com/assets:{IMAGES[name]}"


def write_assembly(folder: Path) -> Path:
    """Write the assembly into a folder and return it."""
    _write(folder / "asset.code" / "handlers.py", HANDLERS)
    _write(
        folder / "asset.code" / "foreign" / "__init__.py", "raise ImportError('built for arm64')"
    )
    _write(folder / "asset.code" / "foreign-1.dist-info" / "RECORD", "foreign/__init__.py,,\n")
    _write(folder / "asset.layer" / "python" / "shared_library.py", "VALUE = 1")
    _write(folder / "asset.machine.json", json.dumps(MACHINE))
    for name, source in (("trainer", TRAIN), ("server", SERVE)):
        root = folder / f"asset.{name}"
        _write(root / name / "__main__.py", source)
        _write(root / name / "Dockerfile", f'FROM x\nENTRYPOINT ["python3", "-m", "{name}"]\n')
    properties = {"templateFile": "Small.template.json"}
    artefact = {"type": "aws:cloudformation:stack", "properties": properties}
    _write(folder / "manifest.json", json.dumps({"artifacts": {"Small": artefact}}))
    _write(folder / "Small.assets.json", json.dumps(_assets()))
    _write(folder / "Small.template.json", json.dumps(_template()))
    return folder


def streamed_text(answer: dict[str, Any]) -> str:
    """The text of a chat that InvokeEndpointWithResponseStream answers, seen to come in parts."""
    assert answer["ContentType"].startswith("text/event-stream")
    parts = [event["PayloadPart"]["Bytes"].decode() for event in answer["Body"]]
    assert len(parts) > 1, "all at once is no stream"
    *events, done = [line[6:] for line in "".join(parts).split("\n\n") if line]
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait for a condition and return its value.

    Raises:
        AssertionError: it never held.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"never held within {seconds} s")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _assets() -> dict[str, Any]:
    def file(path: str, packaging: str, key: str) -> dict[str, Any]:
        destination = {"bucketName": "assets", "objectKey": key}
        return {
            "source": {"path": path, "packaging": packaging},
            "destinations": {"here": destination},
        }

    return {
        "files": {
            "code": file("asset.code", "zip", "code.zip"),
            "layer": file("asset.layer", "zip", "layer.zip"),
            "machine": file("asset.machine.json", "file", "machine.json"),
        },
        "dockerImages": {
            name: {
                "source": {"directory": f"asset.{name}", "dockerFile": f"{name}/Dockerfile"},
                "destinations": {"here": {"repositoryName": "assets", "imageTag": tag}},
            }
            for name, tag in IMAGES.items()
        },
    }


def _function(handler: str, **more: Any) -> dict[str, Any]:
    return {
        "Type": "AWS::Lambda::Function",
        "Properties": {
            "Code": {"S3Bucket": {"Fn::Sub": _ASSETS}, "S3Key": "code.zip"},
            "Handler": f"handlers.{handler}",
            "Runtime": "python3.13",
            "Role": {"Fn::GetAtt": ["Role", "Arn"]},
            "Timeout": 20,
            "MemorySize": 256,
            "Layers": [{"Ref": "Layer"}],
            "Environment": {"Variables": {"TABLE": {"Ref": "Table"}}},
            **more,
        },
        "DependsOn": ["Role"],
    }


_ASSETS = "cdk-hnb659fds-assets-${AWS::AccountId}-${AWS::Region}"


def _rule(target: str, **properties: Any) -> dict[str, Any]:
    dead_letters = {"Arn": {"Fn::GetAtt": ["DeadLetters", "Arn"]}}
    arn = {"Fn::GetAtt": [target, "Arn"]}
    targets = [{"Id": "Target0", "Arn": arn, "DeadLetterConfig": dead_letters}]
    return {
        "Type": "AWS::Events::Rule",
        "Properties": {"State": "ENABLED", "Targets": targets, **properties},
    }


def _route(key: str, **properties: Any) -> dict[str, Any]:
    target = {"Fn::Join": ["", ["integrations/", {"Ref": "Integration"}]]}
    return {
        "Type": "AWS::ApiGatewayV2::Route",
        "Properties": {"ApiId": {"Ref": "Api"}, "RouteKey": key, "Target": target, **properties},
    }


def _template() -> dict[str, Any]:
    queue_arn = {"Fn::GetAtt": ["DeadLetters", "Arn"]}
    sources = ["aws.sagemaker", "aws.ec2", "aws.s3", "aws.states"]
    return {
        "Resources": {
            "Bucket": {
                "Type": "AWS::S3::Bucket",
                "Properties": {
                    "VersioningConfiguration": {"Status": "Enabled"},
                    "NotificationConfiguration": {
                        "EventBridgeConfiguration": {"EventBridgeEnabled": True}
                    },
                },
            },
            "BucketPolicy": {
                "Type": "AWS::S3::BucketPolicy",
                "Properties": {"Bucket": {"Ref": "Bucket"}, "PolicyDocument": {}},
            },
            "Table": {
                "Type": "AWS::DynamoDB::Table",
                "Properties": {
                    "KeySchema": [
                        {"AttributeName": "pk", "KeyType": "HASH"},
                        {"AttributeName": "sk", "KeyType": "RANGE"},
                    ],
                    "AttributeDefinitions": [
                        {"AttributeName": "pk", "AttributeType": "S"},
                        {"AttributeName": "sk", "AttributeType": "S"},
                    ],
                    "BillingMode": "PAY_PER_REQUEST",
                },
            },
            "DeadLetters": {"Type": "AWS::SQS::Queue", "Properties": {}},
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {"AssumeRolePolicyDocument": {"Statement": []}},
            },
            "Layer": {
                "Type": "AWS::Lambda::LayerVersion",
                "Properties": {"Content": {"S3Bucket": {"Fn::Sub": _ASSETS}, "S3Key": "layer.zip"}},
            },
            "Record": _function("record"),
            "ApiFunction": _function("api"),
            "Boom": _function("boom", DeadLetterConfig={"TargetArn": queue_arn}),
            "Slow": _function("slow", Timeout=2),
            "KeepToken": _function("keep_token"),
            "Broken": _function("no_such_handler"),
            "Everything": _rule("Record", EventPattern={"source": sources}),
            "Tick": _rule("Record", ScheduleExpression="rate(5 minutes)"),
            "ToBoom": _rule("Boom", EventPattern={"source": ["test.boom"]}),
            "Machine": {
                "Type": "AWS::StepFunctions::StateMachine",
                "Properties": {
                    "RoleArn": {"Fn::GetAtt": ["Role", "Arn"]},
                    "DefinitionS3Location": {"Bucket": "assets", "Key": "machine.json"},
                    "DefinitionSubstitutions": {
                        "KeepTokenArn": {"Fn::GetAtt": ["KeepToken", "Arn"]}
                    },
                },
            },
            "Api": {"Type": "AWS::ApiGatewayV2::Api", "Properties": {"ProtocolType": "HTTP"}},
            "Integration": {
                "Type": "AWS::ApiGatewayV2::Integration",
                "Properties": {
                    "ApiId": {"Ref": "Api"},
                    "IntegrationUri": {"Fn::GetAtt": ["ApiFunction", "Arn"]},
                },
            },
            "AnyRoute": _route("ANY /v1/{proxy+}", AuthorizationType="AWS_IAM"),
            "ItemRoute": _route("GET /items/{item_id}"),
            "Alarm": {"Type": "AWS::CloudWatch::Alarm", "Properties": {}},
        },
        "Outputs": {
            "ApiUrl": {"Value": {"Fn::GetAtt": ["Api", "ApiEndpoint"]}},
            "BucketName": {"Value": {"Ref": "Bucket"}},
            "MachineArn": {"Value": {"Ref": "Machine"}},
        },
    }
