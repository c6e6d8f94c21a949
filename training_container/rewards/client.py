"""A judge for simple cases: one question, one answer, for use inside a reward file.

    from training_container.rewards.client import JudgeClient

    judge = JudgeClient("http://judge.internal:8000/v1")   # fails here when the service is down

    def polite(completions):
        return [judge.score(f"Is this polite? {text}") for text in completions]

The file's source needs `network: true`. Questions go one after another; a `judge` source asks many
at once, retries, and remembers.
"""

from __future__ import annotations

from typing import Any

import httpx

from contracts.rewards import JudgeParserSpec
from training_container.rewards.judge_parser import parse_judgement

__all__ = ["JudgeClient"]


class JudgeClient:
    """Synchronous calls to an OpenAI-compatible service."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout_seconds: float = 60.0,
        parser: JudgeParserSpec | None = None,
    ) -> None:
        """Asks the service for its models at once. Raises ConnectionError that says how to start
        it, and ValueError when it serves several and ``model`` names none of them."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=timeout_seconds
        )
        self._parser = parser or JudgeParserSpec()
        try:
            served = [entry["id"] for entry in self._get("/models")["data"]]
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"no judge at {url}: {error}. Start it, for example with `vllm serve MODEL`."
            ) from error
        if model is None and len(served) == 1:
            model = served[0]
        if model not in served:
            raise ValueError(f"`model` must be one of {', '.join(served)}, not {model!r}")
        self.model = model

    def ask(self, question: str, *, system: str | None = None, **sampling: Any) -> str:
        """The judge's words. Raises httpx.HTTPError; a sample it is raised for has failed."""
        return str(self._choice(question, system, sampling)["message"]["content"] or "")

    def score(self, question: str, *, system: str | None = None, **sampling: Any) -> float | None:
        """The judge's words as a number in [0, 1], or None when they hold none or were cut off."""
        choice = self._choice(question, system, sampling)
        if choice.get("finish_reason") == "length":
            return None
        return parse_judgement(choice["message"]["content"] or "", self._parser).value

    def _choice(self, question: str, system: str | None, sampling: dict[str, Any]) -> Any:
        messages = [{"role": "system", "content": system}] if system else []
        body = {"model": self.model, "messages": [*messages, _user(question)], **sampling}
        response = self._http.post("/chat/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]

    def _get(self, path: str) -> Any:
        response = self._http.get(path)
        response.raise_for_status()
        return response.json()


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}
