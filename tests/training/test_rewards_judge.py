"""Judges outside the job, against a real HTTP service that can stall, fail, limit and lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from contracts.rewards import RewardSpec
from training_container.rewards import endpoint as endpoint_module
from training_container.rewards.endpoint import Breaker
from training_container.rewards.interface import (
    FailureKind,
    RewardConfigError,
    RewardError,
    RewardRequest,
    RewardSource,
    Sample,
    Scores,
)
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext, build_source

Reply = tuple[int, Any, dict[str, str]]


class Service:
    """An OpenAI-compatible server on a free port whose answers a test chooses."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Reply] = lambda _: ok("Reward: 0.5")
        self.models = ["judge-1"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer((200, {"data": [{"id": name} for name in service.models]}, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with service.lock:
                    service.requests.append({**body, "path": self.path})
                    service.headers.append(dict(self.headers))
                    service.at_once += 1
                    service.most_at_once = max(service.most_at_once, service.at_once)
                try:
                    reply = service.reply(body)
                finally:
                    with service.lock:
                        service.at_once -= 1
                self.answer(reply)

            def answer(self, reply: Reply) -> None:
                status, content, headers = reply
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)
                except ConnectionError:
                    pass  # the caller gave up

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def ok(*texts: str) -> Reply:
    return 200, {"choices": [{"message": {"content": text}} for text in texts]}, {}


def asked(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(endpoint_module, "_FIRST_DELAY_SECONDS", 0.01)
    made = Service()
    yield made
    made.stop()


def judge(
    url: str, timeout_seconds: float = 30.0, kept_in: Path | None = None, **settings: Any
) -> RewardSource:
    names = ("max_concurrency", "call_timeout_seconds", "max_retries", "model", "api_key_secret")
    address = {name: settings.pop(name) for name in names if name in settings}
    given = {"endpoint": {"url": url, **address}, **settings}
    spec = RewardSpec.model_validate_json(
        json.dumps(
            {"name": "judge", "weight": 1.0, "judge": given, "timeout_seconds": timeout_seconds}
        )
    )
    return build_source(spec, SourceContext(columns=("rubric",), cache=kept_in))


def score(source: RewardSource, *completions: str) -> Scores:
    source.prepare()
    prompt = [{"role": "system", "content": ""}, {"role": "user", "content": "2+2?"}]
    samples = (
        Sample(text, prompt=prompt, ground_truth="4", columns={"rubric": "strict"})
        for text in completions
    )
    return source.score(RewardRequest(tuple(samples)))


def plane_of(source: RewardSource, url: str) -> RewardPlane:
    spec = {"name": source.name, "weight": 1, "judge": {"endpoint": {"url": url}}}
    return RewardPlane([RewardSpec.model_validate_json(json.dumps(spec))], sources=[source])


def kinds(scores: Scores) -> set[str]:
    return {str(failure.kind) for failure in scores.failures.values()}


def test_the_judge_sees_conversation_columns_and_settings(service: Service) -> None:
    source = judge(
        service.url,
        system="You are fair.",
        query_template="{{ rubric }}|{{ ground_truth }}|{{ conversation }}",
        temperature=0.25,
        max_tokens=7,
    )
    assert score(source, "four").values == [0.5]
    request = service.requests[0]
    assert request["messages"] == [
        {"role": "system", "content": "You are fair."},
        {"role": "user", "content": "strict|4|User: 2+2?\n\nAssistant: four"},
    ]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge-1", 0.25, 7)
    assert request["path"] == "/v1/chat/completions"


def test_several_choices_are_averaged_over_those_that_parse(service: Service) -> None:
    service.reply = lambda _: ok("Reward: 0.2", "no idea", "Reward: 1.0", "Reward: 9")
    assert score(judge(service.url, choices=4), "a").values == [pytest.approx(0.6)]
    assert service.requests[0]["n"] == 4


@pytest.mark.parametrize(
    ("text", "kind"),
    [("I give 8", "unparsable"), ("", "unparsable"), ("Reward: 8", "out_of_range")],
)
def test_what_cannot_be_read_is_none_and_counted_never_zero(
    service: Service, text: str, kind: str
) -> None:
    """Peers make it 0.0, which the group's baseline takes for a truly bad answer."""
    service.reply = lambda _: ok(text)
    scores = score(judge(service.url), "a")
    assert scores.values == [None]
    assert kinds(scores) == {kind}


def test_32_calls_at_a_cap_of_16_are_two_waves(service: Service) -> None:
    """huggingface/trl#4130: one after the other. ms-swift: all at once, without a cap.

    Each wave is held until all 16 of it are there; a 17th at once would be seen in the count."""
    wave = threading.Barrier(16)

    def hold(_: dict[str, Any]) -> Reply:
        wave.wait(timeout=60)
        return ok("Reward: 1")

    service.reply = hold
    scores = score(judge(service.url, 120.0, max_concurrency=16), *(str(i) for i in range(32)))
    assert scores.values == [1.0] * 32
    assert service.most_at_once == 16
    assert len(service.requests) == 32


def test_the_same_conversation_is_asked_once_and_remembered(service: Service) -> None:
    source = judge(service.url)
    scores = score(source, "a", "b", "a", "a")
    assert scores.values == [0.5] * 4
    assert (scores.metrics["asked"], scores.metrics["cached"]) == (2, 2)
    assert score(source, "a").metrics["asked"] == 0
    assert len(service.requests) == 2
    assert score(judge(service.url, cache=False), "a", "a").metrics["asked"] == 2


def test_a_failure_is_not_remembered(service: Service) -> None:
    source = judge(service.url)
    service.reply = lambda _: ok("hm")
    assert score(source, "a").values == [None]
    service.reply = lambda _: ok("Reward: 1")
    assert score(source, "a").values == [1.0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_fault_is_retried(service: Service, status: int) -> None:
    replies = [(status, {"error": "busy"}, {"retry-after": "0.01"})] * 2 + [ok("Reward: 1")]
    service.reply = lambda _: replies.pop(0)
    scores = score(judge(service.url, max_retries=2), "a")
    assert scores.values == [1.0]
    assert scores.metrics["retries"] == 2


def test_a_refusal_is_not_retried(service: Service) -> None:
    service.reply = lambda _: (401, {"error": "bad key"}, {})
    scores = score(judge(service.url), "a")
    assert len(service.requests) == 1
    assert "401" in scores.failures[0].detail
    assert "bad key" in scores.failures[0].detail
    assert scores.metrics["breaker_open"] == 0  # the service is up


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ((200, b"<html>gateway</html>", {}), "unparsable"),
        ((200, {"choices": "none"}, {}), "unparsable"),
        ((200, {"error": "overloaded"}, {}), "unparsable"),
        ((200, {"choices": []}, {}), "unparsable"),
        ((200, {"choices": [{"message": {"content": None}}]}, {}), "unparsable"),
    ],
)
def test_a_service_that_lies_gets_no_score(service: Service, reply: Reply, kind: str) -> None:
    service.reply = lambda _: reply
    scores = score(judge(service.url), "a")
    assert scores.values == [None]
    assert kinds(scores) == {kind}


HUGE = "1" + "0" * 400
JSON_PARSER = {"parser": {"kind": "json", "field": "score"}}
CUT_OFF = {"message": {"content": "Reward: 0."}, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("reply", "settings", "odd", "kind"),
    [
        ((200, b"no gzip", {"content-encoding": "gzip"}), {}, Sample("odd"), "unparsable"),
        ((200, b"[" * 200_000, {}), {}, Sample("odd"), "unparsable"),
        ((200, {"choices": [CUT_OFF]}, {}), {}, Sample("odd"), "unparsable"),
        (ok('{"score": ' + HUGE + "}"), JSON_PARSER, Sample("odd"), "out_of_range"),
        (ok(), {"query_template": "{{ rubric + completion }}"},
         Sample("odd", columns={"rubric": None}), "exception"),
        (ok(), {}, Sample("odd \ud83d"), "exception"),
    ],
)  # fmt: skip
def test_one_odd_answer_or_row_fails_alone(
    service: Service, reply: Reply, settings: dict[str, Any], odd: Sample, kind: str
) -> None:
    usual = ok('{"score": 0.5} Reward: 0.5')
    service.reply = lambda body: reply if "odd" in asked(body) else usual
    source = judge(service.url, **settings)
    with plane_of(source, service.url) as plane:
        plane.prepare()
        request = RewardRequest((odd, Sample("usual", columns={"rubric": "strict"})))
        result = plane.score(request).sources[0]
    assert result.scores == [None, 0.5]
    assert {index: str(one.kind) for index, one in result.failures.items()} == {0: kind}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'{"data": [{"probs": [NaN]}]}', "not_finite"),
        (b'{"data": [{"probs": [Infinity]}]}', "not_finite"),
        (b'{"data": [{"probs": [' + HUGE.encode() + b"]}]}", "not_finite"),
        (b'{"data": [{"probs": [null]}]}', "unparsable"),
    ],
)
def test_a_classifier_s_odd_logit_fails_alone(service: Service, answer: bytes, kind: str) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        usual = {"data": [{"probs": [0.5]}]}
        return (200, answer, {}) if asked(body) == "odd" else (200, usual, {})

    service.reply = reply
    document = {"name": "served", "weight": 1, "model": {"endpoint": {"url": service.url}}}
    spec = RewardSpec.model_validate_json(json.dumps(document))
    scores = score(build_source(spec, SourceContext()), "odd", "usual")
    assert scores.values == [None, 0.5]
    assert kinds(scores) == {kind}


