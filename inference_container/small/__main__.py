"""Load the model, take the port over from the waiting room, serve until SIGTERM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import uvicorn

from inference_container.engines import DRAIN_SECONDS
from inference_container.handover import take_over
from inference_container.small.app import build_app
from inference_container.small.generation import SmallModel


def main(document: str) -> None:
    """Serve the model that the supervisor's JSON document describes."""
    options = json.loads(document)
    template = options["chat_template"]
    model = SmallModel(
        Path(options["model"]),
        dtype=options["dtype"],
        trust_remote_code=options["trust_remote_code"],
        max_model_len=options["max_model_len"],
        adapters={name: Path(folder) for name, folder in options["adapters"].items()},
        chat_template=Path(template).read_text() if template else None,
    )
    app = build_app(model, options["names"])
    take_over()
    uvicorn.run(
        app,
        host="0.0.0.0",
        port=options["port"],
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )


if __name__ == "__main__":
    main(sys.argv[1])
