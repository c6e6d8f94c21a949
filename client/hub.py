"""The hub's HTTP API as one class, signed with SigV4, for notebooks and the command line."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from client.chat import answer_text, deltas
from client.run_files import prepare
from client.settings import Settings, load_settings
from client.transport import ApiError, Transport, UnreachableError
from client.upload import Progress, Uploader
from contracts.api import (
    AttemptList,
    AttemptView,
    CheckpointList,
    CheckpointView,
    DeleteEndpointView,
    EndpointList,
    EndpointView,
    InfoView,
    LogLine,
    LogsPage,
    MetricsPage,
    ProblemDocument,
    RecipeList,
    RecipeView,
    RewardCatalogue,
    RunPage,
    RunSummary,
    RunView,
    TimelineEntry,
    TimelinePage,
    ValidationView,
)
from contracts.problems import InvalidInputError, Problem
from contracts.reward_trial import RewardTestRequest, RewardTestView
from contracts.states import RunState, is_terminal

__all__ = ["NOT_FOUND", "ApiError", "Hub", "RunFailedError", "UnreachableError"]

ModelT = TypeVar("ModelT", bound=BaseModel)
NOT_FOUND = 404


class RunFailedError(RuntimeError):
    """A run that was waited for did not succeed."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        super().__init__(f"run {run.run_id} is {run.state}: {run.reason or 'no reason given'}")