def test_an_own_pattern_that_never_ends_fails_its_sample_alone(service: Service) -> None:
    """`re` holds the interpreter's lock: in the trainer no deadline and no signal would pass."""
    parser = {"kind": "regex", "pattern": r"Score:((?:\s?\d?\s?)+)$", "maximum": 10.0}
    texts = {"odd": "Score: " + "1 " * 27 + "x", "usual": "Score: 5", "far": "Score: 11"}
    service.reply = lambda body: ok(next(texts[name] for name in texts if name in asked(body)))
    source = judge(service.url, timeout_seconds=40.0, parser=parser)
    scores = score(source, "odd", "usual", "far", "usual too")
    assert source.confinement()
    source.close()
    assert scores.values == [None, 0.5, None, 0.5]
    found = {index: str(one.kind) for index, one in scores.failures.items()}
    assert found == {0: "timeout", 2: "out_of_range"}


@pytest.fixture
def stall(service: Service) -> Iterator[threading.Event]:
    """While held, calls about "slow" get no answer."""
    released = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if "slow" in asked(body):
            released.wait(timeout=60)
        return ok("Reward: 1")

    service.reply = reply
    yield released
    released.set()


@pytest.mark.usefixtures("stall")
def test_a_call_that_stalls_is_given_up_and_retried(service: Service) -> None:
    source = judge(service.url, call_timeout_seconds=2.0, max_retries=1)
    scores = score(source, "slow", "b")
    assert scores.values == [None, 1.0]
    assert kinds(scores) == {"timeout"}
    assert "did not answer within 2 s" in scores.failures[0].detail
    assert scores.metrics["retries"] == 1


