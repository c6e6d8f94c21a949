"""Calls to a scoring service: capped, bounded in time, retried, and given up on while it is down.

A judge that answers slowly must not cost more than the batch's deadline, and one that is down must
not cost it for every batch: after a few calls that failed with all their retries, or that the
deadline ended while none was answered, the breaker opens, further calls fail at once, and after a
while a single call tries again.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import boto3
import httpx
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from contracts.rewards import EndpointSpec
from training_container.rewards.interface import Failure, FailureKind, RewardConfigError

__all__ = ["Breaker", "CallError", "Connection", "Endpoint"]

T = TypeVar("T")

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.5, 30.0
_PROBE_SECONDS = 10.0
_SHOWN_CHARACTERS = 300


class CallError(RuntimeError):
    """A call that did not come to an answer."""

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = FailureKind.UNREACHABLE,
        passing: bool = False,
        wait_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.passing, self.wait_seconds = kind, passing, wait_seconds


@dataclass(slots=True)
class Breaker:
    """Open after ``limit`` failures in a row; then one trial call every ``pause_seconds``."""

    limit: int = 8
    pause_seconds: float = 30.0
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _next_trial: float = 0.0

    @property
    def open(self) -> bool:
        return self._failures >= self.limit

    def allows(self) -> bool:
        """Whether a call may be made now; an open breaker lets one trial through per pause."""
        if not self.open:
            return True
        if self.clock() < self._next_trial:
            return False
        self._next_trial = self.clock() + self.pause_seconds
        return True

    def note(self, *, answered: bool) -> None:
        """Count the outcome of a call with all its retries."""
        self._failures = 0 if answered else self._failures + 1
        if self.open:
            self._next_trial = self.clock() + self.pause_seconds


@dataclass(slots=True)
class Counts:
    """What a batch of calls took."""

    calls: int = 0
    retries: int = 0
    answered: int = 0
    """Calls the service answered, be it by a refusal."""
    refused: int = 0
    """Calls the open breaker did not make."""


class Endpoint:
    """A scoring service as a run file names it. Use `batch` for many calls at once."""

    def __init__(self, spec: EndpointSpec, key: str | None = None) -> None:
        """Raises RewardConfigError for an address that is none."""
        try:
            httpx.URL(spec.url or "")
        except httpx.InvalidURL as error:
            raise RewardConfigError(
                f"endpoint url {spec.url!r}: {error}; give it as http://HOST:8000/v1"
            ) from error
        self.spec = spec
        self._key = key
        self.breaker = Breaker()
        self.counts = Counts()

    @property
    def address(self) -> str:
        """For messages to people."""
        return self.spec.url or f"SageMaker endpoint {self.spec.sagemaker_endpoint}"

    def batch(
        self,
        work: Sequence[Callable[[Connection], Awaitable[T]]],
        timeout_seconds: float,
    ) -> list[T | Failure]:
        """Do all of ``work``, at most `max_concurrency` at once, within the deadline.

        Work that is late is cancelled and reported as a timeout. What it raises is its own failure.
        """
        self.counts = Counts()
        return asyncio.run(self._batch(work, timeout_seconds))

    async def _batch(
        self, work: Sequence[Callable[[Connection], Awaitable[T]]], timeout_seconds: float
    ) -> list[T | Failure]:
        if not work:
            return []
        slots = asyncio.Semaphore(self.spec.max_concurrency)
        async with Connection(self.spec, self._key) as connection:
            tasks = [asyncio.create_task(self._guarded(one, connection, slots)) for one in work]
            await asyncio.wait(tasks, timeout=timeout_seconds)
            for task in tasks:
                task.cancel()  # no effect on those that are done
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        late = Failure(FailureKind.TIMEOUT, f"no answer within {timeout_seconds:g} s")
        results: list[T | Failure] = []
        for one in ended:
            if isinstance(one, asyncio.CancelledError):
                results.append(late)
            elif isinstance(one, CallError):
                results.append(Failure(one.kind, str(one)))
            elif isinstance(one, Exception):
                # Of one sample, such as a text that is no UTF-8: the others keep their scores.
                detail = f"{type(one).__name__}: {one}"
                results.append(Failure(FailureKind.EXCEPTION, detail))
            elif isinstance(one, BaseException):
                raise one
            else:
                results.append(one)
        return results

    async def _guarded(
        self,
        one: Callable[[Connection], Awaitable[T]],
        connection: Connection,
        slots: asyncio.Semaphore,
    ) -> T:
        async with slots:
            if not self.breaker.allows():
                self.counts.refused += 1
                raise CallError(f"{self.address} is down; calls are paused")
            try:
                result = await self._retried(one, connection)
            except CallError as error:
                # A refusal (400, 401) is an answer: the service is up.
                self._note(answered=not error.passing)
                raise
            except asyncio.CancelledError:
                # By the deadline. Where others were answered the service is up, with much to do.
                if not self.counts.answered:
                    self._note(answered=False)
                raise
            self._note(answered=True)
            return result

    def _note(self, *, answered: bool) -> None:
        self.counts.answered += answered
        self.breaker.note(answered=answered)

    async def _retried(
        self, one: Callable[[Connection], Awaitable[T]], connection: Connection
    ) -> T:
        for attempt in range(self.spec.max_retries + 1):
            self.counts.calls += 1
            try:
                return await self._timed(one, connection)
            except CallError as error:
                if not error.passing or attempt == self.spec.max_retries or self.breaker.open:
                    raise
                self.counts.retries += 1
                await asyncio.sleep(_delay(attempt, error.wait_seconds))
        raise AssertionError("the last attempt returns or raises")

    async def _timed(self, one: Callable[[Connection], Awaitable[T]], connection: Connection) -> T:
        seconds = self.spec.call_timeout_seconds
        try:
            return await asyncio.wait_for(one(connection), seconds)
        except TimeoutError as error:
            raise CallError(
                f"{self.address} did not answer within {seconds:g} s",
                kind=FailureKind.TIMEOUT,
                passing=True,
            ) from error

    def model(self, how_to_start: str, models_path: str = "models") -> str | None:
        """The model's name, after asking the service whether it is there at all.

        A SageMaker endpoint holds one model and needs no name. Raises RewardConfigError that says
        how to start the service.
        """
        if self.spec.sagemaker_endpoint is not None:
            return self.spec.model
        try:
            names = asyncio.run(self._models(models_path))
        except CallError as error:
            raise RewardConfigError(
                f"cannot use the service at {self.address}: {error}. {how_to_start}"
            ) from error
        wanted = self.spec.model
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted in names:
            return wanted
        listed = ", ".join(names) or "none"
        said = "`model` must choose one of" if wanted is None else f"{wanted!r} is not among"
        raise RewardConfigError(f"{self.address}: {said} the models served: {listed}")

    async def _models(self, path: str) -> list[str]:
        async with Connection(self.spec, self._key) as connection:
            try:
                answer = await asyncio.wait_for(connection.get(path), _PROBE_SECONDS)
            except TimeoutError as error:
                raise CallError(f"no answer within {_PROBE_SECONDS:g} s") from error
        try:
            return [str(entry["id"]) for entry in answer["data"]]
        except (KeyError, TypeError) as error:
            raise CallError(f"its list of models is not one: {str(answer)[:200]}") from error


def _delay(attempt: int, asked: float | None) -> float:
    """Exponential with jitter, so that the calls of a batch do not come back all at once."""
    longest = min(_FIRST_DELAY_SECONDS * 2**attempt, _LONGEST_DELAY_SECONDS)
    jittered = longest * random.uniform(0.5, 1.0)
    return jittered if asked is None else min(max(asked, jittered), _LONGEST_DELAY_SECONDS)


@dataclass(slots=True)
class Connection:
    """Requests to one service, for the life of one event loop."""

    spec: EndpointSpec
    key: str | None
    _http: httpx.AsyncClient = field(init=False)
    _threads: ThreadPoolExecutor = field(init=False)
    _sagemaker: Any = field(init=False, default=None)

    async def __aenter__(self) -> Connection:
        limit = self.spec.max_concurrency
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # each call is bounded as a whole by its caller
            limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
        )
        self._threads = ThreadPoolExecutor(max_workers=limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        # A thread in a request that hangs ends with botocore's read timeout; nobody waits for it.
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, path: str) -> Any:
        """The JSON answer. Raises CallError."""
        return await self._over_http("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer; a SageMaker endpoint has one path, whatever ``path`` is.

        Raises CallError.
        """
        if self.spec.sagemaker_endpoint is None:
            return await self._over_http("POST", path, body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._invoke, body)

    async def _over_http(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        assert self.spec.url is not None
        address = f"{self.spec.url.rstrip('/')}/{path}"
        try:
            response = await self._http.request(method, address, json=body)
        except httpx.DecodingError as error:
            detail = f"answer cannot be decompressed: {error}"
            raise CallError(detail, kind=FailureKind.UNPARSABLE) from error
        except httpx.TransportError as error:
            raise CallError(f"{type(error).__name__}: {error}", passing=True) from error
        if response.is_success:
            return _json(response.text)
        text = response.text[:_SHOWN_CHARACTERS]
        raise CallError(
            f"HTTP {response.status_code}: {text}",
            passing=response.status_code == httpx.codes.TOO_MANY_REQUESTS
            or response.is_server_error,
            wait_seconds=_seconds(response.headers.get("retry-after")),
        )

    def _invoke(self, body: dict[str, Any]) -> Any:
        """`InvokeEndpoint`, signed by boto3 with the job's role."""
        if self._sagemaker is None:
            settings = Config(
                read_timeout=self.spec.call_timeout_seconds,
                retries={"total_max_attempts": 1},
                max_pool_connections=self.spec.max_concurrency,
            )
            self._sagemaker = boto3.client("sagemaker-runtime", config=settings)
        try:
            answer = self._sagemaker.invoke_endpoint(
                EndpointName=self.spec.sagemaker_endpoint,
                ContentType="application/json",
                Body=json.dumps(body),
            )
            return _json(answer["Body"].read().decode("utf-8", "replace"))
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            # ModelError (424) carries the container's own status, 5xx while it is overloaded.
            status = error.response.get("OriginalStatusCode", status)
            passing = status == httpx.codes.TOO_MANY_REQUESTS or status >= 500
            raise CallError(str(error)[:_SHOWN_CHARACTERS], passing=passing) from error
        except BotoCoreError as error:
            raise CallError(str(error)[:_SHOWN_CHARACTERS], passing=True) from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text[:_SHOWN_CHARACTERS]
        raise CallError(f"answer is not JSON: {shown}", kind=FailureKind.UNPARSABLE) from error


def _seconds(header: str | None) -> float | None:
    try:
        seconds = math.nan if header is None else float(header)
    except ValueError:  # the header's other form is a date
        return None
    return None if math.isnan(seconds) else seconds
