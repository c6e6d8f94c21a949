"""SFT examples: conversations as tokens, with the assistant's tokens marked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from training_container.engine.batches import TokenSequence
from training_container.engine.data import Row
from training_container.engine.errors import DataError
from training_container.engine.prompts import Message, PromptRenderer

__all__ = ["conversations"]

log = logging.getLogger(__name__)


def conversations(
    renderer: PromptRenderer, rows: Sequence[Row], max_length: int, *, what: str
) -> list[TokenSequence]:
    """Each row's conversation; a target is every token of an assistant turn, its end included.

    Rows longer than ``max_length`` tokens are dropped with a count.

    Raises:
        DataError: when no row is left, or a chat template rewrites earlier turns, so that where an
            answer begins cannot be told.
    """
    pieces = [_pieces(renderer, renderer.conversation(row), n) for n, row in enumerate(rows, 1)]
    flat = [text for row in pieces for text, _ in row]
    tokens = iter(renderer.tokenize(flat))
    built: list[TokenSequence] = []
    for row in pieces:
        ids: list[int] = []
        target: list[bool] = []
        for _, trained in row:
            piece = next(tokens)
            ids += piece
            target += [trained] * len(piece)
        if target:
            target[0] = False
        built.append(TokenSequence(torch.tensor(ids), torch.tensor(target, dtype=torch.bool)))
    kept = [example for example in built if len(example.ids) <= max_length]
    if len(kept) < len(built):
        log.warning(
            "%s: %d of %d rows exceed %d tokens",
            what,
            len(built) - len(kept),
            len(built),
            max_length,
        )
    if not kept:
        raise DataError(f"{what}: every row exceeds max_length {max_length}")
    return kept


def _pieces(
    renderer: PromptRenderer, messages: Sequence[Message], number: int
) -> list[tuple[str, bool]]:
    """The conversation's text, cut where assistant turns begin and end: (text, is it trained on).

    Each cut is a prefix of the whole text, found by rendering the conversation up to there; so it
    works with any chat template that appends.
    """
    whole = renderer.text(messages, ask=False)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin = renderer.text(messages[:index], ask=True)
        end = renderer.text(messages[: index + 1], ask=False)
        if not (
            whole.startswith(begin) and whole.startswith(end) and done <= len(begin) <= len(end)
        ):
            raise DataError(
                f"row {number}: the chat template rewrites earlier turns, so the assistant's "
                "tokens cannot be told apart; give prompt.chat_template_file"
            )
        answer = whole[len(begin) : len(end)]
        pieces += [(whole[done : len(begin)], False), (answer.rstrip("\n"), True)]
        done = len(begin) + len(answer.rstrip("\n"))
    if not pieces:
        raise DataError(f"row {number} has no assistant turn to train on")
    if whole[done:].strip():
        pieces.append((whole[done:], False))
    return pieces