@pytest.mark.usefixtures("stall")
def test_a_judge_that_is_slow_for_ever_costs_the_batch_s_deadline_and_no_more(
    service: Service,
) -> None:
    """modelscope/ms-swift#6962: training stood still after five hours."""
    source = judge(service.url, timeout_seconds=6.0, max_concurrency=2)
    scores = score(source, "b", "slow 1", "slow 2", "never started")
    assert scores.values == [1.0, None, None, None]
    assert kinds(scores) == {"timeout"}
    assert "no answer within" in scores.failures[3].detail


@pytest.mark.parametrize(("others", "opened"), [((), 1), (("b",), 0)])
@pytest.mark.usefixtures("stall")
def test_calls_that_the_batch_s_deadline_ends_count_for_the_breaker(
    service: Service, others: tuple[str, ...], opened: int
) -> None:
    """A service that answers others meanwhile has too much to do, and is not down."""
    source = judge(service.url, timeout_seconds=3.0, max_concurrency=16)
    scores = score(source, *others, *(f"slow {i}" for i in range(10)))
    assert kinds(scores) == {"timeout"}
    assert scores.metrics["breaker_open"] == opened


def test_a_judge_that_is_down_at_the_start_is_told_with_how_to_start_it() -> None:
    gone = Service()
    gone.stop()
    with pytest.raises(RewardConfigError, match=r"(?s)cannot use.*vllm serve MODEL"):
        judge(gone.url).prepare()


