"""Stop the world inside one handler, to see what happens meanwhile."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["held"]


@contextmanager
def held(name: str) -> Iterator[tuple[threading.Event, Callable[[], None]]]:
    """Stop the world inside handler ``name`` once: (it is there, a function that lets it go on)."""
    module = importlib.import_module(f"lambdas.handlers.{name}")
    inside, go = threading.Event(), threading.Event()
    real = module.handler

    def waiting(event: dict[str, Any], context: Any) -> Any:
        inside.set()
        assert go.wait(60)
        return real(event, context)

    def release() -> None:
        module.handler = real
        go.set()

    module.handler = waiting
    try:
        yield inside, release
    finally:
        release()
