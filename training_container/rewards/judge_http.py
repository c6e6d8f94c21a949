"""A judge outside the job: any OpenAI-compatible service, or a SageMaker endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from contracts.rewards import JudgeReward
from training_container.rewards.endpoint import CallError, Connection, Endpoint
from training_container.rewards.interface import Failure, FailureKind
from training_container.rewards.judge import Conversation, Judgement, seed_of

__all__ = ["HttpAsker"]

_HOW_TO_START = (
    "Start it first, for example `vllm serve MODEL --port 8000` or `swift deploy --model MODEL`, "
    "on devices the training does not use, and give `url` as http://HOST:8000/v1."
)


class HttpAsker:
    """Asks over `POST chat/completions`."""

    def __init__(self, judge: JudgeReward, key: str | None = None) -> None:
        assert judge.endpoint is not None
        self._judge = judge
        self._endpoint = Endpoint(judge.endpoint, key)
        self._model: str | None = judge.endpoint.model

    def prepare(self) -> str | None:
        self._model = self._endpoint.model(_HOW_TO_START)
        return self._model

    def ask(
        self, conversations: Sequence[Conversation], timeout_seconds: float
    ) -> list[list[Judgement] | Failure]:
        return self._endpoint.batch(
            [self._call(conversation) for conversation in conversations], timeout_seconds
        )

    def _call(
        self, conversation: Conversation
    ) -> Callable[[Connection], Awaitable[list[Judgement]]]:
        body: dict[str, Any] = {
            "messages": [dict(message) for message in conversation],
            "temperature": self._judge.temperature,
            "max_tokens": self._judge.max_tokens,
            "n": self._judge.choices,
            "seed": seed_of(conversation),
        }
        if self._model is not None:
            body["model"] = self._model

        async def call(connection: Connection) -> list[Judgement]:
            return _judgements(await connection.post("chat/completions", body))

        return call

    def metrics(self) -> dict[str, float]:
        counts = self._endpoint.counts
        return {
            "calls": counts.calls,
            "retries": counts.retries,
            "refused": counts.refused,
            "breaker_open": float(self._endpoint.breaker.open),
        }

    def close(self) -> None:
        """Connections end with each batch."""


def _judgements(answer: Any) -> list[Judgement]:
    try:
        return [_judgement(choice) for choice in answer["choices"]]
    except (KeyError, TypeError, AttributeError) as error:
        shown = str(answer)[:200]
        raise CallError(
            f"answer is no chat completion: {shown}", kind=FailureKind.UNPARSABLE
        ) from error


def _judgement(choice: Any) -> Judgement:
    text = choice["message"]["content"]
    finished = choice.get("finish_reason") != "length"
    return Judgement(text if isinstance(text, str) else "", finished)