@pytest.mark.parametrize("url", ["http://ho st:80a/v1", "judge.internal:8000/v1", "http://[::1/v1"])
def test_an_address_that_is_none_is_told_at_the_start(url: str) -> None:
    with pytest.raises(RewardConfigError, match="url"):
        judge(url).prepare()


def test_the_only_model_is_chosen_and_an_unknown_one_refused(service: Service) -> None:
    service.models = ["a", "b"]
    with pytest.raises(RewardConfigError, match="must choose one of the models served: a, b"):
        judge(service.url).prepare()
    with pytest.raises(RewardConfigError, match="'c' is not among the models served: a, b"):
        judge(service.url, model="c").prepare()
    score(judge(service.url, model="b"), "x")
    assert service.requests[0]["model"] == "b"


def test_a_judge_that_dies_is_given_up_after_a_few_calls(service: Service) -> None:
    source = judge(service.url, max_retries=0, max_concurrency=1)
    assert score(source, "a").values == [0.5]
    service.reply = lambda _: (500, {"error": "out of memory"}, {})
    many = source.score(RewardRequest(tuple(Sample(str(i)) for i in range(50))))
    assert len(service.requests) == 1 + 8  # then the breaker opened
    assert many.metrics["refused"] == 42
    assert "calls are paused" in many.failures[49].detail
    with pytest.raises(RewardError, match="above its max_failure_rate"):
        plane_of(source, service.url).score(RewardRequest((Sample("x"),)))


def test_the_breaker_tries_one_call_after_its_pause() -> None:
    now = [0.0]
    breaker = Breaker(limit=2, pause_seconds=10, clock=lambda: now[0])
    breaker.note(answered=False)
    assert breaker.allows()
    breaker.note(answered=False)
    assert not breaker.allows()
    now[0] = 10.0
    assert breaker.allows()  # the trial
    assert not breaker.allows()  # and no second one beside it
    now[0] = 35.0
    breaker.note(answered=False)
    assert not breaker.allows()  # the pause begins when the trial has failed
    now[0] = 45.0
    assert breaker.allows()
    breaker.note(answered=True)
    assert breaker.allows()


def test_a_template_that_names_no_column_fails_the_sample_and_a_broken_one_the_start(
    service: Service,
) -> None:
    scores = score(judge(service.url, query_template="{{ rubrik }}"), "a")
    assert scores.failures[0].kind is FailureKind.EXCEPTION
    assert "rubrik" in scores.failures[0].detail
    with pytest.raises(RewardConfigError, match="query_template, line 2"):
        judge(service.url, query_template="\n{% if %}")
    escape = score(judge(service.url, query_template="{{ ''.__class__.__mro__ }}"), "a")
    assert "unsafe" in escape.failures[0].detail  # Jinja's sandbox


