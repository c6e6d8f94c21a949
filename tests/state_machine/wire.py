"""Requests of every boto3 client of this process go to a WSGI application in this process.

botocore signs and serialises and moto parses and answers, as over a socket; only the socket, and a
thread and a connection for each of some hundred requests a test, are left out.
"""

from __future__ import annotations

import io
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import botocore.session
from boto3.dynamodb import transform
from boto3.dynamodb.conditions import ConditionExpressionBuilder
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from werkzeug.test import run_wsgi_app

__all__ = ["answer_in_process", "connect_as_before", "post"]

Application = Callable[[dict[str, Any], Any], Any]


def answer_in_process(application: Application) -> None:
    """Let clients of the default session, made from now on, ask ``application``."""

    def send(request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        headers = {
            key: value.decode("latin-1") if isinstance(value, bytes) else str(value)
            for key, value in request.headers.items()
        }
        body = request.body or b""
        if isinstance(body, str):
            body = body.encode()
        elif hasattr(body, "read"):
            body = body.read()
        return _ask(application, request.method, request.url, headers, bytes(body))

    transform.ConditionExpressionBuilder = _PerThread  # type: ignore[misc]
    session = botocore.session.get_session()
    session.register("before-send", send)
    boto3.setup_default_session(botocore_session=session)


def connect_as_before() -> None:
    """Give clients made from now on their sockets again."""
    boto3.DEFAULT_SESSION = None


def post(application: Application, url: str) -> None:
    """An empty POST that no client knows how to send."""
    answer = _ask(application, "POST", url, {}, b"")
    assert answer.status_code == 200, answer.text


class _PerThread(threading.local, ConditionExpressionBuilder):
    """A boto3 resource may not be shared by threads, since it numbers the names of all conditions.
    A function handles one event at a time; here many run at once in one process."""


class _Body(io.BytesIO):
    """What botocore reads an answer from."""

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


def _ask(
    application: Application, method: str, url: str, headers: dict[str, str], body: bytes
) -> AWSResponse:
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    environ: dict[str, Any] = {
        "wsgi.version": (1, 0), "wsgi.url_scheme": parts.scheme, "wsgi.errors": sys.stderr,
        "wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True,
        "wsgi.multithread": True, "wsgi.multiprocess": False, "wsgi.run_once": False,
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "QUERY_STRING": parts.query,
        "PATH_INFO": unquote(parts.path).encode().decode("latin-1"),
        "REQUEST_URI": target, "RAW_URI": target, "SERVER_PROTOCOL": "HTTP/1.1",
        "SERVER_NAME": parts.hostname, "SERVER_PORT": str(parts.port), "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": parts.netloc, "CONTENT_LENGTH": str(len(body)),
    }  # fmt: skip
    for key, value in headers.items():
        name = key.upper().replace("-", "_")
        environ[name if name == "CONTENT_TYPE" else f"HTTP_{name}"] = value
    environ.pop("HTTP_CONTENT_LENGTH", None)
    try:
        chunks, status, answered = run_wsgi_app(application, environ)
    except Exception:  # noqa: BLE001 (nor does a server's client see more of it than a 500)
        traceback.print_exc()
        return AWSResponse(url, 500, {}, _Body(b""))
    return AWSResponse(url, int(status.split()[0]), dict(answered), _Body(b"".join(chunks)))
