"""Rows to messages to tokens.

A template is Jinja2 in its sandbox: `content` is the row's problem, every column is a variable. The
result is the user message. Tokens come from the chat template's *text*, tokenized without further
special tokens, so that a template which writes the beginning-of-text token does not get it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from contracts.stages import DataSpec, PromptSpec
from training_container.engine.data import Row
from training_container.engine.errors import DataError

__all__ = ["Prompt", "PromptRenderer", "keep_short", "prepare_tokenizer"]

log = logging.getLogger(__name__)
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row ready to be asked."""

    row: Row
    messages: tuple[Message, ...]
    ids: tuple[int, ...]


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptSpec, code: Path
) -> PreTrainedTokenizerBase:
    """Put the run's chat template on the tokenizer.

    Raises:
        DataError: when there is no chat template at all.
    """
    if prompt.chat_template_file is not None:
        tokenizer.chat_template = _read(code / prompt.chat_template_file)
    if not tokenizer.chat_template:
        raise DataError(
            "the model's tokenizer has no chat template; name one in prompt.chat_template_file"
        )
    return tokenizer


class PromptRenderer:
    """Renders rows of one stage."""

    def __init__(
        self, prompt: PromptSpec, data: DataSpec, tokenizer: PreTrainedTokenizerBase, code: Path
    ) -> None:
        self._data = data
        self._system = prompt.system
        self._tokenizer = tokenizer
        self._template: jinja2.Template | None = None
        text = prompt.template
        if prompt.template_file is not None:
            text = _read(code / prompt.template_file)
        if text is not None:
            environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
            try:
                self._template = environment.from_string(text.strip())
            except jinja2.TemplateSyntaxError as error:
                raise DataError(f"prompt template line {error.lineno}: {error.message}") from error

    def messages(self, row: Row) -> list[Message]:
        """What the policy is asked: system message, if any, and the user's.

        Raises:
            DataError: when the template names a variable that is no column, or breaks.
        """
        if self._data.messages is not None:
            given = [dict(message) for message in row[self._data.messages]]
            while given and given[-1]["role"] == "assistant":
                given.pop()  # the reference answer is not part of the question
            return self._with_system(given)
        content = row[self._data.problem]
        if self._template is not None:
            try:
                content = self._template.render(**{**row, "content": content})
            except (jinja2.TemplateError, TypeError) as error:
                raise DataError(f"the prompt template cannot be rendered: {error}") from error
        return self._with_system([{"role": "user", "content": content}])

    def conversation(self, row: Row) -> list[Message]:
        """What SFT trains on: the messages, or the question and the row's answer."""
        if self._data.messages is not None:
            return self._with_system([dict(message) for message in row[self._data.messages]])
        assert self._data.answer is not None
        return [*self.messages(row), {"role": "assistant", "content": row[self._data.answer]}]

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """Every row's prompt with its tokens, ending where the assistant's answer begins."""
        messages = [self.messages(row) for row in rows]
        texts = [self.text(chat, ask=True) for chat in messages]
        tokens = self.tokenize(texts)
        return [
            Prompt(row, tuple(chat), tuple(ids))
            for row, chat, ids in zip(rows, messages, tokens, strict=True)
        ]

    def text(self, messages: Sequence[Message], *, ask: bool) -> str:
        """The chat template's text; ``ask`` adds the beginning of the assistant's turn.

        Raises:
            DataError: when the template refuses the conversation (roles out of turn, say).
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: text + what is none
            raise DataError(f"the chat template refuses a conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids, in one call because fast tokenizers work on a list in parallel."""
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self._system is None:
            return messages
        return [{"role": "system", "content": self._system}, *messages]


def keep_short(prompts: Sequence[Prompt], limit: int, *, what: str) -> list[Prompt]:
    """Prompts of at most ``limit`` tokens; the others are dropped with a count, never cut.

    Raises:
        DataError: when none is left.
    """
    kept = [prompt for prompt in prompts if len(prompt.ids) <= limit]
    dropped = len(prompts) - len(kept)
    if dropped:
        log.warning("%s: %d of %d prompts exceed %d tokens", what, dropped, len(prompts), limit)
    if not kept:
        shortest = min(len(prompt.ids) for prompt in prompts)
        raise DataError(
            f"{what}: every prompt exceeds max_prompt_length {limit} (the shortest has {shortest})"
        )
    return kept


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"template file {path.name} cannot be read: {error}") from error
