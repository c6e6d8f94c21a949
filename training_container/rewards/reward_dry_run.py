"""The hub's sandbox function: a Lambda that tries reward sources out, as training will run them.

Its zip holds this package and `contracts`, and its role may do nothing but write its log. What it
cannot run it refuses in words: models and judges, because it has neither weights nor a service to
ask; files that declare `network`, because Lambda's runtime API answers on this machine's loopback
and would hand other people's requests to the file.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.reward_trial import RewardTestRequest
from contracts.rewards import RewardSpec
from training_container.rewards.sources import SourceContext
from training_container.rewards.trial import columns_of, try_out

__all__ = ["handler"]

_START_SECONDS, _BATCH_SECONDS = 12.0, 10.0
"""Together within the function's timeout (`lambdas/functions.py`)."""
_OWN_MEMORY_MB = 384
_PR_SET_DUMPABLE = 4
_ELSEWHERE = "run `grpohub rewards test` on a machine with the training extra instead"


def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 (Lambda's signature)
    """Answer a checked `RewardTestRequest` with a `RewardTestView`."""
    _hide()
    asked = RewardTestRequest.model_validate(event)
    request = asked.model_copy(update={"rewards": [_bounded(spec) for spec in asked.rewards]})
    memory_mb = int(os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"]) - _OWN_MEMORY_MB
    with tempfile.TemporaryDirectory() as folder:
        for name, text in request.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        context_ = SourceContext(
            files=Path(folder),
            columns=columns_of(request),
            workers=1,
            start_seconds=_START_SECONDS,
            most_memory_mb=memory_mb,
        )
        view = try_out(request, context_, refusal=_refusal)
    return view.model_dump(mode="json")


def _bounded(spec: RewardSpec) -> RewardSpec:
    seconds = min(spec.timeout_seconds, _BATCH_SECONDS)
    return spec.model_copy(update={"timeout_seconds": seconds})


def _refusal(spec: RewardSpec) -> str | None:
    if spec.kind == "model":
        return f"the sandbox function loads no models and reaches no service; {_ELSEWHERE}"
    if spec.kind == "judge":
        return f"the sandbox function holds no judge and reaches none; {_ELSEWHERE}"
    if spec.network:
        return f"the sandbox function gives no code the network; {_ELSEWHERE}"
    if any(isinstance(value, Mapping) and set(value) == {"weights"} for value in
           spec.parameters.values()):  # fmt: skip
        return f"the sandbox function fetches no weights; {_ELSEWHERE}"
    return None


def _hide() -> None:
    """Close this process's memory and environment to processes of the same user.

    Lambda's machine refuses namespaces, and a worker process has this one's user.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
