"""Clients, and the sorting of AWS errors into ours."""

from __future__ import annotations

import functools
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
)

from lambdas.errors import TransientError

__all__ = [
    "AWS_ERRORS",
    "as_transient",
    "blames_argument",
    "client",
    "error_code",
    "error_message",
    "refused_call",
    "resource",
]

AWS_ERRORS = (ClientError, BotoCoreError)
_CONNECTION_ERRORS = (HTTPClientError, EndpointConnectionError, ConnectionClosedError)
# CreateTrainingJob's rate quota is low: sixteen at once were seen to throttle. Adaptive mode slows
# down.
_CONFIG = Config(
    retries={"mode": "adaptive", "max_attempts": 8}, connect_timeout=5, read_timeout=60
)
_TRANSIENT = {
    "ThrottlingException", "Throttling", "TooManyRequestsException", "RequestLimitExceeded",
    "ProvisionedThroughputExceededException", "SlowDown", "ServiceUnavailable",
    "InternalServerError", "InternalFailure", "InternalError", "ServiceUnavailableException",
    "RequestTimeout", "TransactionInProgressException", "TransactionConflictException",
}  # fmt: skip


@functools.cache
def client(service: str) -> Any:
    """The process's client of ``service``."""
    return boto3.client(service, config=_CONFIG)


@functools.cache
def resource(service: str) -> Any:
    """The process's resource of ``service``."""
    return boto3.resource(service, config=_CONFIG)


def error_code(error: ClientError) -> str:
    """AWS's name of the error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def error_message(error: ClientError) -> str:
    """AWS's words."""
    return str(error.response.get("Error", {}).get("Message", "")) or str(error)


def blames_argument(error: ClientError | BotoCoreError) -> bool:
    """Whether AWS finds fault with what was asked: a page token of another list, say."""
    codes = ("ValidationException", "InvalidParameterException")
    return isinstance(error, ClientError) and error_code(error) in codes


def refused_call(error: ClientError | BotoCoreError) -> str:
    """What failed, without AWS's words: those name roles and resources of the account."""
    if isinstance(error, ClientError):
        return f"{error.operation_name}: {error_code(error)}"
    return type(error).__name__


def as_transient(error: ClientError | BotoCoreError) -> TransientError | None:
    """The error as one worth retrying, or None."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if error_code(error) in _TRANSIENT or "Rate exceeded" in str(error) or status >= 500:
            return TransientError(f"{error.operation_name}: {error_message(error)}")
        return None
    return TransientError(str(error)) if isinstance(error, _CONNECTION_ERRORS) else None
