"""Ranks that start in no time: forked from a process that has imported torch already.

Importing torch takes seconds of processor time, and a kill trial starts half a dozen ranks. So toy
ranks are forked from one server. The supervisor's child is a stand-in (`python -S` on this file)
that passes SIGTERM on and ends as its rank ends; when the stand-in is killed, so is the rank.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESS = "TEST_WARM_RANKS"
"""Environment variable with the server's socket; without it ranks start by themselves."""
_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def warm_ranks() -> Iterator[None]:
    """While the block runs, `toy_container` starts its ranks warm."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(16)
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, "serve", str(listener.fileno())],
                cwd=_ROOT, pass_fds=[listener.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            server.kill()
            server.wait()


def serve(listener: socket.socket) -> None:
    """Fork a rank per connection; tell the connection its pid, and its exit status at its end."""
    import torch._dynamo  # noqa: F401 - the first optimizer would, which takes seconds too

    import tests.reliability.toy_rank as toy
    import training_container.checkpoints.checkpointer
    import training_container.checkpoints.store  # noqa: F401

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    parent, ranks = os.getppid(), dict[int, socket.socket]()
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(woken, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in waiting.select(timeout=5):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    pid = _fork(connection, toy, [listener, *ranks.values()], (wake, woken))
                    ranks[pid] = connection
                    waiting.register(connection, selectors.EVENT_READ, pid)
                elif key.fileobj == woken:
                    os.read(woken, 100)
                elif key.data in ranks:  # the stand-in is gone
                    os.kill(key.data, signal.SIGKILL)
                    waiting.unregister(key.fileobj)
            for pid, status in _ended(ranks):
                connection = ranks.pop(pid)
                if connection in waiting.get_map():
                    waiting.unregister(connection)
                    _tell(connection, os.waitstatus_to_exitcode(status))
                connection.close()


def _ended(ranks: dict[int, socket.socket]) -> Iterator[tuple[int, int]]:
    for pid in list(ranks):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            yield pid, status


def _fork(connection: socket.socket, toy: object, others: list, pipe: tuple[int, int]) -> int:
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    pid = os.fork()
    if pid:
        _tell(connection, pid)
        for stream in streams:
            os.close(stream)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (connection, *others):
        other.close()
    for number in pipe:
        os.close(number)
    for target, stream in enumerate(streams, start=1):
        os.dup2(stream, target)
    arguments, environ = json.loads(message)
    os.environ.clear()
    os.environ.update(environ)
    try:
        toy.main(arguments, toy.work)  # type: ignore[attr-defined]
    finally:
        os._exit(1)


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # the stand-in is gone; the selector will say so
        connection.send(struct.pack("i", number))


def stand_in(arguments: list[str]) -> None:
    """Ask for a rank and end as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        message = json.dumps([arguments, dict(os.environ)]).encode()
        socket.send_fds(server, [message], [1, 2])
        (pid,) = struct.unpack("i", server.recv(4))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        (code,) = struct.unpack("i", server.recv(4))
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    stand_in(sys.argv[1:])
