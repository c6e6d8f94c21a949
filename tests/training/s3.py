"""A real S3 API (moto) in this process, with faults that the server answers, as S3 would.

Faults live in the server and not in a client, so they reach subprocesses too.
"""

from __future__ import annotations

import logging
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

BUCKET = "hub-bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_REGION": "eu-west-1",
}


@dataclass
class Fault:
    """Answer matching requests with an S3 error; -1 times means always."""

    method: str
    pattern: str
    code: str
    status: int
    times: int

    def matches(self, method: str, target: str) -> bool:
        return self.times != 0 and method == self.method and bool(re.search(self.pattern, target))


@dataclass
class Request:
    method: str
    target: str
    """Path and query."""
    sent: int
    """Bytes of the answer's body."""


@dataclass
class S3Server:
    """One running server; `requests` is its log."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    """Called with (method, target) before a request is answered."""
    _client: Any = None

    def fail(
        self, method: str, pattern: str, code: str, *, status: int = 0, times: int = -1
    ) -> Fault:
        status = status or {"AccessDenied": 403, "SlowDown": 503, "InternalError": 500}[code]
        fault = Fault(method, pattern, code, status, times)
        self.faults.append(fault)
        return fault

    def mend(self) -> None:
        self.faults.clear()

    def environ(self) -> dict[str, str]:
        """What a process needs to reach this server."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_MAX_ATTEMPTS": "2"}

    def client(self) -> Any:
        """A client that tries each request once, so that one fault is one failure."""
        if self._client is None:
            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                region_name="eu-west-1",
                aws_access_key_id="test",
                aws_secret_access_key="test",
                config=Config(retries={"total_max_attempts": 1}),
            )
        return self._client

    def keys(self, prefix: str = "") -> dict[str, int]:
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        )
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", ())}

    def clear(self) -> None:
        """An empty bucket, no fault, no log."""
        self.mend()
        self.hooks.clear()
        if keys := [{"Key": key} for key in self.keys()]:
            self.client().delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
        self.requests.clear()

    def count(self, method: str, pattern: str) -> int:
        return sum(r.method == method and bool(re.search(pattern, r.target)) for r in self.requests)


class _Faulty:
    def __init__(self, app: Any, server: S3Server) -> None:
        self._app, self._server = app, server

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        target = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        for hook in self._server.hooks:
            hook(method, target)
        for fault in self._server.faults:
            if fault.matches(method, target):
                fault.times -= fault.times > 0
                # Take the body in, or the client sees a broken pipe in place of the answer.
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                body = (
                    f'<?xml version="1.0"?><Error><Code>{fault.code}</Code>'
                    "<Message>injected</Message></Error>"
                ).encode()
                self._log(method, target, len(body))
                start_response(
                    f"{fault.status} fault",
                    [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
                )
                return [body]
        answer = list(self._app(environ, start_response))
        self._log(method, target, sum(map(len, answer)))
        return answer

    def _log(self, method: str, target: str, sent: int) -> None:
        self._server.requests.append(Request(method, target, sent))


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A fresh server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server("")
    app = DomainDispatcherApplication(create_backend_app)
    http = make_server(
        "127.0.0.1", 0, _Faulty(app, server), threaded=True, request_handler=MotoRequestHandler
    )
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        server.client().create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        yield server
    finally:
        reset = urllib.request.Request(f"{server.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=10).close()
        http.shutdown()
        thread.join()
