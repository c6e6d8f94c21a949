"""Where a source that declares `network` may connect: anywhere but to what hands out credentials.

The instance's metadata and credentials services answer on link-local addresses to whoever asks, and
neither a namespace (the source needs the network) nor Landlock (its rules know ports, not
addresses) can tell them from the rest. So `connect` is answered by the supervisor, outside of the
code's reach, through a seccomp listener: it copies the address, judges the copy, and connects the
caller's socket itself. The caller cannot change what was judged, as it could if the kernel went on
with the call (seccomp_unotify(2), NOTES).

No other call opens a TCP connection: TCP Fast Open by `sendto` and `sendmsg` and io_uring are
refused. Datagrams may be sent anywhere, as no such service answers them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import socket
import struct
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Listener", "Policy", "confine_connections", "own_services"]

_REFUSED = tuple(map(ipaddress.ip_network, ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32")))
_AMAZON_DNS = (ipaddress.ip_address("169.254.169.253"), 53)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SERVICES = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_LAMBDA_RUNTIME_API", "AWS_ENDPOINT_URL",
             "AWS_EC2_METADATA_SERVICE_ENDPOINT")  # fmt: skip

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def own_services(environ: Mapping[str, str]) -> tuple[str, ...]:
    """`address port` of the services that the job's own environment names and reaches by address:
    what they hand out is the job's."""
    found = []
    for name, value in environ.items():
        if not name.startswith(_SERVICES):
            continue
        url = urllib.parse.urlsplit(value if "//" in value else f"//{value}")
        host = "127.0.0.1" if url.hostname == "localhost" else url.hostname
        try:
            address = ipaddress.ip_address(host or "")
            port = url.port or (443 if url.scheme == "https" else 80)
        except ValueError:  # a name: a public service, or a mistake
            continue
        found.append(f"{address} {port}")
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Policy:
    """Which addresses may be connected to."""

    services: tuple[str, ...] = ()
    """As `own_services` gives them."""

    def allows(self, raw: bytes) -> bool:
        """Whether ``raw``, a `sockaddr` as the kernel reads it, may be connected to."""
        family = int.from_bytes(raw[:2], sys.byteorder)
        if family == socket.AF_UNSPEC:
            return True  # takes a datagram socket's peer away
        if family == socket.AF_INET and len(raw) >= 8:
            address: Address = ipaddress.IPv4Address(raw[4:8])
        elif family == socket.AF_INET6 and len(raw) >= 24:
            address = _embedded(ipaddress.IPv6Address(raw[8:24]))
        else:
            return False  # local sockets of the host's daemons among them
        port = int.from_bytes(raw[2:4], "big")
        if (address, port) == _AMAZON_DNS:
            return True
        return not any(address in net for net in _REFUSED) and not self._is_service(address, port)

    def _is_service(self, address: Address, port: int) -> bool:
        here = address.is_loopback or address.is_unspecified
        for service in self.services:
            host, _, number = service.partition(" ")
            known = ipaddress.ip_address(host)
            same = address == known or (here and (known.is_loopback or known.is_unspecified))
            if same and port == int(number):
                return True
        return False


