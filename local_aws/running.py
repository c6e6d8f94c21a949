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

    @classmethod
    def find(cls, folder: Path) -> Self:
        """The cloud of a state folder.

        Raises:
            NotRunningError: there is no note, or its process is gone.
        """
        note = folder / NOTE
        if not note.is_file():
            raise NotRunningError("no embedded cloud runs here: start it with `grpohub local up`")
        running = cls(**json.loads(note.read_text(encoding="utf-8")))
        if not _alive(running.pid):
            raise NotRunningError("the embedded cloud has ended: start it with `grpohub local up`")
        return running

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
            with urllib.request.urlopen(request, timeout=30) as response:
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
            if not _alive(self.pid):
                return True
            time.sleep(0.1)
        return False


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
