"""The real container process on a free port, as SageMaker would start it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events; the last is the text `[DONE]`."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Container:
    """A started container."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def request(
        self,
        path: str,
        document: Any = None,
        *,
        raw: bytes | None = None,
        kind: str | None = "application/json",
        timeout: float = 60,
    ) -> Answer:
        """POST a document (or raw bytes), or GET without either."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        body = json.dumps(document).encode() if document is not None else raw
        headers = {"content-type": kind} if body is not None and kind else {}
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            head = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, head, response.read())
        finally:
            connection.close()

    def wait_until_ready(self, seconds: float = 240) -> list[int]:
        """Health checks until one succeeds; their statuses.

        SageMaker gives each 2 s; a machine that runs other tests too may need more.
        """
        statuses = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError("the container ended:\n" + self.log())
            try:
                statuses.append(self.request("/ping", timeout=10).status)
            except ConnectionError:
                pass
            except TimeoutError as error:
                raise AssertionError("a health check hung:\n" + self.log()) from error
            if statuses[-1:] == [200]:
                return statuses
            time.sleep(0.1)
        raise AssertionError("the container never became ready:\n" + self.log())

    def log(self) -> str:
        return "".join(self.lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    base: Path, deploy: dict[str, Any] | None = None, **variables: str
) -> Iterator[Container]:
    """`python -m inference_container serve` with `base` in the place of /opt/ml."""
    port = free_port()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("GRPOHUB_", "SAGEMAKER_"))},
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        **({"GRPOHUB_DEPLOY": json.dumps(deploy)} if deploy is not None else {}),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "inference_container", "serve"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    container = Container(process, port)
    assert process.stdout is not None
    reader = threading.Thread(target=container.lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield container
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(timeout=10)
