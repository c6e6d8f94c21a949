"""Hosts in network namespaces on one bridge: real separation, and a cable to pull. Needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from types import TracebackType
from urllib.parse import urlsplit

__all__ = ["Namespaces", "unavailable"]


def unavailable() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` command here"
    name = f"gh{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Namespaces:
    """``count`` hosts on a network of their own; ``endpoint``, a server on this machine's loopback,
    is reached by way of the bridge."""

    interface = "eth0"

    def __init__(self, count: int, endpoint: str) -> None:
        mark = f"gh{os.getpid() % 100000}"
        self._bridge, self._target = f"{mark}b", urlsplit(endpoint)
        self._names = [f"{mark}h{rank}" for rank in range(count)]
        net = f"10.77.{os.getpid() % 250}"
        self._gateway = f"{net}.1"
        self.addresses = [f"{net}.{11 + rank}" for rank in range(count)]
        self.endpoint = f"http://{self._gateway}:{self._target.port}"
        self._listener: socket.socket | None = None

    def __enter__(self) -> Namespaces:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            for command in (
                ["addr", "add", f"{address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", name, *command)
        self._listener = socket.create_server((self._gateway, self._target.port or 80))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def command(self, rank: int) -> list[str]:
        """What to put in front of a command that is to run on a host."""
        return ["ip", "netns", "exec", self._names[rank]]

    def cut(self, rank: int) -> None:
        """Pull a host's cable: nothing is reset, packets vanish."""
        _ip("link", "set", self._names[rank], "down")

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target.port or 80))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
