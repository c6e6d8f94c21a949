"""Requests as OpenAI's API and vLLM have them, and vLLM's error bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "RequestError",
    "parse_request",
]

UNSUPPORTED: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "best_of": 1,
    "chat_template": None,
    "documents": [],
    "echo": False,
    "functions": [],
    "include_stop_str_in_output": False,
    "logit_bias": {},
    "logprob_token_ids": [],
    "logprobs": False,
    "min_tokens": 0,
    "prompt_embeds": None,
    "prompt_logprobs": None,
    "reasoning_effort": None,
    "repetition_detection": None,
    "response_format": {"type": "text"},
    "return_prompt_text": False,
    "return_token_ids": False,
    "structured_outputs": None,
    "suffix": None,
    "thinking_token_budget": -1,
    "tool_choice": "none",
    "tools": None,
    "top_logprobs": 0,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "watermarking": False,
}
"""Fields of vLLM that this server has no code for, and the value that, as null, asks for nothing.
Ignoring another would change the answer."""

MULTIMODAL = ("image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "video_url")
"""Types of content parts that vLLM takes and that are no text."""


class RequestError(Exception):
    """A request that cannot be answered; `body` is what vLLM would say."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        message = message.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }


def _or(default: Any) -> BeforeValidator:
    """null means what leaving the field out means, as in OpenAI's API."""
    return BeforeValidator(lambda value: default if value is None else value)


class StreamOptions(BaseModel):
    include_usage: Annotated[bool, _or(False)] = False


class GenerationRequest(BaseModel):
    """What chat and completion requests share. Unknown fields are ignored, as vLLM does."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0), _or(0.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0), _or(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0), _or(0.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], _or([])] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: Annotated[bool, _or(False)] = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _possible(self) -> GenerationRequest:
        extra = self.model_extra or {}
        for name, nothing in UNSUPPORTED.items():
            if extra.get(name) not in (None, nothing):
                raise ValueError(f"{name} is not supported by the transformers engine")
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        limit = self.token_limit
        if limit is not None and limit < 1:
            raise ValueError(f"max_tokens must be at least 1, got {limit}.")
        if "" in self.stops:
            raise ValueError("stop cannot contain an empty string.")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message; content parts other than text need another engine."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in MULTIMODAL:
                raise ValueError(
                    f"{kind} is not supported: the transformers engine serves text only; images "
                    "need vLLM and a vision-language model"
                )
        return content

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=64), _or(1)] = 1
    max_completion_tokens: int | None = None
    add_special_tokens: Literal[False] = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], _or({})] = {}

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    add_special_tokens: Literal[True] = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)

    @model_validator(mode="after")
    def _not_empty(self) -> CompletionRequest:
        if not self.prompt or "" in self.prompts or [] in self.prompts:
            raise ValueError("The prompt is empty.")
        return self


def parse_request(kind: type[GenerationRequest], document: Any) -> Any:
    """A request from its JSON document.

    Raises:
        RequestError: with every problem and its place, as vLLM lists them.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(
            f"{'.'.join(map(str, ('body', *item['loc'])))}: {item['msg']}" for item in problems
        )
        raise RequestError(text, kind="Bad Request") from error
