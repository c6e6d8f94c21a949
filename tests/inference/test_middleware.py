"""What stands between the hosting platform and vLLM, without vLLM: headers and the shared port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import MutableMapping
from typing import Any

import pytest

from inference_container.middleware import ADAPTER_HEADER, ModelOfBody
from inference_container.vllm_server import share_port
from inference_container.waiting import WaitingRoom
from tests.inference.container import free_port


def behind(
    body: bytes, *, path: str = "/invocations", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[str | None, bytes]:
    """(adapter header, body) that the application sees of a request sent in two pieces."""
    pieces: list[dict[str, Any]] = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:], "more_body": False},
    ]
    seen: list[tuple[bytes | None, bytes]] = []

    async def receive() -> MutableMapping[str, Any]:
        return pieces.pop(0)

    async def send(_message: MutableMapping[str, Any]) -> None:
        raise AssertionError("the middleware answers nothing itself")

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        read, message = b"", {"more_body": True}
        while message["more_body"]:
            message = await receive()
            read += message["body"]
        seen.append((dict(scope["headers"]).get(ADAPTER_HEADER), read))

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(ModelOfBody(app)(scope, receive, send))
    ((header, read),) = seen
    return (None if header is None else header.decode()), read


def test_the_body_of_an_invocation_names_the_adapter() -> None:
    body = json.dumps({"model": "tuned", "prompt": "Hello"}).encode()
    assert behind(body) == ("tuned", body)


def test_a_header_that_the_platform_sent_stays() -> None:
    body = json.dumps({"model": "tuned", "prompt": "Hello"}).encode()
    assert behind(body, headers=((ADAPTER_HEADER, b"component"),)) == ("component", body)


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"[]", b"\xff\xfe\xfd", b'{"model": 3}', b'{"model": ""}', b'{"prompt": ""}'],
)
def test_a_body_that_names_no_model_passes_as_it_is(body: bytes) -> None:
    assert behind(body) == (None, body)


def test_other_paths_are_left_alone() -> None:
    body = b'{"model": "tuned"}'
    assert behind(body, path="/v1/completions") == (None, body)


def test_only_a_shared_port_can_be_bound_beside_the_waiting_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "bind", socket.socket.bind)  # put back afterwards
    port = free_port()
    room = WaitingRoom(port)
    try:
        with socket.socket() as early, pytest.raises(OSError, match="in use"):
            early.bind(("0.0.0.0", port))
        share_port(port)
        with socket.socket() as engine:
            engine.bind(("0.0.0.0", port))
    finally:
        room.close()
