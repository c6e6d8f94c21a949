"""Load the model, take the port over from the waiting room, serve until SIGTERM."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import uvicorn

from inference_container.engines import DRAIN_SECONDS
from inference_container.small.app import build_app
from inference_container.small.generation import SmallModel
from inference_container.supervisor import ENGINE_FD_VARIABLE


def main(document: str) -> None:
    """Serve the model that the supervisor's JSON document describes."""
    options = json.loads(document)
    template = options["chat_template"]
    model = SmallModel(
        Path(options["model"]),
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        adapters={name: Path(folder) for name, folder in options["adapters"].items()},
        chat_template=Path(template).read_text() if template else None,
    )
    app = build_app(model, options["names"])
    _take_over(int(os.environ[ENGINE_FD_VARIABLE]))
    uvicorn.run(
        app,
        host="0.0.0.0",
        port=options["port"],
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )


def _take_over(descriptor: int) -> None:
    """Nobody listens between the two: a health check in that moment fails and is repeated."""
    with socket.socket(fileno=descriptor) as supervisor:
        supervisor.sendall(b"loaded")
        if not supervisor.recv(16):
            sys.exit("the supervisor is gone")


if __name__ == "__main__":
    main(sys.argv[1])
