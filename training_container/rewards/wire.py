"""Length-prefixed JSON between the trainer and a worker process.

JSON and not pickle: what comes back was written by code that nobody has reviewed. Values JSON
lacks (bytes, numpy and torch scalars, dates) are converted on the way out; a value that cannot be
converted is an error that names where it was.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import os
import selectors
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "MAX_FRAME_BYTES",
    "Channel",
    "ChannelClosedError",
    "DeadlineExceededError",
    "FrameError",
    "decode",
    "encode",
    "to_plain",
]

MAX_FRAME_BYTES = 512 * 1024 * 1024
_HEADER = struct.Struct(">I")
_BYTES_KEY = "__bytes_base64__"


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class DeadlineExceededError(TimeoutError):
    """The other side did not answer in time."""


class FrameError(ValueError):
    """A frame that is not ours: too long, or no JSON object."""


_CONVERSIONS: tuple[tuple[tuple[type, ...], Callable[[Any], Any]], ...] = (
    (
        (bytes, bytearray, memoryview),
        lambda value: {_BYTES_KEY: base64.b64encode(value).decode("ascii")},
    ),
    ((datetime.date, datetime.time), lambda value: value.isoformat()),
    ((decimal.Decimal,), float),
)


def to_plain(value: Any, path: str = "value") -> Any:
    """``value`` in JSON's types. Raises FrameError naming ``path`` when it has no such form."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    for types, convert in _CONVERSIONS:
        if isinstance(value, types):
            return convert(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return to_plain(value.tolist(), path)
    raise FrameError(f"{path} is a {type(value).__name__}, which cannot be sent to a worker")


def _restore(pairs: dict[str, Any]) -> Any:
    if len(pairs) == 1 and _BYTES_KEY in pairs:
        return base64.b64decode(pairs[_BYTES_KEY])
    return pairs


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame: four bytes of length, big-endian, and UTF-8 JSON."""
    # `surrogatepass` is needed nowhere: ensure_ascii escapes lone surrogates of bad decodes.
    body = json.dumps(to_plain(message, "message"), ensure_ascii=True).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message in a frame's body. Raises FrameError on anything but a JSON object."""
    try:
        message = json.loads(body, object_hook=_restore)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError("a message is a JSON object")
    return message


class Channel:
    """Frames over two pipe ends, each wait bounded by a deadline on the monotonic clock.

    Both ends are non-blocking, because a worker that hangs stops reading as well as writing and
    a full pipe would block the trainer for ever.
    """

    def __init__(self, read_fd: int, write_fd: int, longest: int = MAX_FRAME_BYTES) -> None:
        """``longest`` bounds the frames that are received, in bytes."""
        self._read_fd, self._write_fd, self._longest = read_fd, write_fd, longest
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Mapping[str, Any], deadline: float | None = None) -> None:
        """Raises DeadlineExceededError, ChannelClosedError, FrameError."""
        self.send_frame(encode(message), deadline)

    def send_frame(self, frame: bytes, deadline: float | None = None) -> None:
        """Send what `encode` made. Raises DeadlineExceededError, ChannelClosedError."""
        view = memoryview(frame)
        while view:
            try:
                view = view[os.write(self._write_fd, view[: 1 << 20]) :]
            except BlockingIOError:
                self._wait(self._write_fd, selectors.EVENT_WRITE, deadline)
            except (BrokenPipeError, OSError) as error:
                raise ChannelClosedError(str(error)) from error

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Raises DeadlineExceededError, ChannelClosedError, FrameError."""
        (length,) = _HEADER.unpack(self._read_exactly(_HEADER.size, deadline))
        if length > self._longest:
            raise FrameError(f"frame of {length} bytes announced")
        return decode(self._read_exactly(length, deadline))

    def _read_exactly(self, count: int, deadline: float | None) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = os.read(self._read_fd, min(count, 1 << 20))
            except BlockingIOError:
                self._wait(self._read_fd, selectors.EVENT_READ, deadline)
                continue
            if not part:
                raise ChannelClosedError("end of stream")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    @staticmethod
    def _wait(fd: int, event: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceededError("deadline passed")
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            if not selector.select(left):
                raise DeadlineExceededError("deadline passed")
