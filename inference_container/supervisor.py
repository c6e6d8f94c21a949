"""PID 1 of the container: waiting room, checks, the engine as a child, signals, and a last line.

The engine's lines pass through here, so that a failed start ends with its first cause in one line.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType

from contracts.compute import BASE_MODEL_NAME
from contracts.failures import START_FAILED
from inference_container.engines import Engine, Resolved, choose_engine, gpu_count
from inference_container.fetch import fetch_adapters, fetch_chat_template
from inference_container.handover import ENGINE_FD_VARIABLE
from inference_container.settings import Settings, StartError
from inference_container.verify import verify_model
from inference_container.waiting import WaitingRoom

__all__ = ["EXIT_CODE", "serve"]

EXIT_CODE = 3
"""Exit code of a container that never became ready."""
_POLL_SECONDS = 0.1
_CAUSE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception|error): .+)")


def serve(environment: Mapping[str, str]) -> int:
    """Serve until told to stop; the container's exit code."""
    started = time.monotonic()
    # PID 1 has no default handlers: without one, a stop during the checks would be ignored.
    signal.signal(signal.SIGTERM, _exit_now)
    try:
        settings = Settings.from_environment(environment)
        room = WaitingRoom(settings.port)
        resolved = _resolve(settings)
        engine = choose_engine(resolved, gpus=gpu_count(environment))
    except StartError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'port'}: {error.strerror}")
    _say(f"engine {engine.name}: {' '.join(engine.command)}")
    return _Child(engine, room, environment, started).run()


def _resolve(settings: Settings) -> Resolved:
    manifest = verify_model(settings.model, version=settings.version)
    _say(f"model of run {manifest.run_id}, stage {manifest.stage}, step {manifest.step}: verified")
    return Resolved(
        settings=settings,
        names=(manifest.run_id, BASE_MODEL_NAME),
        adapters=fetch_adapters(settings),
        chat_template=fetch_chat_template(settings),
    )


class _Child:
    """The engine's process, from its start to its end."""

    def __init__(
        self,
        engine: Engine,
        room: WaitingRoom,
        environment: Mapping[str, str],
        started: float,
    ) -> None:
        self._room, self._started = room, started
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._first_cause: str | None = None
        self._last_line = ""
        ours, theirs = socket.socketpair()
        self._handover = ours
        self._process = subprocess.Popen(
            engine.command,
            env={**environment, **engine.environment, ENGINE_FD_VARIABLE: str(theirs.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            text=True,
            errors="replace",
        )
        theirs.close()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._forward)
        signal.signal(signal.SIGINT, self._forward)
        relay = threading.Thread(target=self._relay, daemon=True)
        relay.start()
        threading.Thread(target=self._hand_over, daemon=True).start()
        code = self._reap()
        relay.join(timeout=5)
        self._room.close()
        if not self._ready.is_set() and not self._stopping.is_set():
            return _fail(self._first_cause or self._last_line or f"the engine exited with {code}")
        _say(f"engine ended with {code}")
        # A stop that was asked for is no failure, whatever the engine makes of the signal.
        return 0 if self._stopping.is_set() and code < 0 else code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopping.set()
        _say(f"{signal.Signals(number).name}: finishing what is being answered")
        os.kill(self._process.pid, number)

    def _reap(self) -> int:
        """Wait for the engine; as PID 1, also for orphans that the kernel hands over."""
        while True:
            # Never for long: the kernel may hand a signal to any thread, which does not wake this
            # one, and only this one runs Python's handlers.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._process.pid:
                self._process.returncode = code = os.waitstatus_to_exitcode(status)
                return code
            if not pid:
                time.sleep(_POLL_SECONDS)

    def _relay(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if self._ready.is_set() or not (text := line.strip()):
                continue
            self._last_line = text
            if self._first_cause is None and (found := _CAUSE.search(text)):
                self._first_cause = found[1]

    def _hand_over(self) -> None:
        """The engine says it has loaded; the port is freed; the engine is told to take it."""
        if self._handover.recv(16):
            self._room.close()
            self._become_ready()
            self._handover.sendall(b"go")

    def _become_ready(self) -> None:
        self._ready.set()
        _say(f"ready after {time.monotonic() - self._started:.1f} s")


def _exit_now(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    sys.exit(0)


def _say(text: str) -> None:
    print(f"grpohub: {text}", flush=True)


def _fail(cause: str) -> int:
    print(f"{START_FAILED}{' '.join(cause.split())}", flush=True)
    return EXIT_CODE
