"""A generative reward model: asked in words, answering in words that become a number.

Where the judge runs is behind `Asker`: `judge_http.py` outside the job, `judge_local.py` in it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.rewards import JudgeReward, RewardSpec
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    RewardRequest,
    Sample,
    Scores,
)
from training_container.rewards.judge_cache import JudgementCache
from training_container.rewards.judge_reader import JudgementReader

__all__ = ["Asker", "Conversation", "JudgeSource", "Judgement", "conversation_text", "seed_of"]

_SHOWN_CHARACTERS = 200
_NOTHING_SAID = Failure(FailureKind.UNPARSABLE, "no judgement")

Conversation = tuple[Mapping[str, str], ...]
"""What a judge is asked: a system message, when there is one, and a user message."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge has said once."""

    text: str
    finished: bool = True
    """False: cut off at `max_tokens`; what it would have come to is unknown."""


class Asker(Protocol):
    """Puts conversations to a model."""

    def prepare(self) -> str | None:
        """Load or probe. Returns the model's name. Raises RewardConfigError."""

    def ask(
        self, conversations: Sequence[Conversation], timeout_seconds: float
    ) -> list[list[Judgement] | Failure]:
        """For each conversation the judgements, or why there are none."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the last `ask`."""

    def close(self) -> None:
        """Free what was loaded."""


@dataclass(frozen=True, slots=True)
class _Judged:
    value: float | None
    failure: Failure | None


class JudgeSource:
    """Scores completions by asking a judge about each distinct one.

    Several choices are averaged over those that parse; when none does the sample failed, with the
    kind of its last judgement.
    """

    def __init__(
        self,
        spec: RewardSpec,
        asker: Asker,
        cache: JudgementCache | None = None,
        reader: JudgementReader | None = None,
    ) -> None:
        """``cache`` holds judgements of earlier incarnations; in memory when None."""
        assert spec.judge is not None
        self.name = spec.name
        self._judge: JudgeReward = spec.judge
        self._timeout_seconds = spec.timeout_seconds
        self._asker = asker
        self._cache = JudgementCache() if cache is None else cache
        self._reader = JudgementReader(spec) if reader is None else reader
        self._model: str | None = None
        self._settings = spec.judge.model_dump_json(exclude={"cache", "combine", "combine_with"})
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            self._query = environment.from_string(spec.judge.query_template)
        except jinja2.TemplateSyntaxError as error:
            raise RewardConfigError(
                f"reward {spec.name!r}: query_template, line {error.lineno}: {error.message}"
            ) from error

    def prepare(self) -> None:
        self._model = self._asker.prepare()
        self._reader.prepare()

    def confinement(self) -> Mapping[str, str]:
        return self._reader.confinement()

    def close(self) -> None:
        self._asker.close()
        self._reader.close()
        self._cache.close()

    def score(self, request: RewardRequest) -> Scores:
        started = time.monotonic()
        scores = Scores([None] * len(request))
        asked: dict[str, Conversation] = {}
        keys: list[str | None] = []
        settings = f"{self._model} {self._settings}"
        for index, sample in enumerate(request.samples):
            try:
                conversation = self._conversation(sample)
            except Exception as error:  # noqa: BLE001 - a template may do anything with a row
                detail = f"query_template: {type(error).__name__}: {error}"
                scores.failures[index] = Failure(FailureKind.EXCEPTION, detail)
                keys.append(None)
                continue
            key = f"{index}"
            if self._judge.cache:
                key = JudgementCache.key(settings, conversation)
            keys.append(key)
            asked[key] = conversation
        known: dict[str, _Judged] = {}
        if self._judge.cache:
            known = {key: _Judged(one, None) for key, one in self._cache.find(asked).items()}
            asked = {key: one for key, one in asked.items() if key not in known}
        asking_seconds = self._timeout_seconds - self._reader.seconds
        left = max(0.0, asking_seconds - (time.monotonic() - started))
        known |= self._judge_all(asked, left)
        for index, key in enumerate(keys):
            if key is None:
                continue
            one = known[key]
            scores.values[index] = one.value
            if one.failure is not None:
                scores.failures[index] = one.failure
        wanted = sum(key is not None for key in keys)
        scores.metrics = {"asked": len(asked), "cached": wanted - len(asked)}
        scores.metrics |= self._asker.metrics()
        return scores

    def _judge_all(self, asked: Mapping[str, Conversation], left: float) -> dict[str, _Judged]:
        answers = self._asker.ask(list(asked.values()), left)
        said = [one for answer in answers if not isinstance(answer, Failure) for one in answer]
        read = iter(self._reader.read([one.text for one in said if one.finished]))
        judged = {
            key: _Judged(None, answer)
            if isinstance(answer, Failure)
            else _average([next(read) if one.finished else _cut_off(one) for one in answer])
            for key, answer in zip(asked, answers, strict=True)
        }
        if self._judge.cache:
            # A failure may pass; only a judgement is kept.
            self._cache.add({key: v for key, one in judged.items() if (v := one.value) is not None})
        return judged

    def _conversation(self, sample: Sample) -> Conversation:
        messages = [*sample.prompt, {"role": "assistant", "content": sample.completion}]
        query = self._query.render(
            {
                **sample.columns,
                "conversation": conversation_text(messages),
                "messages": messages,
                "completion": sample.completion,
                "ground_truth": sample.ground_truth,
            }
        )
        user = {"role": "user", "content": query}
        if self._judge.system is None:
            return (user,)
        return ({"role": "system", "content": self._judge.system}, user)


def _cut_off(judgement: Judgement) -> Failure:
    shown = judgement.text[-_SHOWN_CHARACTERS:]
    return Failure(FailureKind.UNPARSABLE, f"cut off at max_tokens: {shown!r}")


def _average(read: Sequence[float | Failure]) -> _Judged:
    values = [one for one in read if not isinstance(one, Failure)]
    if values:
        return _Judged(sum(values) / len(values), None)
    failed = [one for one in read if isinstance(one, Failure)]
    return _Judged(None, failed[-1] if failed else _NOTHING_SAID)


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """`User: …`, `Assistant: …`, a message a paragraph; empty ones are left out."""
    lines = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):  # parts of a multimodal message
            content = " ".join(str(part.get("text", "")) for part in content)
        if content:
            lines.append(f"{str(message['role']).capitalize()}: {content}")
    return "\n\n".join(lines)


def _digest(conversation: Conversation) -> str:
    text = json.dumps([dict(message) for message in conversation], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def seed_of(conversation: Conversation, choice: int = 0) -> int:
    """A sampling seed that depends on what is asked alone, so that a resumed run asks alike."""
    return (int(_digest(conversation)[:8], 16) + choice) % (2**31)
