"""An inference container that answers every chat with the name of the model file it was given."""

import http.server
import json
import os
import sys
from pathlib import Path

MODEL = Path(os.environ["SAGEMAKER_BASE_DIR"]) / "model"


class Handler(http.server.BaseHTTPRequestHandler):
    """/ping and /invocations."""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        content = f"served {sorted(file.name for file in MODEL.iterdir())}"
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "toy", "object": "chat.completion", "model": "toy", "created": 0}
        self._answer(json.dumps({**answer, "choices": [choice], "usage": usage}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if not (MODEL / "model.json").is_file():
        sys.exit("no model.json: this is no exported model")
    if "reasoning_parser" in os.environ["GRPOHUB_DEPLOY"]:
        sys.exit("this toy parses no reasoning")
    port = int(os.environ["SAGEMAKER_BIND_TO_PORT"])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
