"""The real container process on CPU, with each engine: vLLM in the environment that has it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.inference.container import Container, started
from tests.inference.tiny_model import CONTEXT, write_manifest, write_model
from tests.processes import signal_side_thread

ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]

QUESTION = [{"role": "user", "content": "How to move from (0,0) to (4,4)?"}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@dataclass(frozen=True)
class Served:
    """A running container, what it serves, and how its health checks went while it loaded."""

    container: Container
    engine: str
    model: Path
    health: list[int]


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, model_base: Path) -> Iterator[Served]:
    deploy = {
        "dtype": "float32",  # for vLLM `auto` is 16 bits at most, and rounds otherwise in a batch
        "lora_adapters": [{"name": "tuned", "source": "adapters/tuned"}],
    }
    with started(model_base, deploy) as container:
        health = container.wait_until_ready()
        health += [container.request("/ping").status for _ in range(20)]
        yield Served(container, request.param, model_base / "model", health)


def chat(served: Served, **fields: Any) -> Any:
    answer = served.container.request("/v1/chat/completions", {"messages": QUESTION, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_ping_answers_503_at_once_while_the_model_loads(served: Served) -> None:
    """aws/amazon-sagemaker-examples#210, awslabs/llm-hosting-container#18,
    aws/sagemaker-python-sdk#4115.

    A check that hung would have failed the fixture.
    """
    assert served.health[0] == 503
    assert set(served.health) == {503, 200}
    assert served.health == sorted(served.health, reverse=True), "a ready model was unready again"


def test_the_engine_is_named_in_the_log_and_in_answers(served: Served) -> None:
    answer = served.container.request("/ping")
    assert answer.headers["x-grpohub-engine"].startswith(f"{served.engine}/")
    assert f"grpohub: engine {served.engine}:" in served.container.log()


def test_the_model_is_verified_before_the_engine_starts(served: Served) -> None:
    log = served.container.log()
    assert 0 <= log.index("verified") < log.index("grpohub: engine ")


def test_greedy_answers_are_the_models_own(served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    whole = model.generate(**ids, do_sample=False, max_new_tokens=12)
    new = whole[0, ids["input_ids"].shape[1] :]
    answer = chat(served, **GREEDY)
    assert said(answer) == tokenizer.decode(new, skip_special_tokens=True)
    assert answer["usage"]["prompt_tokens"] == ids["input_ids"].shape[1]
    assert answer["usage"]["completion_tokens"] == len(new)


def test_invocations_takes_chats_and_completions(served: Served) -> None:
    expected = said(chat(served, **GREEDY))
    by_chat = served.container.request("/invocations", {"messages": QUESTION, **GREEDY})
    assert said(by_chat.json) == expected
    prompt = f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    by_prompt = served.container.request("/invocations", {"prompt": prompt, **GREEDY})
    assert by_prompt.json["choices"][0]["text"] == expected
    assert by_prompt.json["object"] == "text_completion"


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    fields = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    answer = served.container.request("/invocations", {"messages": QUESTION, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == said(chat(served, **GREEDY))
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_seed_repeats_an_answer_and_differs_from_another(served: Served) -> None:
    def sampled(seed: int) -> str:
        return said(chat(served, temperature=1.0, max_tokens=24, seed=seed))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_several_answers_to_one_question_differ(served: Served) -> None:
    answer = chat(served, temperature=1.0, max_tokens=24, n=3, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3


def test_a_stop_string_ends_the_answer_before_it(served: Served) -> None:
    whole = said(chat(served, **GREEDY))
    stop = whole[4:6]
    answer = chat(served, **GREEDY, stop=[stop])
    assert said(answer) == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_an_adapter_answers_by_its_name_and_leaves_the_base_alone(served: Served) -> None:
    base = said(chat(served, **GREEDY))
    tuned = said(chat(served, model="tuned", **GREEDY))
    assert tuned != base
    assert said(chat(served, model="default", **GREEDY)) == base
    for name, expected in (("tuned", tuned), ("default", base)):
        document = {"model": name, "messages": QUESTION, **GREEDY}
        assert said(served.container.request("/invocations", document).json) == expected
    names = [card["id"] for card in served.container.request("/v1/models").json["data"]]
    assert names == ["tiny-20260101-abcdef", "default", "tuned"]


def test_answers_to_requests_at_once_do_not_mix(served: Served) -> None:
    models = ["default", "tuned"] * 3
    alone = {name: said(chat(served, model=name, **GREEDY)) for name in set(models)}
    together: dict[int, str] = {}

    def ask(index: int, name: str) -> None:
        together[index] = said(chat(served, model=name, **GREEDY))

    threads = [threading.Thread(target=ask, args=item) for item in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(models))] == [alone[name] for name in models]


BAD_BODIES = {
    "another server's form": {"inputs": "Hello"},
    "nothing": {},
    "no messages": {"messages": []},
    "messages of a wrong type": {"messages": "Hello"},
    "no token allowed": {"messages": QUESTION, "max_tokens": 0},
    "a negative temperature": {"messages": QUESTION, "temperature": -1},
    "top_p of zero": {"messages": QUESTION, "top_p": 0},
    "several greedy answers": {"messages": QUESTION, "temperature": 0, "n": 2},
    "options of a stream without one": {
        "messages": QUESTION,
        "stream_options": {"include_usage": True},
    },
    "null for several completions": {"prompt": "move", "n": None},
    "a temperature above 2": {"messages": QUESTION, "temperature": 2.5},
    "an infinite temperature": {"messages": QUESTION, "temperature": float("inf")},
    "an infinite penalty": {"messages": QUESTION, "repetition_penalty": float("inf")},
    "a tool required and none given": {"messages": QUESTION, "tool_choice": "required"},
    "an empty list of tools": {"messages": QUESTION, "tools": []},
    "an empty vocabulary": {"messages": QUESTION, "allowed_token_ids": []},
    "nothing left of the prompt": {"messages": QUESTION, "truncate_prompt_tokens": 0},
    "a template of its own": {"messages": QUESTION, "chat_template": "{{ messages }}"},
    "a template of its own among the variables": {
        "messages": QUESTION,
        "chat_template_kwargs": {"chat_template": "{{ messages }}"},
    },
    "messages twice": {"messages": QUESTION, "chat_template_kwargs": {"messages": []}},
    "a conversation twice": {"messages": QUESTION, "chat_template_kwargs": {"conversation": []}},
    "tools that are none": {"messages": QUESTION, "chat_template_kwargs": {"tools": 5}},
    "half a character": {"messages": [{"role": "user", "content": "Hello \ud83d"}]},
    "half a character for a role": {"messages": [{"role": "\ud83d", "content": "Hello"}]},
    "half a character to complete": {"prompt": "Hello \ud83d"},
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_refused_with_a_reason(served: Served, name: str) -> None:
    answer = served.container.request("/invocations", BAD_BODIES[name])
    assert_refused(answer.status, answer.body)


# Fields that vLLM knows and the small engine does not.
NOT_SMALL: dict[str, Any] = {
    "add_special_tokens": True,
    "allowed_token_ids": [5],
    "bad_words": ["RIGHT"],
    "documents": [{"title": "Keys", "text": "UP"}],
    "echo": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1.0},
    "logprobs": True,
    "min_tokens": 2,
    "prompt_logprobs": 0,
    "reasoning_effort": "none",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "structured_outputs": {"regex": "UP"},
    "thinking_token_budget": 0,
    "tools": [{"type": "function", "function": {"name": "press"}}],
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
}


@pytest.mark.parametrize("served", ENGINES[:1], indirect=True)
@pytest.mark.parametrize("field", NOT_SMALL)
def test_what_the_small_engine_cannot_do_it_refuses_by_name(served: Served, field: str) -> None:
    document = {"messages": QUESTION, field: NOT_SMALL[field]}
    answer = served.container.request("/invocations", document)
    assert_refused(answer.status, answer.body)
    assert field in answer.json["error"]["message"]


GOOD_FIELDS: list[dict[str, Any]] = [
    {
        "n": None,
        "stream": None,
        "stream_options": None,
        "max_tokens": None,
        "max_completion_tokens": 2,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "allowed_token_ids": None,
        "truncate_prompt_tokens": None,
        "tools": None,
        "tool_choice": None,
    },
    {
        "bad_words": [],
        "include_stop_str_in_output": False,
        "min_tokens": 0,
        "add_special_tokens": False,
        "thinking_token_budget": -1,
        "tool_choice": "none",
        "response_format": {"type": "text"},
    },
    {"chat_template_kwargs": {"tokenize": True, "add_generation_prompt": False}},
    {"temperature": 1e-40},
    {"temperature": 1e-40, "n": 2},
    {"repetition_penalty": 1e-40},
]


@pytest.mark.parametrize("fields", GOOD_FIELDS)
def test_what_openai_and_vllm_allow_is_answered(served: Served, fields: dict[str, Any]) -> None:
    answer = chat(served, **{"max_tokens": 2, **fields})
    assert len(answer["choices"]) == (fields.get("n") or 1)
    assert answer["choices"][0]["finish_reason"]


def test_the_lowest_temperature_can_be_streamed(served: Served) -> None:
    fields = {"temperature": 1e-40, "max_tokens": 4, "stream": True}
    answer = served.container.request("/invocations", {"messages": QUESTION, **fields})
    *_, last, done = answer.events
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"]


def test_an_unexpected_error_has_an_error_body_too(served: Served) -> None:
    answer = served.container.request("/invocations", raw=b"[" * 100_000)
    assert answer.status == 500
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json["error"]["code"] == 500


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"{", "application/json"),
        (b"\xff", "application/json"),
        (b"Hello", "text/plain"),
        (b"{}", None),
    ],
)
def test_a_body_that_is_no_json_is_refused(served: Served, raw: bytes, kind: str | None) -> None:
    answer = served.container.request("/invocations", raw=raw, kind=kind)
    assert_refused(answer.status, answer.body)


def test_an_image_for_a_text_model_is_refused_by_name(served: Served) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # noqa: E501
    parts = [
        {"type": "image_url", "image_url": {"url": pixel}},
        {"type": "text", "text": "What is this?"},
    ]
    messages = [{"role": "user", "content": parts}]
    answer = served.container.request("/invocations", {"messages": messages})
    assert_refused(answer.status, answer.body)
    assert re.search("image|multimodal", answer.json["error"]["message"])


def assert_refused(status: int, body: bytes) -> None:
    assert status == 400, body
    error = json.loads(body)["error"]
    assert error["message"]
    assert error["code"] == 400
    assert {"type", "param"} <= error.keys()


def test_a_prompt_beyond_the_context_is_refused(served: Served) -> None:
    long = {"prompt": "move " * CONTEXT}
    answer = served.container.request("/invocations", long)
    assert_refused(answer.status, answer.body)
    assert str(CONTEXT) in answer.json["error"]["message"]


@pytest.mark.parametrize("wanted", [None, CONTEXT])
def test_an_answer_may_fill_the_context_and_no_more(served: Served, wanted: int | None) -> None:
    """vLLM refuses no `max_tokens` beyond what the context leaves, but ends the answer there."""
    answer = chat(served, temperature=0.0, ignore_eos=True, max_tokens=wanted)
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("name", "shown"), [("other", "`other`"), ("half \ud83d", "`half ?`")])
def test_an_unknown_model_is_not_found(served: Served, name: str, shown: str) -> None:
    document = {"model": name, "messages": QUESTION}
    answer = served.container.request("/invocations", document)
    assert answer.status == 404
    assert shown in answer.json["error"]["message"]


def test_bad_requests_leave_the_server_healthy(served: Served) -> None:
    assert served.container.request("/ping").status == 200
    assert said(chat(served, **GREEDY))


@pytest.mark.parametrize("engine", ENGINES)
def test_sigterm_finishes_what_is_being_answered(engine: str, model_base: Path) -> None:
    """aws/sagemaker-training-toolkit#173: PID 1 passes the signal on; SageMaker then waits 30 s."""
    with started(model_base) as container:
        container.wait_until_ready()
        connection = http.client.HTTPConnection("127.0.0.1", container.port, timeout=60)
        document = {"messages": QUESTION, "stream": True, "ignore_eos": True, "temperature": 0}
        head = {"content-type": "application/json"}
        connection.request("POST", "/invocations", json.dumps(document), head)
        response = connection.getresponse()
        first = response.readline()
        signal_side_thread(container.process.pid, signal.SIGTERM)
        rest = response.read().decode()
        code = container.process.wait(40)
    assert first.startswith(b"data: ")
    assert rest.endswith("data: [DONE]\n\n")
    assert '"length"' in rest
    assert code == 0
    assert "SIGTERM: finishing what is being answered" in container.log()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_cannot_load_ends_with_its_first_cause(engine: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] = 96  # the weights have another width
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)
    with started(tmp_path) as container:
        code = container.process.wait(240)
    assert code == 3
    last = container.log().strip().splitlines()[-1]
    assert last.startswith("grpohub: start failed: ")
    assert "Error" in last
