"""Chat messages as OpenAI's API has them, and its answers, whole or streamed."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contracts.problems import InvalidInputError, Problem

__all__ = ["AnswerError", "answer_text", "chat_messages", "deltas"]

_IMAGE_BYTES = 4_000_000
"""Images of one question. Base64 makes a third more of them, and both ways to an endpoint, Lambda
and InvokeEndpoint, take 6 MB."""


class AnswerError(RuntimeError):
    """An endpoint answered, but not with an answer to a chat."""


def chat_messages(
    question: str, *, system: str | None = None, images: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """The messages of one question; images come before the text, inline as data URLs.

    Raises:
        InvalidInputError: for a file that is no image, cannot be read, or is too large to send.
    """
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if not images:
        return [*messages, {"role": "user", "content": question}]
    parts = [_image_part(path) for path in images]
    size = sum(path.stat().st_size for path in images)
    if size > _IMAGE_BYTES:
        raise _wrong(
            ", ".join(map(str, images)),
            f"{size:,} bytes",
            "is more than a request to an endpoint holds",
            f"Send images of at most {_IMAGE_BYTES:,} bytes together.",
        )
    return [*messages, {"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def answer_text(document: Any) -> str:
    """The text of a whole answer. A model that was cut off while it thought has said nothing.

    Raises:
        AnswerError: when the document is no chat completion.
    """
    try:
        text = document["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        shown = json.dumps(document, ensure_ascii=False)[:500]
        raise AnswerError(f"the endpoint's answer is no chat completion: {shown}") from error
    return "" if text is None else str(text)


def deltas(chunks: Iterator[bytes]) -> Iterator[str]:
    """Text pieces of a server-sent event stream cut at arbitrary bytes.

    Raises:
        AnswerError: when the engine reports an error instead of going on.
    """
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise AnswerError(f"the answer broke off: {event['error'].get('message')}")
            for choice in event.get("choices", ()):
                text = choice.get("delta", {}).get("content")
                if text:
                    yield text


def _image_part(path: Path) -> dict[str, Any]:
    kind, _ = mimetypes.guess_type(path.name)
    if kind is None or not kind.startswith("image/"):
        raise _wrong(
            str(path), kind, "is no image by its name", "Name a .png, .jpg, .webp or .gif file."
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _wrong(
            str(path), None, error.strerror or str(error), "Name a file on this machine."
        ) from error
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _wrong(path: str, value: Any, reason: str, fix: str) -> InvalidInputError:
    return InvalidInputError([Problem(path, value, reason, fix)], subject="images")
