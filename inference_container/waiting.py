"""The waiting room: answers 503 on the port from the first moment until the engine takes it over.

SageMaker gives /ping 2 s. An engine that loads for minutes answers nothing, and importing torch
holds the interpreter for seconds: so the room is in a process that does neither.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["WaitingRoom"]

_BODY = json.dumps(
    {
        "error": {
            "message": "The model is loading.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }
).encode()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5

    def _answer(self) -> None:
        body = b"" if self.path == "/ping" else _BODY
        self.send_response(503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "5")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Health checks come every few seconds: not a line for each."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # vLLM binds the port when it starts, long before it listens: both sockets need this.
    allow_reuse_port = True
    request_queue_size = 64


class WaitingRoom:
    """503 for everybody, until `close`."""

    def __init__(self, port: int) -> None:
        self._server = _Server(("0.0.0.0", port), _Handler)
        self._open = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer who is already connected, and free the port."""
        if not self._open:
            return
        self._open = False
        self._server.shutdown()
        self._server.socket.setblocking(False)
        while True:
            try:
                connection, address = self._server.socket.accept()
            except BlockingIOError:
                break
            connection.setblocking(True)
            self._server.process_request(connection, address)
        self._server.server_close()