@mock_aws
def test_the_key_comes_from_secrets_manager(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("secretsmanager").create_secret(Name="judge-key", SecretString="s3cret")
    score(judge(service.url, api_key_secret="judge-key"), "a")
    assert service.headers[0]["Authorization"] == "Bearer s3cret"
    with pytest.raises(RewardConfigError, match="no-such-key"):
        judge(service.url, api_key_secret="no-such-key")


def test_a_sagemaker_endpoint_is_invoked_and_signed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", service.url.removesuffix("/v1"))
    for name, value in (
        ("ACCESS_KEY_ID", "k"),
        ("SECRET_ACCESS_KEY", "s"),
        ("REGION", "eu-west-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    spec = RewardSpec.model_validate_json(
        json.dumps(
            {
                "name": "judge",
                "weight": 1,
                "judge": {"endpoint": {"sagemaker_endpoint": "my-judge", "max_retries": 2}},
            }
        )
    )
    replies = [(503, {"message": "busy"}, {}), ok("Reward: 1"), ok("Reward: 1")]
    service.reply = lambda _: replies.pop(0)
    scores = score(build_source(spec, SourceContext()), "a", "b")
    assert scores.values == [1.0, 1.0]
    assert {request["path"] for request in service.requests} == {"/endpoints/my-judge/invocations"}
    assert "eu-west-1/sagemaker/aws4_request" in service.headers[0]["Authorization"]
    assert scores.metrics["retries"] == 1


# --- the synchronous client ----------------------------------------------------------------------


def test_a_reward_file_can_ask_a_judge_by_itself(service: Service, tmp_path: Path) -> None:
    """The second seed's external reward: a client made once, fail-fast, a call per completion."""
    (tmp_path / "rewards.py").write_text(
        "from training_container.rewards.client import JudgeClient\n"
        "class Polite:\n"
        "    def __init__(self, url): self.judge = JudgeClient(url)\n"
        "    def __call__(self, completions):\n"
        "        return [self.judge.score(text, temperature=0) for text in completions]\n"
    )
    cut_off = (200, {"choices": [CUT_OFF]}, {})
    service.reply = lambda body: (
        cut_off if asked(body) == "cut" else ok(f"Reward: {len(asked(body)) / 10}")
    )

    def source(url: str) -> RewardSource:
        document = {
            "name": "polite",
            "weight": 1,
            "file": "rewards.py",
            "function": "Polite",
            "parameters": {"url": url},
            "network": True,
        }
        spec = RewardSpec.model_validate_json(json.dumps(document))
        return build_source(spec, SourceContext(tmp_path, workers=1))

    made = source(service.url)
    made.prepare()
    samples = (Sample("abc"), Sample("a" * 11), Sample("cut"))
    scores = made.score(RewardRequest(samples))
    made.close()
    assert scores.values == [0.3, None, None]  # 1.1 is out of range
    gone = Service()
    gone.stop()
    with pytest.raises(RewardConfigError, match=r"no judge at.*vllm serve"):
        source(gone.url).prepare()


@pytest.mark.parametrize("kept", [False, True])
def test_memory_of_judgements_is_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
) -> None:
    monkeypatch.setattr("training_container.rewards.judge_cache._REMEMBERED", 2)
    source = judge(service.url, kept_in=tmp_path if kept else None)
    assert score(source, "a", "b", "c").values == [0.5] * 3
    assert score(source, "c", "b").metrics["asked"] == 0
    assert score(source, "a").metrics["asked"] == 1
    source.close()


def test_judgements_outlive_the_trainer_s_process(service: Service, tmp_path: Path) -> None:
    """An interrupted step asks again what it asked before, and does not pay again."""
    source = judge(service.url, kept_in=tmp_path)
    service.reply = lambda body: ok("Reward: 0.25" if "good" in asked(body) else "hm")
    assert score(source, "good", "x").values == [0.25, None]
    # As after a SIGKILL: nobody closed it.
    again = judge(service.url, kept_in=tmp_path)
    found = score(again, "good", "x")
    assert found.values == [0.25, None]
    assert found.metrics["asked"] == 1  # the failure, which may pass
    service.models = ["judge-2"]
    assert score(judge(service.url, kept_in=tmp_path), "good").metrics["asked"] == 1
    assert (
        score(judge(service.url, kept_in=tmp_path, temperature=0.9), "good").metrics["asked"] == 1
    )
    assert score(judge(service.url, kept_in=tmp_path, cache=False), "good").metrics["asked"] == 1
    assert score(judge(service.url, kept_in=tmp_path / "other"), "good").metrics["asked"] == 1


def test_a_cache_that_cannot_be_kept_is_no_reason_to_end(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "judge.sqlite").write_text("no database, and longer than a header of SQLite" * 9)
    assert score(judge(service.url, kept_in=tmp_path), "a").values == [0.5]
    assert "are lost" in caplog.text
    assert score(judge(service.url, kept_in=tmp_path), "a").metrics["asked"] == 0
    (tmp_path / "file").write_text("")
    assert score(judge(service.url, kept_in=tmp_path / "file" / "x"), "a").values == [0.5]
    assert "in memory only" in caplog.text
