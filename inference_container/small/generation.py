"""Token by token generation with a transformers model, its adapters and vLLM's sampling parameters.

Shapes: V vocabulary, T tokens of prompt and answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_container.small.protocol import GenerationRequest, RequestError

__all__ = ["Piece", "SmallModel", "sample"]

LOWEST_TEMPERATURE = 0.01
"""vLLM's: any other that is not 0 is raised to it, because the logits are divided by it."""
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """What one step adds to the answer. The last piece has a finish reason."""

    text: str
    tokens: int
    """Tokens generated so far."""
    finish: Finish | None = None


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


class SmallModel:
    """A model, its tokenizer and its adapters."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        adapters: Mapping[str, Path] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
        )
        if model.dtype == torch.float16 and dtype == "auto":
            model = model.to(dtype=torch.float32)  # few CPU kernels exist for float16
        self.defaults = model.generation_config
        self.limit = _context_length(model.config, max_model_len)
        self.adapters = dict(adapters or {})
        self._model = _with_adapters(model, self.adapters).eval()
        self._template = chat_template
        self._step = threading.Lock()

    def chat_prompt(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation. `options` are variables of the chat template.

        Raises:
            RequestError: when the template refuses the messages or the options.
        """
        import jinja2

        if self._template is None and self.tokenizer.chat_template is None:
            raise RequestError("The model has no chat template; use /v1/completions.")
        if "chat_template" in options:
            raise RequestError("chat_template is not supported by the transformers engine")
        options = {**options, "tokenize": False, "chat_template": self._template}
        try:
            text = self.tokenizer.apply_chat_template(messages, **options)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"The chat template refuses the messages: {error}") from error
        return self._tokens(text, add_special_tokens=False)

    def text_prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion's prompt.

        Raises:
            RequestError: for ids outside the vocabulary, and text that is no Unicode.
        """
        if isinstance(prompt, str):
            return self._tokens(prompt, add_special_tokens=True)
        size = self._model.get_input_embeddings().num_embeddings
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise RequestError(f"Token id {wrong[0]} is out of vocabulary.")
        return prompt

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is no valid Unicode: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def token_budget(self, prompt: list[int], wanted: int | None) -> int:
        """How many tokens the answer may have: as many as wanted and, as in vLLM, as fit.

        Raises:
            RequestError: when the context has no room for an answer.
        """
        used = len(prompt)
        if used >= self.limit:
            raise RequestError(
                f"This model's maximum context length is {self.limit} tokens. However, your "
                f"request has {used} input tokens. Please reduce the length of the input messages."
            )
        room = self.limit - used
        return room if wanted is None else min(wanted, room)

    def sampling(self, request: GenerationRequest) -> Sampling:
        """The request's parameters over the model's own `generation_config.json`, as vLLM does."""

        def choose(name: str, fallback: float) -> float:
            value = getattr(request, name)
            value = getattr(self.defaults, name, None) if value is None else value
            return fallback if value is None else value

        temperature = choose("temperature", 1.0)
        return Sampling(
            temperature=max(temperature, LOWEST_TEMPERATURE) if temperature else 0.0,
            top_p=choose("top_p", 1.0),
            top_k=int(choose("top_k", 0)),
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=choose("repetition_penalty", 1.0),
        )

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        request: GenerationRequest,
        *,
        budget: int,
        adapter: str | None = None,
        choice: int = 0,
    ) -> Iterator[Piece]:
        """The answer, piece by piece. `choice` tells the answers of one seeded request apart."""
        sampling = self.sampling(request)
        generator = None
        if request.seed is not None:
            generator = torch.Generator().manual_seed(request.seed + choice)
        ends = set() if request.ignore_eos else self._end_tokens()
        ends |= set(request.stop_token_ids)
        answer: list[int] = []
        text = _Text(self.tokenizer, request.stops, skip_special=request.skip_special_tokens)
        step = torch.tensor([prompt])
        cache: Any = None
        while True:
            with self._step, self._adapter(adapter):
                output = self._model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token = sample(
                output.logits[0, -1].float(), sampling, prompt=prompt, answer=answer, rng=generator
            )
            answer.append(token)
            finish: Finish | None = "length" if len(answer) == budget else None
            if token in ends:
                finish = "stop"
            new, stopped = text.extend(answer[:-1] if token in ends else answer, last=bool(finish))
            finish = "stop" if stopped else finish
            if new or finish:
                yield Piece(new, len(answer), finish)
            if finish:
                return
            step = torch.tensor([[token]])

    def _end_tokens(self) -> set[int]:
        ends = self.defaults.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {int(end) for end in (*ends, self.tokenizer.eos_token_id) if end is not None}

    def _adapter(self, name: str | None) -> AbstractContextManager[Any]:
        if not self.adapters:
            return nullcontext()
        if name is None:
            base: AbstractContextManager[Any] = self._model.disable_adapter()
            return base
        self._model.set_adapter(name)
        return nullcontext()


class _Text:
    """Answer text that grows: holds back half characters and what may become a stop string."""

    def __init__(self, tokenizer: Any, stops: list[str], *, skip_special: bool) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special
        self._sent = 0

    def extend(self, ids: list[int], *, last: bool) -> tuple[str, bool]:
        """(new text, whether a stop string ended it)."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            new = text[self._sent : min(found)]
            return new, True
        if last:
            return text[self._sent :], False
        end = len(text) - max((len(stop) - 1 for stop in self._stops), default=0)
        while end > 0 and text[end - 1 : end] == "\N{REPLACEMENT CHARACTER}":
            end -= 1
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        return new, False


def sample(
    logits_V: Tensor,
    sampling: Sampling,
    *,
    prompt: list[int],
    answer: list[int],
    rng: torch.Generator | None,
) -> int:
    """The next token. Penalties are OpenAI's and CTRL's (Keskar et al. 2019), in vLLM's order."""
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *answer}))
        known = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V[seen] = torch.where(known > 0, known / factor, known * factor)
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        counts_V = torch.bincount(torch.tensor(answer), minlength=logits_V.numel())
        logits_V = logits_V - sampling.frequency_penalty * counts_V
        logits_V = logits_V - sampling.presence_penalty * (counts_V > 0)
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # A repetition penalty near 0 makes infinities, and their softmax is no number.
    logits_V = (logits_V / sampling.temperature).clamp(max=torch.finfo(logits_V.dtype).max)
    if 0 < sampling.top_k < logits_V.numel():
        threshold = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    probs_V = logits_V.softmax(-1)
    if sampling.min_p > 0.0:
        probs_V = probs_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), 0.0)
    if sampling.top_p < 1.0:
        ordered_V, index_V = probs_V.sort(descending=True)
        before_V = ordered_V.cumsum(-1) - ordered_V
        probs_V = probs_V.index_fill(0, index_V[before_V >= sampling.top_p], 0.0)
    return int(torch.multinomial(probs_V, 1, generator=rng))


def _context_length(config: Any, wanted: int | None) -> int:
    """Tokens of prompt and answer.

    Raises:
        ValueError: when the run file wants more than the model's positions.
    """
    most = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 2048)
    if wanted is not None and wanted > most:
        raise ValueError(f"max_model_len {wanted} is more than the model's {most} positions")
    return wanted or most


def _with_adapters(model: Any, adapters: Mapping[str, Path]) -> Any:
    if not adapters:
        return model
    from peft import PeftModel

    wrapped: Any = None
    for name, folder in adapters.items():
        if wrapped is None:
            wrapped = PeftModel.from_pretrained(model, folder, adapter_name=name)
        else:
            wrapped.load_adapter(folder, adapter_name=name)
    return wrapped
