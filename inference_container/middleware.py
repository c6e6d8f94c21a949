"""ASGI middleware around an engine's own routes. vLLM loads it by `--middleware`."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from inference_container.handover import take_over

__all__ = ["ADAPTER_HEADER", "ENGINE_HEADER", "EngineHeader", "ModelOfBody", "PortHandover"]

ENGINE_HEADER = "x-grpohub-engine"
ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class EngineHeader:
    """Adds `x-grpohub-engine: <engine>/<version>` to HTTP responses."""

    def __init__(self, app: App, engine: str = "vllm") -> None:
        self._app = app
        version = importlib.metadata.version(engine)
        self._header = (ENGINE_HEADER.encode(), f"{engine}/{version}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)


class PortHandover:
    """Takes the port over from the waiting room: servers listen once the start-up event is done."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_first(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                take_over()  # blocks a loop that has nothing else to do yet
            await send(message)

        await self._app(scope, receive, send_first if scope["type"] == "lifespan" else send)


class ModelOfBody:
    """Lets the body of an invocation name the model, as it does in OpenAI's API.

    vLLM's route for SageMaker overwrites the body's `model` with a header, or with nothing where
    there is none. Callers of InvokeEndpoint cannot send that header: whatever model they named,
    the base model would answer.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/invocations":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        name = _model_name(b"".join(message.get("body", b"") for message in messages))
        if name and ADAPTER_HEADER not in dict(scope["headers"]):
            header = (ADAPTER_HEADER, name.encode("latin-1", "replace"))
            scope["headers"] = [*scope["headers"], header]

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


def _model_name(body: bytes) -> str | None:
    """The body's `model`; None where the engine has to refuse the body anyway, or there is none."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    name = document.get("model") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None
