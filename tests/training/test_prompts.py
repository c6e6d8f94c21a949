"""Rows to messages to tokens; what SFT trains on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from contracts.stages import DataSpec, PromptSpec
from tests.training import tiny
from training_container.engine.conversations import conversations
from training_container.engine.errors import DataError
from training_container.engine.prompts import PromptRenderer, keep_short, prepare_tokenizer

ROW = {"problem": "1 + 1?", "answer": "2", "hint": "add"}
CODE = Path("/nonexistent")


def renderer(
    prompt: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    *,
    code: Path = CODE,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> PromptRenderer:
    return PromptRenderer(
        PromptSpec(**(prompt or {})),
        DataSpec(train="s3://b/k", **(data or {})),
        tokenizer or tiny.tokenizer(),
        code,
    )


def test_a_template_sees_content_and_every_column(tmp_path: Path) -> None:
    """EasyR1's form: variable `content`, the file stripped, backslash-n left as it is."""
    (tmp_path / "p.jinja").write_text("  {{ content }} Hint: {{ hint }}\\n\n")
    found = renderer({"template_file": "p.jinja", "system": "Be brief."}, code=tmp_path).messages(
        ROW
    )
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1? Hint: add\\n"},
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nowhere }}", "'nowhere' is undefined"),
        ("{% if %}", "template line 1"),
        ("{{ content.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_bad_template_is_an_error_and_not_a_prompt(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        renderer({"template": template}).messages(ROW)


def test_a_missing_template_file_is_an_error(tmp_path: Path) -> None:
    """EasyR1 prints a line and trains without a template."""
    with pytest.raises(DataError, match=r"nope\.jinja"):
        renderer({"template_file": "nope.jinja"}, code=tmp_path)


def test_prompt_tokens_end_where_the_answer_begins() -> None:
    (prompt,) = renderer().prompts([ROW])
    text = tiny.tokenizer().decode(prompt.ids)
    assert text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_writes_the_first_token_gets_it_once() -> None:
    """huggingface/trl#3853, #3520: double beginning-of-text token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{{ bos_token }}" + tiny.CHAT_TEMPLATE,
    )
    (prompt,) = renderer(tokenizer=tokenizer).prompts([ROW])
    assert prompt.ids.count(tiny.PAD_ID) == 1
    assert prompt.ids[0] == tiny.PAD_ID


def test_a_model_without_a_chat_template_needs_one_from_the_run(tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend_tokenizer)
    with pytest.raises(DataError, match="chat_template_file"):
        prepare_tokenizer(bare, PromptSpec(), tmp_path)
    (tmp_path / "chat.jinja").write_text(tiny.CHAT_TEMPLATE)
    prepared = prepare_tokenizer(bare, PromptSpec(chat_template_file="chat.jinja"), tmp_path)
    assert prepared.chat_template == tiny.CHAT_TEMPLATE


def test_long_prompts_are_dropped_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    prompts = renderer().prompts([ROW, {**ROW, "problem": "long " * 50}])
    with caplog.at_level(logging.WARNING):
        kept = keep_short(prompts, 40, what="training data")
    assert [prompt.row for prompt in kept] == [ROW]
    assert "1 of 2 prompts exceed 40 tokens" in caplog.text
    with pytest.raises(DataError, match="every prompt exceeds"):
        keep_short(prompts, 2, what="training data")


def test_messages_lose_their_last_answer_in_a_prompt() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    found = renderer(data={"messages": "chat"}).messages({"chat": chat})
    assert found == chat[:3]


def targets(example: Any) -> list[str]:
    tokenizer = tiny.tokenizer()
    runs: list[list[int]] = [[]]
    for token, trained in zip(example.ids.tolist(), example.target.tolist(), strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_sft_trains_on_assistant_turns_and_their_end_only() -> None:
    (pair,) = conversations(renderer(), [ROW], 99, what="rows")
    assert targets(pair) == ["2<|im_end|>"]
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (multi,) = conversations(renderer(data={"messages": "chat"}), [{"chat": chat}], 99, what="rows")
    assert targets(multi) == ["b<|im_end|>", "d<|im_end|>"]
    whole = tiny.tokenizer().apply_chat_template(chat, tokenize=False)
    assert tiny.tokenizer().decode(multi.ids).rstrip("\n") == whole.rstrip("\n")


def test_sft_context_tokens_are_those_of_the_prompt() -> None:
    """The answer is trained in the very context that it is sampled in later."""
    (prompt,) = renderer().prompts([ROW])
    (example,) = conversations(renderer(), [ROW], 99, what="rows")
    assert example.ids[: len(prompt.ids)].tolist() == list(prompt.ids)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template="{{ messages | length }}" + tiny.CHAT_TEMPLATE,
    )
    with pytest.raises(DataError, match="rewrites earlier turns"):
        conversations(renderer(tokenizer=tokenizer), [ROW], 99, what="rows")


def test_a_row_without_an_assistant_turn_is_refused() -> None:
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="no assistant turn"):
        conversations(renderer(data={"messages": "chat"}), [{"chat": chat}], 99, what="rows")
