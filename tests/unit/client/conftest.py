"""A stub of the API, a hub that talks to it, and a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from client.hub import Hub
from client.settings import Settings
from tests.unit.client.stub_api import StubApi, stub_api
from tests.unit.client.views import INFO


@pytest.fixture
def api() -> Iterator[StubApi]:
    with stub_api() as stub:
        stub.on("GET /v1/info", INFO)
        yield stub


@pytest.fixture
def hub(api: StubApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    session = boto3.Session(
        aws_access_key_id="AKIDEXAMPLE", aws_secret_access_key="secret", region_name="eu-west-1"
    )
    with Hub(settings=Settings(api.url, "eu-west-1", session)) as made:
        yield made


@pytest.fixture
def s3() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="hub-bucket")
        yield client
