"""Other Lambda functions of the stack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lambdas.adapters.aws import client
from lambdas.errors import TransientError

__all__ = ["invoke_function"]


def invoke_function(name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function and wait for its answer.

    Raises:
        TransientError: it failed; its log says why.
    """
    answer = client("lambda").invoke(FunctionName=name, Payload=json.dumps(payload).encode())
    body = json.loads(answer["Payload"].read())
    if answer.get("FunctionError"):
        raise TransientError(f"{name} failed: {body.get('errorMessage', body)}")
    result: dict[str, Any] = body
    return result
