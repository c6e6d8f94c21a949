"""The cloud that runs in a folder: the note it leaves there, and how to reach, ask and stop it."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

STOP_SECONDS = 30.0  # on a machine that is busy otherwise
NOTE = "local.json"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine needs no proxy
CLOCK_SECONDS = 10.0  # what setting the machine's clock may move a process's start by


class NotRunningError(Exception):
    """No embedded cloud runs in the folder."""


class RefusedError(Exception):
    """The cloud did not do what was asked; the text says why."""


@dataclass(frozen=True)
class Running:
    """What `.grpohub/local.json` says: where the cloud answers and which process it is."""

    url: str
    api_url: str
    pid: int
    region: str
    outputs: dict[str, str]
    started: float
    """When the process began: after a crash, another one may have its number."""

    @classmethod
    def find(cls, folder: Path) -> Self:
        """The cloud of a state folder.

        Raises:
            NotRunningError: there is no note, it cannot be read, or its process is gone.
        """
        note = folder / NOTE
        if not note.is_file():
            raise NotRunningError("no embedded cloud runs here: start it with `grpohub local up`")
        try:
            running = cls(**json.loads(note.read_bytes()))
        except (ValueError, TypeError) as error:
            raise NotRunningError(f"{note} is damaged: start it with `grpohub local up`") from error
        if not running.alive():
            raise NotRunningError("the embedded cloud has ended: start it with `grpohub local up`")
        return running

    @classmethod
    def here(cls, url: str, api_url: str, region: str, outputs: dict[str, str]) -> Self:
        """The cloud of this process."""
        started = psutil.Process().create_time()
        return cls(url, api_url, os.getpid(), region, outputs, started)

    def alive(self) -> bool:
        """Whether its process still runs."""
        try:
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE
            return not ended and abs(process.create_time() - self.started) < CLOCK_SECONDS
        except psutil.NoSuchProcess:
            return False

    def write(self, folder: Path) -> None:
        """Leave the note."""
        part = folder / f"{NOTE}.part"
        part.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        part.replace(folder / NOTE)

    def ask(self, action: str, **settings: Any) -> dict[str, Any]:
        """Use a control path.

        Raises:
            RefusedError: the cloud refused, or does not answer.
        """
        body = json.dumps(settings).encode()
        request = urllib.request.Request(f"{self.url}/_local/{action}", body, method="POST")
        try:
            with DIRECT.open(request, timeout=30) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise RefusedError(json.load(error)["message"]) from error
        except OSError as error:
            raise RefusedError(f"{self.url} does not answer: {error}") from error

    def stop(self) -> bool:
        """Ask the process to end; whether it has ended."""
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if not self.alive():
                return True
            time.sleep(0.1)
        return False
