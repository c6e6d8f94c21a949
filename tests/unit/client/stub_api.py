"""An HTTP server that answers as the hub's API would, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel

Answer = tuple[int, Any]


@dataclass
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class StubApi:
    """`answers["GET /v1/runs"]` is a function of the request, or a list used up in order."""

    url: str
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def on(self, route: str, *answers: Answer | Callable[[Asked], Answer] | BaseModel) -> None:
        """Answer ``route`` with each of ``answers`` in turn, the last one for ever."""
        self.answers[route] = list(answers)

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        left = self.answers.get(f"{asked.method} {asked.path}")
        if left is None:
            return 404, problem(404, "no such route")
        chosen = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(chosen, BaseModel):
            return 200, chosen
        return chosen(asked) if callable(chosen) else chosen


def problem(status: int, detail: str, problems: list[dict[str, Any]] | None = None) -> Any:
    return {
        "type": "urn:grpohub:problem:test",
        "title": "Test",
        "status": status,
        "detail": detail,
        "request_id": "req-1",
        "problems": problems or [],
    }


@contextmanager
def stub_api() -> Iterator[StubApi]:
    """A stub on an ephemeral port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            raw = self.rfile.read(length)
            split = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(split.query).items()}
            body = json.loads(raw) if raw else None
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, answer = api.answer(Asked(self.command, split.path, query, headers, body))
            if isinstance(answer, BaseModel):
                payload = answer.model_dump_json().encode()
            else:
                payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api = StubApi(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
