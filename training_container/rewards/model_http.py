"""An outcome reward model served by vLLM (`vllm serve MODEL --runner pooling --convert classify`).

Asked for the number before the activation (`use_activation: false`), which is `logits[:, 0]` as the
in-process model gives it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.rewards import RewardSpec
from training_container.rewards.endpoint import CallError, Connection, Endpoint
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    RewardRequest,
    Sample,
    Scores,
)

__all__ = ["HttpModelSource"]

_HOW_TO_START = (
    "Start it first, for example `vllm serve MODEL --runner pooling --convert classify`, "
    "and give `url` as http://HOST:8000."
)


class HttpModelSource:
    """Scores conversations over `POST classify`."""

    def __init__(self, spec: RewardSpec, files: Path, key: str | None = None) -> None:
        assert spec.model is not None
        assert spec.model.endpoint is not None
        self.name = spec.name
        self._timeout_seconds = spec.timeout_seconds
        # vLLM serves its model list below /v1 and the classifier beside it.
        address = spec.model.endpoint
        root = None if address.url is None else address.url.rstrip("/").removesuffix("/v1")
        self._endpoint = Endpoint(address.model_copy(update={"url": root}), key)
        self._model: str | None = address.model
        self._template: str | None = None
        if spec.model.template_file is not None:
            try:
                self._template = (files / spec.model.template_file).read_text("utf-8")
            except OSError as error:
                raise RewardConfigError(
                    f"template_file {spec.model.template_file}: {error.strerror}"
                ) from error

    def prepare(self) -> None:
        self._model = self._endpoint.model(_HOW_TO_START, models_path="v1/models")

    def confinement(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Connections end with each batch."""

    def score(self, request: RewardRequest) -> Scores:
        work = [self._call(sample) for sample in request.samples]
        scores = Scores([None] * len(request))
        for index, one in enumerate(self._endpoint.batch(work, self._timeout_seconds)):
            if isinstance(one, Failure):
                scores.failures[index] = one
            else:
                scores.values[index] = one
        return scores

    def _call(self, sample: Sample) -> Callable[[Connection], Awaitable[float]]:
        said = [dict(message) for message in sample.prompt]
        body: dict[str, Any] = {
            "messages": [*said, {"role": "assistant", "content": sample.completion}],
            "use_activation": False,
        }
        if self._model is not None:
            body["model"] = self._model
        if self._template is not None:
            body["chat_template"] = self._template

        async def call(connection: Connection) -> float:
            return _logit(await connection.post("classify", body))

        return call


def _logit(answer: Any) -> float:
    try:
        logit = float(answer["data"][0]["probs"][0])
    except OverflowError:  # a whole number above every float
        logit = math.inf
    except (KeyError, IndexError, TypeError, ValueError) as error:
        shown = str(answer)[:200]
        raise CallError(
            f"answer is no classification: {shown}", kind=FailureKind.UNPARSABLE
        ) from error
    if not math.isfinite(logit):
        raise CallError(f"a logit of {logit}", kind=FailureKind.NOT_FINITE)
    return logit
