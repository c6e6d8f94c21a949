"""Traces as X-Ray's daemon receives them, and the switch that turns them off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
CODE = """
import boto3
from botocore.stub import Stubber
from lambdas.handlers._entry import entry
from lambdas.observability import bind

client = boto3.client("sagemaker")
stub = Stubber(client)
stub.add_response("stop_training_job", {})
stub.activate()

@entry
def handler(event):
    bind("tv-20260101-abcdef01", "smooth", 2)
    client.stop_training_job(TrainingJobName=event["job"])
    return {"secret": "the answer"}

class Context:
    function_name, memory_limit_in_mb = "function", 512
    invoked_function_arn, aws_request_id = "arn:aws:lambda:::function", "request"

assert handler({"job": "tv-20260101-abcdef01-0-a002"}, Context()) == {"secret": "the answer"}
"""


def _sent(tmp_path: Path, **environment: str) -> list[dict[str, Any]]:
    """What a handler in Lambda's environment sends to the daemon that listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as daemon:
        daemon.bind(("127.0.0.1", 0))
        daemon.settimeout(0.1)
        known = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "POWERTOOLS_SERVICE_NAME": "grpohub",
            "POWERTOOLS_METRICS_NAMESPACE": "GrpoHub",
            "LAMBDA_TASK_ROOT": str(tmp_path),
            "_X_AMZN_TRACE_ID": "Root=1-5759e988-bd862e3fe1be46a994272793;"
            "Parent=53995c3f42cd8ad8;Sampled=1",
            "AWS_XRAY_DAEMON_ADDRESS": f"127.0.0.1:{daemon.getsockname()[1]}",
        }
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=known | environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        received: list[dict[str, Any]] = []
        while True:
            try:
                packet = daemon.recv(65536).decode()
            except TimeoutError:
                return received
            received.append(json.loads(packet.split("\n", 1)[1]))


def test_a_handler_and_its_aws_calls_are_traced_and_found_by_run(tmp_path: Path) -> None:
    call, handler = _sent(tmp_path)
    assert call["namespace"] == "aws"
    assert call["aws"]["operation"] == "StopTrainingJob"
    assert call["parent_id"] == handler["id"]
    assert {"run_id": "tv-20260101-abcdef01", "stage": "smooth", "attempt": "2"}.items() <= (
        handler["annotations"].items()
    )
    assert "the answer" not in json.dumps([call, handler])


@pytest.mark.parametrize(
    "switch", [{"POWERTOOLS_TRACE_DISABLED": "true"}, {"AWS_SAM_LOCAL": "true"}]
)
def test_where_no_xray_listens_nothing_is_sent(tmp_path: Path, switch: dict[str, str]) -> None:
    assert _sent(tmp_path, **switch) == []