def _embedded(address: ipaddress.IPv6Address) -> Address:
    """The IPv4 address that a mapped or translated one stands for."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


# --- the confined side ---------------------------------------------------------------------------

_CALLS = {
    "x86_64": {"socket": 41, "connect": 42, "sendto": 44, "sendmsg": 46, "sendmmsg": 307},
    "aarch64": {"socket": 198, "connect": 203, "sendto": 206, "sendmsg": 211, "sendmmsg": 269},
}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_FLAGS_ARGUMENT = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink, for getaddrinfo
_MSG_FASTOPEN = 0x20000000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ERRNO, _ALLOW, _ASK = 0x00050000, 0x7FFF0000, 0x7FC00000
_READY = b"+"


def _program(machine: str) -> bytes:
    """Number at offset 0, argument n at 16 + 8 n. Other architectures were refused before this."""
    numbers = _CALLS[machine]
    code: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 0)]
    code += [(_JUMP_EQUAL, 0, 1, numbers["connect"]), (_RETURN, 0, 0, _ASK)]
    for name, argument in _FLAGS_ARGUMENT.items():
        code += [
            (_JUMP_EQUAL, 0, 4, numbers[name]),
            (_LOAD, 0, 0, 16 + 8 * argument),
            (_JUMP_ANY_BIT, 0, 1, _MSG_FASTOPEN),
            (_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP),
            (_RETURN, 0, 0, _ALLOW),
        ]
    # Other families reach other things, as vsock reaches the machine's host.
    code += [(_JUMP_EQUAL, 0, len(_FAMILIES) + 3, numbers["socket"]), (_LOAD, 0, 0, 16)]
    code += [
        (_JUMP_EQUAL, len(_FAMILIES) - index, 0, int(family))
        for index, family in enumerate(_FAMILIES)
    ]
    code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def confine_connections(supervisor: socket.socket) -> str:
    """Hand this process's `connect` calls, and its children's, to the supervisor, for good.

    Returns why not, where the host does not let the supervisor answer; else ''.
    """
    verdict = supervisor.recv(256)
    if verdict != _READY:
        return verdict.decode()
    machine = platform.machine()
    program = _program(machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    listener = libc.syscall(
        _SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(descriptor)
    )
    if listener < 0:
        reason = f"no seccomp listener ({os.strerror(ctypes.get_errno())})"
        supervisor.send(reason.encode())
        return reason
    socket.send_fds(supervisor, [_READY], [listener])
    os.close(listener)
    return ""


# --- the supervisor's side -----------------------------------------------------------------------

_RECEIVE, _SEND, _STILL_VALID = 0xC0502100, 0xC0182101, 0x40082102
_REQUEST, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_PIDFD_GETFD = 438
_LONGEST_ADDRESS = 128


class Listener:
    """Answers the `connect` calls of a confined process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._helpers: set[int] = set()

    def start(self, child: int, channel: socket.socket) -> bool:
        """Agree with the child whether there is to be a listener; it waits for this in
        `confine_connections`. True: there is, and `answer` is to be called when it is readable."""
        with contextlib.suppress(BrokenPipeError):  # it has no filter to offer, or is gone
            channel.send(self._refusal(child).encode() or _READY)
        _, fds, _, _ = socket.recv_fds(channel, 256, 1)
        self._fd = fds[0] if fds else -1
        return bool(fds)

    def fileno(self) -> int:
        return self._fd

    def answer(self) -> None:
        """Answer one call. What may take long is done by a process of its own: after entering a
        PID namespace a process can have no threads."""
        self._helpers -= {pid for pid in self._helpers if os.waitpid(pid, os.WNOHANG)[0]}
        raw = bytearray(_REQUEST.size)
        try:
            fcntl.ioctl(self._fd, _RECEIVE, raw)
        except OSError:  # the caller was killed meanwhile
            return
        number, thread, _, _, _, _, *arguments = _REQUEST.unpack(raw)
        try:
            copy, address = self._judged(number, thread, arguments)
        except OSError as error:
            self._send(number, error.errno or errno.EACCES)
            return
        with copy:
            if copy.type == socket.SOCK_STREAM and os.get_blocking(copy.fileno()):
                self._connect_in_helper(number, copy, address)
            else:
                self._connect(number, copy, address)

    def _connect_in_helper(self, number: int, copy: socket.socket, address: bytes) -> None:
        try:
            helper = os.fork()
        except OSError as error:  # the namespace's first process is gone, or there are too many
            self._send(number, error.errno or errno.EAGAIN)
            return
        if helper == 0:
            self._connect(number, copy, address)
            os._exit(0)
        self._helpers.add(helper)

    def _connect(self, number: int, copy: socket.socket, address: bytes) -> None:
        done = self._libc.connect(copy.fileno(), address, len(address))
        self._send(number, 0 if done == 0 else ctypes.get_errno())

    def _send(self, number: int, code: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # the caller was killed meanwhile
            fcntl.ioctl(self._fd, _SEND, _RESPONSE.pack(number, 0, -code, 0))

    def _refusal(self, child: int) -> str:
        if platform.machine() not in _CALLS:
            return f"no system call table for {platform.machine()}"
        try:
            os.close(self._socket_of(child, 2))
        except OSError as error:
            return f"the host refuses pidfd_getfd ({error.strerror})"
        return ""

    def _judged(
        self, number: int, thread: int, arguments: Sequence[int]
    ) -> tuple[socket.socket, bytes]:
        """The caller's socket and a copy of the address. Raises OSError, with what the caller is
        to be told."""
        fd, pointer, length = arguments[0] & 0xFFFFFFFF, arguments[1], arguments[2] & 0xFFFFFFFF
        if not 2 <= length <= _LONGEST_ADDRESS:
            raise OSError(errno.EINVAL, "length of the address")
        raw = _memory_of(thread, pointer, length)
        if not self._policy.allows(raw):
            raise OSError(errno.EACCES, "refused")
        copy = socket.socket(fileno=self._socket_of(_process_of(thread), fd))
        # Whatever was read above was the caller's only if it is still there.
        fcntl.ioctl(self._fd, _STILL_VALID, struct.pack("=Q", number))
        return copy, raw

    def _socket_of(self, process: int, fd: int) -> int:
        pidfd = os.pidfd_open(process)
        try:
            copy = self._libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if copy < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            return int(copy)
        finally:
            os.close(pidfd)


def _memory_of(thread: int, pointer: int, length: int) -> bytes:
    memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY)
    try:
        raw = os.pread(memory, length, pointer)
    except OverflowError as error:
        raise OSError(errno.EFAULT, "address") from error
    finally:
        os.close(memory)
    if len(raw) < length:
        raise OSError(errno.EFAULT, "address")
    return raw


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))
