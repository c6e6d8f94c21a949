"""The HTTP interface: what vLLM's OpenAI server answers on the same paths."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from inference_container.middleware import EngineHeader
from inference_container.small.generation import Piece, SmallModel
from inference_container.small.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    parse_request,
)

__all__ = ["build_app"]


def build_app(model: SmallModel, names: list[str]) -> FastAPI:
    """The application; `names` are what requests may call the base model."""
    app = FastAPI(title="GRPO Hub small server", openapi_url=None)
    app.add_middleware(EngineHeader, engine="transformers")
    answers = _Answers(model, names)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:  # noqa: ARG001
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:  # noqa: ARG001
        refusal = RequestError(error.detail, status=error.status_code, kind=error.detail)
        return JSONResponse(refusal.body, status_code=error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:  # noqa: ARG001
        refusal = RequestError(str(error), status=500, kind="InternalServerError")
        return JSONResponse(refusal.body, status_code=500)

    @app.api_route("/ping", methods=["GET", "POST"])
    @app.get("/health")
    async def ping() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": answers.cards()}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answers.respond(parse_request(ChatRequest, await _body(request)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answers.respond(parse_request(CompletionRequest, await _body(request)))

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        """SageMaker has one path for every kind of request; the body says which it is."""
        document = await _body(request)
        if "messages" in document:
            return await answers.respond(parse_request(ChatRequest, document))
        if "prompt" in document:
            return await answers.respond(parse_request(CompletionRequest, document))
        raise RequestError("The body has neither `messages` nor `prompt`.")

    return app


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        RequestError: 400, as vLLM answers for every body that it cannot read, its type included.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        document = json.loads(await request.body())
    except ValueError as error:  # bad JSON and bad UTF-8
        raise RequestError(f"JSON decode error: {error}", kind="Bad Request") from error
    if not isinstance(document, dict):
        raise RequestError("The body is no JSON object.", kind="Bad Request")
    return document


class _Answers:
    """Requests to answers."""

    def __init__(self, model: SmallModel, names: list[str]) -> None:
        self._model, self._names = model, names
        self._created = int(time.time())

    def cards(self) -> list[dict[str, Any]]:
        """What `/v1/models` lists: the names of the base model, then its adapters."""
        base = {"object": "model", "created": self._created, "owned_by": "grpohub"}
        limit = self._model.limit
        cards = [
            {"id": name, **base, "root": name, "parent": None, "max_model_len": limit}
            for name in self._names
        ]
        return cards + [
            {"id": name, **base, "root": str(folder), "parent": self._names[0]}
            for name, folder in self._model.adapters.items()
        ]

    async def respond(self, request: ChatRequest | CompletionRequest) -> Response:
        """The answer, streamed when asked for.

        Raises:
            RequestError: before anything is sent, for whatever can be known by then.
        """
        adapter = self._adapter_of(request.model)
        if isinstance(request, ChatRequest):
            prompts = [
                self._model.chat_prompt(
                    [message.plain() for message in request.messages],
                    {
                        **request.chat_template_kwargs,
                        "add_generation_prompt": request.add_generation_prompt,
                        "continue_final_message": request.continue_final_message,
                    },
                )
            ]
        else:
            prompts = [self._model.text_prompt(prompt) for prompt in request.prompts]
        budgets = [self._model.token_budget(ids, request.token_limit) for ids in prompts]
        answer = _Answer(request, request.model or self._names[0], self._created_now())
        jobs = [
            (prompt, budget, choice)
            for prompt, budget in zip(prompts, budgets, strict=True)
            for choice in range(request.n)
        ]
        streams = [
            self._model.generate(prompt, request, budget=budget, adapter=adapter, choice=choice)
            for prompt, budget, choice in jobs
        ]
        spent = sum(len(prompt) for prompt in prompts)
        if request.stream:
            return StreamingResponse(
                answer.events(streams, prompt_tokens=spent), media_type="text/event-stream"
            )
        whole = await run_in_threadpool(answer.whole, streams, prompt_tokens=spent)
        return JSONResponse(whole)

    def _adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's model name means; None for the base model."""
        if name is None or name in self._names:
            return None
        if name in self._model.adapters:
            return name
        raise RequestError(
            f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model"
        )

    @staticmethod
    def _created_now() -> int:
        return int(time.time())


class _Answer:
    """One answer in OpenAI's forms."""

    def __init__(self, request: GenerationRequest, model: str, created: int) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._usage_wanted = bool(request.stream_options and request.stream_options.include_usage)
        kind = "chat.completion" if self._chat else "text_completion"
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": created,
            "model": model,
        }

    def whole(self, streams: list[Iterator[Piece]], *, prompt_tokens: int) -> dict[str, Any]:
        """The complete answer."""
        choices, generated = [], 0
        for index, stream in enumerate(streams):
            pieces = list(stream)
            text = "".join(piece.text for piece in pieces)
            generated += pieces[-1].tokens
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}}
                if self._chat
                else {"text": text}
            )
            finish = pieces[-1].finish
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": finish})
        return {**self._head, "choices": choices, "usage": _usage(prompt_tokens, generated)}

    def events(self, streams: list[Iterator[Piece]], *, prompt_tokens: int) -> Iterator[str]:
        """Server-sent events, the last one `[DONE]`."""
        head = {**self._head}
        if self._chat:
            head["object"] = "chat.completion.chunk"
        generated = 0
        for index, stream in enumerate(streams):
            if self._chat:
                first = {"role": "assistant", "content": ""}
                yield _event(head, [{"index": index, "delta": first, "finish_reason": None}])
            tokens = 0
            for piece in stream:
                tokens = piece.tokens
                said: dict[str, Any] = (
                    {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
                )
                yield _event(
                    head,
                    [{"index": index, **said, "logprobs": None, "finish_reason": piece.finish}],
                )
            generated += tokens
        if self._usage_wanted:
            yield _event(head, [], usage=_usage(prompt_tokens, generated))
        yield "data: [DONE]\n\n"


def _event(head: dict[str, Any], choices: list[dict[str, Any]], **more: Any) -> str:
    return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"


def _usage(prompt: int, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