class Hub:
    """Client of one hub.

    Args:
        api_url: the stack's `ApiUrl` output; default `GRPOHUB_API_URL`, then the embedded mode.
        settings: instead of `api_url`, when they are already loaded.

    Raises:
        ConfigurationError: when nothing says where the hub is.
    """

    def __init__(self, api_url: str | None = None, *, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings(api_url)
        self._transport = Transport(self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # Runs

    def info(self) -> InfoView:
        """Bucket, region and versions of the hub."""
        return self._get(InfoView, "/info")

    def submit(
        self,
        run_file: str | Path | Mapping[str, Any],
        *,
        folder: Path | None = None,
        progress: Progress | None = None,
        idempotency_key: str | None = None,
    ) -> RunView:
        """Check a run file, upload the local data and models it names, and start the run.

        Args:
            run_file: path of a run file, or its content as data.
            folder: what local paths are relative to; default the run file's own folder.
            progress: told of each upload.
            idempotency_key: the same key and content give the same run; default a new one.

        Raises:
            InvalidInputError: with everything that is wrong with the file or with what it names.
            ApiError: when the hub refuses.
        """
        prepared = prepare(run_file, folder=folder)
        uploads = prepared.uploads()
        document = prepared.document
        if uploads:
            uploader = Uploader(self.settings.aws("s3"), self.info().bucket, progress)
            document = prepared.with_sources({item: uploader.upload(item) for item in uploads})
        return self.create_run(document, prepared.files, idempotency_key=idempotency_key)

    def create_run(
        self,
        spec: Mapping[str, Any],
        files: Mapping[str, str] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> RunView:
        """Start a run whose data and models are already where the hub can read them."""
        key = idempotency_key or uuid.uuid4().hex
        body = {"spec": dict(spec), "files": dict(files or {})}
        return self._send(RunView, "POST", "/runs", body, headers={"Idempotency-Key": key})

    def validate(
        self, spec: Mapping[str, Any], files: Mapping[str, str] | None = None
    ) -> ValidationView:
        """What the hub thinks of a run file, without starting it."""
        body = {"spec": dict(spec), "files": dict(files or {})}
        return self._send(ValidationView, "POST", "/runs/validate", body)

    def runs(self, *, state: RunState | None = None, limit: int = 20) -> list[RunSummary]:
        """The newest runs, at most ``limit``."""
        found: list[RunSummary] = []
        token: str | None = None
        while len(found) < limit:
            page = self._get(
                RunPage, "/runs", limit=min(100, limit - len(found)), state=state, next_token=token
            )
            found += page.runs
            token = page.next_token
            if token is None:
                break
        return found[:limit]

    def run(self, run_id: str) -> RunView:
        """One run in full."""
        return self._get(RunView, f"/runs/{_quoted(run_id)}")

    def wait(
        self,
        run_id: str,
        *,
        seconds_between: float = 5.0,
        timeout: float | None = None,
        seen: Callable[[RunView], None] | None = None,
    ) -> RunView:
        """The run once it has succeeded; ``seen`` is called with each observation.

        Raises:
            RunFailedError: when it ends otherwise.
            TimeoutError: when it has not ended after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            run = self.run(run_id)
            if seen is not None:
                seen(run)
            if is_terminal(run.state):
                if run.state is not RunState.SUCCEEDED:
                    raise RunFailedError(run)
                return run
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {run_id} is still {run.state} after {timeout} s")
            time.sleep(seconds_between)

    def cancel(self, run_id: str) -> RunView:
        """Stop a run; its training job saves a checkpoint first if it can."""
        return self._send(RunView, "POST", f"/runs/{_quoted(run_id)}/cancel", {})

    def resume(self, run_id: str) -> RunView:
        """Go on with a failed or cancelled run from its newest complete checkpoint."""
        return self._send(RunView, "POST", f"/runs/{_quoted(run_id)}/resume", {})

    def attempts(self, run_id: str) -> list[AttemptView]:
        """Training jobs of a run, oldest first."""
        return self._get(AttemptList, f"/runs/{_quoted(run_id)}/attempts").attempts

    def checkpoints(self, run_id: str, *, stage: int | None = None) -> list[CheckpointView]:
        """Checkpoints of a stage (index; default the latest begun), newest first."""
        path = f"/runs/{_quoted(run_id)}/checkpoints"
        return self._get(CheckpointList, path, stage=stage).checkpoints

    def metrics(
        self, run_id: str, *, stage: int | None = None, from_step: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Metric rows of a stage (index; default the latest begun) by rising step."""
        while True:
            path = f"/runs/{_quoted(run_id)}/metrics"
            page = self._get(MetricsPage, path, stage=stage, from_step=from_step)
            yield from page.rows
            if page.next_step is None:
                return
            stage, from_step = page.stage_index, page.next_step

    def logs(
        self,
        run_id: str,
        *,
        stage: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        seconds_between: float = 2.0,
    ) -> Iterator[LogLine]:
        """Log lines of an attempt (default the latest); with ``follow`` until the attempt ends."""
        token: str | None = None
        while True:
            path = f"/runs/{_quoted(run_id)}/logs"
            page = self._get(LogsPage, path, stage=stage, attempt=attempt, next_token=token)
            yield from page.lines
            if page.complete or (not page.lines and not follow):
                return
            token = page.next_token
            if not page.lines:
                time.sleep(seconds_between)

    def timeline(self, run_id: str) -> list[TimelineEntry]:
        """What happened to a run, oldest first."""
        entries: list[TimelineEntry] = []
        token: str | None = None
        while True:
            path = f"/runs/{_quoted(run_id)}/timeline"
            page = self._get(TimelinePage, path, next_token=token)
            entries += page.entries
            token = page.next_token
            if token is None:
                return entries

    # Endpoints

    def deploy(self, run_id: str, deploy: Mapping[str, Any] | None = None) -> RunView:
        """Deploy the model of a run, with other settings than its run file's if given."""
        body = {} if deploy is None else {"deploy": dict(deploy)}
        return self._send(RunView, "POST", f"/runs/{_quoted(run_id)}/deploy", body)

    def endpoints(self) -> list[EndpointView]:
        """All endpoints of the hub."""
        return self._get(EndpointList, "/endpoints").endpoints

    def endpoint(self, name: str) -> EndpointView:
        """One endpoint."""
        return self._get(EndpointView, f"/endpoints/{_quoted(name)}")

    def endpoint_of(self, name: str) -> EndpointView:
        """The endpoint called ``name``, or the one that serves the run of that id.

        Raises:
            InvalidInputError: when the run has no endpoint, or its endpoint serves another run now.
        """
        try:
            return self.endpoint(name)
        except ApiError as error:
            if error.problem.status != NOT_FOUND:
                raise
        try:
            run = self.run(name)
        except ApiError as error:
            if error.problem.status != NOT_FOUND:
                raise
            reason = "is neither an endpoint nor a run of this hub"
            raise _no_endpoint(name, reason, "See `grpohub endpoints`.") from error
        if run.endpoint_name is None:
            raise _no_endpoint(name, "is a run without an endpoint", f"grpohub deploy {name}")
        view = self.endpoint(run.endpoint_name)
        if view.run_id != name:
            reason = f"was served by {view.name}, which serves {view.run_id} now"
            fix = f"Deploy it again under a name of its own: grpohub deploy {name} --file …"
            raise _no_endpoint(name, reason, fix)
        return view

    def delete_endpoint(self, name: str) -> DeleteEndpointView:
        """Delete an endpoint with its configuration and model."""
        return self._send(DeleteEndpointView, "DELETE", f"/endpoints/{_quoted(name)}", None)

    def chat(self, endpoint: str, messages: list[dict[str, Any]], **settings: Any) -> str:
        """An endpoint's answer to a chat; ``settings`` as in OpenAI's API (`max_tokens`, …).

        The API answers within 30 s or not at all; `stream_chat` has no such limit.

        Raises:
            AnswerError: when the endpoint's answer is no chat completion.
        """
        body = {"messages": messages, **settings}
        answer = self._transport.request("POST", f"/endpoints/{_quoted(endpoint)}/chat", body)
        try:
            document = answer.json()
        except ValueError as error:
            raise _not_the_hubs(answer) from error
        return answer_text(document)

    def stream_chat(
        self, endpoint: str, messages: list[dict[str, Any]], **settings: Any
    ) -> Iterator[str]:
        """The answer piece by piece, straight from SageMaker.

        Raises:
            AnswerError: when the answer breaks off.
        """
        view = self.endpoint(endpoint)
        runtime: Any = self.settings.aws("sagemaker-runtime")
        request: dict[str, Any] = {
            "EndpointName": endpoint,
            "ContentType": "application/json",
            "Body": json.dumps({"messages": messages, "stream": True, **settings}),
        }
        if view.inference_component is not None:
            request["InferenceComponentName"] = view.inference_component
        response = runtime.invoke_endpoint_with_response_stream(**request)
        chunks = (event["PayloadPart"]["Bytes"] for event in response["Body"])
        return deltas(chunks)

    # Rewards and recipes

    def rewards(self) -> RewardCatalogue:
        """The built-in rewards."""
        return self._get(RewardCatalogue, "/rewards")

    def test_rewards(self, request: RewardTestRequest) -> RewardTestView:
        """Score sample answers with reward sources in the hub's sandbox."""
        body = request.model_dump(mode="json", exclude_defaults=True)
        return self._send(RewardTestView, "POST", "/rewards:test", body)

    def recipes(self) -> list[str]:
        """Names of the registered recipes."""
        return self._get(RecipeList, "/recipes").recipes

    def recipe(self, name: str) -> RecipeView:
        """One recipe."""
        return self._get(RecipeView, f"/recipes/{_quoted(name)}")

    def put_recipe(self, name: str, yaml: str, files: Mapping[str, str]) -> RecipeView:
        """Register a run file that a data file under `uploads/<name>/` starts."""
        body = {"yaml": yaml, "files": dict(files)}
        return self._send(RecipeView, "PUT", f"/recipes/{_quoted(name)}", body)

    def delete_recipe(self, name: str) -> None:
        """Forget a recipe."""
        self._transport.request("DELETE", f"/recipes/{_quoted(name)}", None)

    # HTTP

    def _get(self, model: type[ModelT], path: str, **query: Any) -> ModelT:
        return _read(model, self._transport.request("GET", path, None, query=query))

    def _send(
        self,
        model: type[ModelT],
        method: str,
        path: str,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> ModelT:
        return _read(model, self._transport.request(method, path, body, headers=headers))


def _no_endpoint(name: str, reason: str, fix: str) -> InvalidInputError:
    return InvalidInputError([Problem("endpoint", name, reason, fix)], subject="chat")


def _quoted(part: str) -> str:
    return quote(part, safe="")


def _read(model: type[ModelT], response: httpx.Response) -> ModelT:
    """The answer as ``model``. Raises ApiError when something else than this hub has answered."""
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise _not_the_hubs(response) from error


def _not_the_hubs(response: httpx.Response) -> ApiError:
    return ApiError(
        ProblemDocument(
            type="about:blank",
            title="This is not the hub's answer",
            status=response.status_code,
            detail=f"{response.url} is another service, or a hub of another version. It said: "
            f"{response.text[:200]}",
            request_id=response.headers.get("apigw-requestid", ""),
        )
    )
