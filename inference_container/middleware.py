"""ASGI middleware that names the engine in every answer. vLLM loads it by `--middleware`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["ENGINE_HEADER", "EngineHeader"]

ENGINE_HEADER = "x-grpohub-engine"
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


class EngineHeader:
    """Adds `x-grpohub-engine: <engine>/<version>` to HTTP responses."""

    def __init__(self, app: App, engine: str = "vllm") -> None:
        self._app = app
        version = importlib.metadata.version(engine)
        self._header = (ENGINE_HEADER.encode(), f"{engine}/{version}".encode())

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)
