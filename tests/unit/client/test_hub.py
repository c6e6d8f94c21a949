"""The Python client over real HTTP: signing, retries, errors, paging."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import boto3
import pytest

from client.chat import AnswerError, deltas
from client.hub import ApiError, Hub, RunFailedError, UnreachableError
from client.settings import ConfigurationError, Settings
from contracts.api import LogLine, LogsPage, MetricsPage, RunPage, TimelinePage
from contracts.problems import InvalidInputError
from contracts.states import RunState
from tests.unit.client.stub_api import StubApi, problem
from tests.unit.client.views import NOON, endpoint_view, happened, metric_row, run_view

RUN_ID = "tv-20260102-abc123"
RUN = f"/v1/runs/{RUN_ID}"


def test_every_request_is_signed_for_the_api_in_its_region(api: StubApi, hub: Hub) -> None:
    hub.info()
    [asked] = api.asked
    scope = r"Credential=AKIDEXAMPLE/\d{8}/eu-west-1/execute-api/aws4_request"
    assert re.search(scope, asked.headers["authorization"])
    assert "host" in asked.headers["authorization"]
    assert asked.headers["x-amz-date"]


def test_no_proxy_stands_between_the_client_and_a_hub_on_this_machine(
    api: StubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    api.on("GET /", (200, b"<ListAllMyBucketsResult/>"))
    session = boto3.Session("a", "b", region_name="us-east-1")
    settings = Settings(api.url, "us-east-1", session, api.url)
    with Hub(settings=settings) as hub:
        hub.info()
    s3: Any = settings.aws("s3")
    s3.list_buckets()
    assert [asked.path for asked in api.asked] == ["/v1/info", "/"]


def test_a_read_is_repeated_after_passing_trouble(api: StubApi, hub: Hub) -> None:
    trouble = (503, problem(503, "busy"))
    api.on(f"GET {RUN}", trouble, (429, b"slow down"), run_view())
    assert hub.run("tv-20260102-abc123").state is RunState.TRAINING
    assert len(api.asked) == 3


def test_a_read_gives_up_after_some_tries_with_the_apis_own_words(api: StubApi, hub: Hub) -> None:
    api.on(f"GET {RUN}", (503, problem(503, "the table is throttled")))
    with pytest.raises(ApiError, match="the table is throttled"):
        hub.run("tv-20260102-abc123")
    assert len(api.asked) == 4


def test_a_submission_is_repeated_under_one_idempotency_key(api: StubApi, hub: Hub) -> None:
    """A lost answer must not start a second run."""
    api.on("POST /v1/runs", (502, b""), (201, run_view()))
    hub.create_run({"name": "tv"}, {"r.py": "x"})
    first, second = api.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == {"spec": {"name": "tv"}, "files": {"r.py": "x"}}

    api.on("POST /v1/runs", (201, run_view()))
    hub.create_run({"name": "tv"})
    assert api.asked[-1].headers["idempotency-key"] != first.headers["idempotency-key"]


def test_a_deed_without_a_key_is_never_repeated(api: StubApi, hub: Hub) -> None:
    api.on(f"POST {RUN}/resume", (503, problem(503, "busy")))
    with pytest.raises(ApiError):
        hub.resume("tv-20260102-abc123")
    assert len(api.asked) == 1


def test_a_refusal_carries_what_to_mend(api: StubApi, hub: Hub) -> None:
    wrong = {"path": "name", "value": "TV", "reason": "is upper case", "fix": "Lower it."}
    api.on("POST /v1/runs", (422, problem(422, "the run file has 1 problem", [wrong])))
    with pytest.raises(ApiError, match=r"name: is upper case\. Lower it\.") as info:
        hub.create_run({})
    assert info.value.problem.problems[0].path == "name"
    assert len(api.asked) == 1


def test_an_answer_of_the_gateway_itself_is_reported_as_it_is(api: StubApi, hub: Hub) -> None:
    api.on(f"GET {RUN}", (403, b'{"message":"Forbidden"}'))
    with pytest.raises(ApiError, match="Forbidden") as info:
        hub.run("tv-20260102-abc123")
    assert info.value.problem.status == 403


def test_an_address_nobody_answers_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        session = boto3.Session("a", "b", region_name="us-east-1")
        hub = Hub(settings=Settings(url, "us-east-1", session))
        with hub, pytest.raises(UnreachableError, match=url):
            hub.info()


def test_without_credentials_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    session = boto3.Session(region_name="us-east-1")
    monkeypatch.setattr(session, "get_credentials", lambda: None)
    with pytest.raises(ConfigurationError, match="no AWS credentials"):
        Hub(settings=Settings("https://x", "us-east-1", session))


def test_names_cannot_leave_their_place_in_the_path(api: StubApi, hub: Hub) -> None:
    with pytest.raises(ApiError):
        hub.run("../info?x=1")
    assert api.asked[0].path == "/v1/runs/..%2Finfo%3Fx%3D1"


def test_runs_are_paged_until_the_limit(api: StubApi, hub: Hub) -> None:
    page = RunPage(runs=[run_view(), run_view()], next_token="t1")
    api.on("GET /v1/runs", page, RunPage(runs=[run_view()], next_token="t2"))
    assert len(hub.runs(state=RunState.TRAINING, limit=3)) == 3
    assert [asked.query.get("next_token") for asked in api.asked] == [None, "t1"]
    assert api.asked[0].query["state"] == "TRAINING"

    api.on("GET /v1/runs", RunPage(runs=[run_view()]))
    assert len(hub.runs(limit=50)) == 1


def test_metrics_are_paged_by_step_within_one_stage(api: StubApi, hub: Hub) -> None:
    api.on(
        f"GET {RUN}/metrics",
        MetricsPage(stage_index=1, rows=[metric_row(1), metric_row(2)], next_step=3),
        MetricsPage(stage_index=1, rows=[metric_row(3)]),
    )
    assert [row["step"] for row in hub.metrics("tv-20260102-abc123")] == [1, 2, 3]
    assert api.asked[1].query == {"stage": "1", "from_step": "3"}


def test_the_timeline_is_read_to_its_end(api: StubApi, hub: Hub) -> None:
    api.on(
        f"GET {RUN}/timeline",
        TimelinePage(entries=[happened("run.created", "a")], next_token="t"),
        TimelinePage(entries=[happened("attempt.submitted", "b")]),
    )
    assert [entry.text for entry in hub.timeline("tv-20260102-abc123")] == ["a", "b"]


def log_page(*messages: str, complete: bool = False) -> LogsPage:
    lines = [LogLine(time=NOON, host="algo-1", message=message) for message in messages]
    return LogsPage(job_name="j", lines=lines, next_token="t", complete=complete)


def test_logs_end_with_what_there_is_or_follow_to_the_end(api: StubApi, hub: Hub) -> None:
    pages = (log_page("a", "b"), log_page(), log_page("c"), log_page("d", complete=True))
    api.on(f"GET {RUN}/logs", *pages)
    assert [line.message for line in hub.logs("tv-20260102-abc123")] == ["a", "b"]

    api.on(f"GET {RUN}/logs", *pages)
    followed = [line.message for line in hub.logs("tv-20260102-abc123", follow=True)]
    assert followed == ["a", "b", "c", "d"]
    assert api.asked[-1].query["next_token"] == "t"


def test_waiting_returns_a_success_and_raises_anything_else(api: StubApi, hub: Hub) -> None:
    seen: list[str] = []
    api.on(f"GET {RUN}", run_view("TRAINING"), run_view("DEPLOYING"), run_view("SUCCEEDED"))
    run = hub.wait("tv-20260102-abc123", seen=lambda view: seen.append(view.state.value))
    assert run.state is RunState.SUCCEEDED
    assert seen == ["TRAINING", "DEPLOYING", "SUCCEEDED"]

    api.on(f"GET {RUN}", run_view("FAILED", reason="the data is empty"))
    with pytest.raises(RunFailedError, match="FAILED: the data is empty"):
        hub.wait("tv-20260102-abc123")

    api.on(f"GET {RUN}", run_view("TRAINING"))
    with pytest.raises(TimeoutError, match="still TRAINING"):
        hub.wait("tv-20260102-abc123", timeout=0)


def test_a_chat_sends_the_openai_body_and_returns_the_text(api: StubApi, hub: Hub) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "UP"}}]}
    api.on("POST /v1/endpoints/tv/chat", (200, answer))
    messages = [{"role": "user", "content": "?"}]
    assert hub.chat("tv", messages, max_tokens=5) == "UP"
    assert api.asked[0].body == {"messages": messages, "max_tokens": 5}


def test_a_stream_is_read_whatever_bytes_it_is_cut_at() -> None:
    events = [{"choices": [{"delta": {"role": "assistant"}}]}]
    events += [{"choices": [{"delta": {"content": text}}]} for text in ("Grüß", " Gott", "!")]
    lines = [f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events]
    stream = "".join([": comment\n", *lines, "data: [DONE]\n\n"]).encode()
    for size in (1, 2, 7, 1000):
        chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert "".join(deltas(iter(chunks))) == "Grüß Gott!"


def test_a_stream_that_breaks_off_is_an_error_and_no_short_answer() -> None:
    lines = [
        {"choices": [{"delta": {"content": "Down"}}]},
        {"error": {"message": "the engine died", "code": 500}},
    ]
    pieces = deltas(iter([f"data: {json.dumps(line)}\n\n".encode() for line in lines]))
    assert next(pieces) == "Down"
    with pytest.raises(AnswerError, match="the engine died"):
        next(pieces)


def test_a_model_that_only_thought_has_said_nothing(api: StubApi, hub: Hub) -> None:
    cut_off = {"choices": [{"message": {"content": None, "reasoning": "Let me"}}]}
    api.on("POST /v1/endpoints/tv/chat", (200, cut_off), (200, {"detail": "no chat"}))
    assert hub.chat("tv", [{"role": "user", "content": "?"}]) == ""
    with pytest.raises(AnswerError, match="no chat"):
        hub.chat("tv", [{"role": "user", "content": "?"}])


def test_an_endpoint_is_found_by_the_run_it_serves(api: StubApi, hub: Hub) -> None:
    view = endpoint_view(run_id=RUN_ID)
    api.on("GET /v1/endpoints/tv", view)
    api.on(f"GET /v1/runs/{RUN_ID}", run_view(endpoint_name="tv"))
    assert hub.endpoint_of("tv") == view
    assert hub.endpoint_of(RUN_ID) == view


@pytest.mark.parametrize(
    ("run", "serves", "reason"),
    [
        (None, None, "neither an endpoint nor a run"),
        ({"endpoint_name": None}, None, "without an endpoint"),
        ({"endpoint_name": "tv"}, "later-20260103-abc123", "serves later-20260103-abc123 now"),
    ],
)
def test_a_run_that_no_endpoint_serves_is_said_to_have_none(
    api: StubApi, hub: Hub, run: dict[str, Any] | None, serves: str | None, reason: str
) -> None:
    if run is not None:
        api.on(f"GET /v1/runs/{RUN_ID}", run_view(**run))
    if serves is not None:
        api.on("GET /v1/endpoints/tv", endpoint_view(run_id=serves))
    with pytest.raises(InvalidInputError, match=reason):
        hub.endpoint_of(RUN_ID)


def test_a_streamed_chat_names_the_component_of_an_endpoint_that_scales_to_zero(
    api: StubApi, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, Any] = {}
    line = b'data: {"choices": [{"delta": {"content": "UP"}}]}\n'

    class Runtime:
        def invoke_endpoint_with_response_stream(self, **request: Any) -> dict[str, Any]:
            sent.update(request)
            return {"Body": [{"PayloadPart": {"Bytes": line}}]}

    monkeypatch.setattr(Settings, "aws", lambda _self, _service: Runtime())
    api.on("GET /v1/endpoints/tv", endpoint_view(inference_component="tv-component"))
    assert list(hub.stream_chat("tv", [{"role": "user", "content": "?"}])) == ["UP"]
    assert sent["InferenceComponentName"] == "tv-component"
    assert json.loads(sent["Body"])["stream"] is True
