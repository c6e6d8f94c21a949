"""The one port: looks at what a request is signed for and hands it to the part that serves it."""

import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.wrappers import Request, Response

from local_aws.http_api import PREFIX

Handler = Callable[[Request], Response]
StartResponse = Callable[..., Any]

_SCOPE = re.compile(r"Credential=[^/]+/\d{8}/[^/]+/([^/]+)/aws4_request")
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class QuietHandler(MotoRequestHandler):
    """HTTP/1.1, for answers of unknown length and `Expect: 100-continue`; logs no request."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


class Front:
    """The WSGI application. Handlers are looked up by path prefix first, then by SigV4 service
    name.
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.paths: dict[str, Handler] = {}
        self.lambda_api: Handler | None = None
        self.events_api: Handler | None = None
        self.sagemaker_api: Handler | None = None
        self.changed_tables: Callable[[], None] = lambda: None
        # moto checks a condition and writes in two steps; only one such request may be between them
        # at a time.
        self._dynamodb = threading.Lock()
        self._conditional_puts = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        path = environ.get("PATH_INFO", "")
        if _foreign_page(environ):
            refusal = Response("requests from web pages are not served", 403)
            return refusal(environ, start_response)
        for prefix, handler in self.paths.items():
            if path.startswith(prefix):
                return handler(Request(environ))(environ, start_response)
        handler = self._service(environ, path)
        if handler is not None:
            return handler(Request(environ))(environ, start_response)
        return self._ask_moto(environ, start_response)

    def _service(self, environ: dict[str, Any], path: str) -> Handler | None:
        signed_for = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        service = signed_for[1] if signed_for else ""
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if service == "lambda" and path.endswith("/invocations"):
            return self.lambda_api
        if service == "events" and target.endswith(".PutEvents"):
            return self.events_api
        if service == "sagemaker":
            return self.sagemaker_api
        return None

    def _ask_moto(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if target.startswith("DynamoDB_"):
            with self._dynamodb:
                answer = self._moto(environ, start_response)
            if not target.endswith((".Query", ".GetItem", ".Scan", ".BatchGetItem")):
                self.changed_tables()
            return answer
        conditional = "HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ
        if conditional and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            with self._conditional_puts:
                return self._moto(environ, start_response)
        return self._moto(environ, start_response)


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(json.dumps(body), status, content_type="application/json")


def _foreign_page(environ: dict[str, Any]) -> bool:
    """Whether a web page of another origin makes this request; there are no credentials to keep it
    out.
    """
    origin = environ.get("HTTP_ORIGIN")
    return bool(origin) and (urlsplit(origin).hostname or "") not in _LOCAL_NAMES


__all__ = ["PREFIX", "Front", "QuietHandler", "json_response"]
