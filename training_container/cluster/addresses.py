"""Names, addresses, interfaces and ports of a job's hosts."""

from __future__ import annotations

import ipaddress
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["Ports", "free_port", "interface_of", "own_address", "reachable", "resolve"]

_FIRST, _LAST, _BLOCK = 20000, 32000, 32
"""Above the range that Ray gives to workers by itself (10002-19999, which `ray start` refuses for
anything else) and below Linux's ephemeral ports (32768 and up)."""
_RETRY_SECONDS = 1.0


def resolve(
    host: str,
    deadline: float,
    *,
    lookup: Callable[[str], str] = socket.gethostbyname,
    turn: Callable[[], None] = lambda: None,
) -> str:
    """IPv4 address of ``host``, asked for until the monotonic ``deadline``.

    SageMaker's names may not resolve at first, and their addresses may change (FACTS A.1.9), so
    they are asked for anew by every caller. ``turn`` is called between tries.

    Raises:
        StageError: CLUSTER, naming the host.
    """
    started = time.monotonic()
    while True:
        try:
            return lookup(host)
        except OSError as error:
            if time.monotonic() >= deadline:
                waited = time.monotonic() - started
                raise StageError(
                    ExitCode.CLUSTER,
                    f"the name of host {host} does not resolve after {waited:.0f} s: {error}",
                ) from error
        turn()
        time.sleep(_RETRY_SECONDS)


def interface_of(named: str | None, host: str) -> str:
    """The interface that NCCL and Gloo must use: the platform's, which must exist here.

    Left to choose, they have picked link-local addresses and loopback (hiyouga/EasyR1#431).

    Raises:
        StageError: CLUSTER when this host has no such interface.
    """
    present = psutil.net_if_addrs()
    if named is None and _literal(host) is not None:
        owners = [
            name for name, entries in present.items() if any(e.address == host for e in entries)
        ]
        named = owners[0] if owners else "lo"
    if named not in present:
        has = ", ".join(sorted(present))
        raise StageError(
            ExitCode.CLUSTER, f"no network interface {named!r} here (there are: {has})"
        )
    return named


def own_address(host: str, interface: str) -> str:
    """The address that this host tells the others: itself if it is named by one, else its
    interface's.

    Raises:
        StageError: CLUSTER when the interface has no IPv4 address.
    """
    if _literal(host) is not None:
        return host
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family == socket.AF_INET:
            return entry.address
    raise StageError(ExitCode.CLUSTER, f"interface {interface} of host {host} has no IPv4 address")


def reachable(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=3.0):
            return True
    except OSError:
        return False


def free_port(address: str) -> int:
    """A port of ``address`` that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Ports:
    """Every port of one Ray node, explicit, in one block of their own.

    Ray binds most of them on all addresses, so two nodes on one machine must not share a number.
    """

    first: int

    @classmethod
    def of(cls, address: str) -> Ports:
        """The first wholly free block, searched from a place that depends on the address."""
        count = (_LAST - _FIRST) // _BLOCK
        start = zlib.crc32(address.encode()) % count
        for offset in range(count):
            ports = cls(_FIRST + (start + offset) % count * _BLOCK)
            if all(_is_free(ports.first + i) for i in range(_BLOCK)):
                return ports
        raise StageError(ExitCode.CLUSTER, f"no {_BLOCK} free ports in a row on {address}")

    @property
    def head(self) -> int:
        """Where other nodes join."""
        return self.first

    def options(self, *, head: bool) -> list[str]:
        """For `ray start`."""
        first = self.first
        names = [
            "node-manager-port", "object-manager-port", "runtime-env-agent-port",
            "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port",
        ]  # fmt: skip
        found = {name: first + 1 + i for i, name in enumerate(names)}
        if head:
            heads = ("port", first), ("ray-client-server-port", first + 7)
            found |= dict([*heads, ("dashboard-port", first + 8)])
        found |= {"min-worker-port": first + 10, "max-worker-port": first + _BLOCK - 1}
        return [f"--{name}={port}" for name, port in found.items()]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _literal(host: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(host)
    except ipaddress.AddressValueError:
        return None
