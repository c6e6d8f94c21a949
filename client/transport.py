"""Requests to the hub's HTTP API: signed with SigV4, repeated where that is safe, errors as
exceptions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from pydantic import ValidationError

from client.settings import ConfigurationError, Settings, is_loopback
from contracts.api import ProblemDocument

__all__ = ["ApiError", "Transport", "UnreachableError"]

_RETRIED = frozenset({429, 500, 502, 503, 504})
_TRIES = 4


class ApiError(RuntimeError):
    """The API refused; `problem` is its problem+json document, `problem.problems` what to mend."""

    def __init__(self, problem: ProblemDocument) -> None:
        self.problem = problem
        lines = [f"{problem.title} ({problem.status}): {problem.detail}"]
        lines += [f"  {p.path}: {p.reason}. {p.fix}" for p in problem.problems]
        super().__init__("\n".join(lines))


class UnreachableError(ConnectionError):
    """No answer from the API's address after several tries."""


class Transport:
    """Connections to one hub's API.

    Raises:
        ConfigurationError: when there are no credentials to sign with.
    """

    def __init__(self, settings: Settings) -> None:
        credentials = settings.session.get_credentials()
        if credentials is None:
            raise ConfigurationError(
                "no AWS credentials: configure a profile or run `aws sso login`"
            )
        self._settings = settings
        self._signer = SigV4Auth(credentials, "execute-api", settings.region)
        # With a transport of its own the client asks no proxy of the environment.
        direct = httpx.HTTPTransport() if is_loopback(settings.api_url) else None
        self._http = httpx.Client(timeout=httpx.Timeout(35, connect=10), transport=direct)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Sign and send; try again what can be repeated safely.

        A POST is repeated only with an Idempotency-Key: without one a lost answer may hide a deed.
        """
        params = {key: str(value) for key, value in (query or {}).items() if value is not None}
        url = str(httpx.URL(f"{self._settings.api_url}/v1{path}", params=params))
        content = None if body is None else json.dumps(body).encode()
        repeatable = method != "POST" or "Idempotency-Key" in (headers or {})
        for attempt in range(1, _TRIES + 1):
            last = attempt == _TRIES or not repeatable
            try:
                response = self._http.request(
                    method,
                    url,
                    content=content,
                    headers=self._signed(method, url, content, headers),
                )
            except httpx.TransportError as error:
                if last:
                    raise UnreachableError(f"{self._settings.api_url}: {error}") from error
            else:
                if response.is_success:
                    return response
                if last or response.status_code not in _RETRIED:
                    raise _api_error(response)
            time.sleep(0.2 * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _signed(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str] | None
    ) -> dict[str, str]:
        given = {"Accept": "application/json", **(headers or {})}
        if content is not None:
            given["Content-Type"] = "application/json"
        request = AWSRequest(method=method, url=url, data=content, headers=given)
        self._signer.add_auth(request)
        return dict(request.headers.items())


def _api_error(response: httpx.Response) -> ApiError:
    """The API's own problem document, or one for answers of API Gateway itself (403, 503)."""
    try:
        return ApiError(ProblemDocument.model_validate_json(response.content))
    except ValidationError:
        return ApiError(
            ProblemDocument(
                type="about:blank",
                title=response.reason_phrase or "HTTP error",
                status=response.status_code,
                detail=response.text[:500] or "the answer has no body",
                request_id=response.headers.get("apigw-requestid", ""),
            )
        )
