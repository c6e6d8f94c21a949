"""The HTTP API on real tables and buckets."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError

from contracts.run_spec import parse_run_spec
from contracts.states import RunState
from lambdas.hub import hub
from tests.state_machine.cloud import BUCKET, Cloud, stage_layout
from tests.state_machine.specs import run_spec

REWARD = """def score(completions, answer):
    return [float(a == c) for a, c in zip(answer, completions)]
"""


def grpo(**reward: Any) -> dict[str, Any]:
    return {
        "name": "rl",
        "method": "grpo",
        "data": {"train": "s3://run-bucket/inputs/train.jsonl"},
        "rewards": [
            {"name": "r", "file": "rewards.py", "function": "score", "weight": 1.0, **reward}
        ],
        "max_steps": 2,
    }


def test_an_idempotency_key_makes_one_run_of_many_requests(cloud: Cloud) -> None:
    headers = {"Idempotency-Key": "abc"}
    body = {"spec": run_spec()}
    answers = [cloud.api("POST", "/v1/runs", body, headers=headers) for _ in range(3)]
    assert {status for status, _ in answers} == {201}
    assert len({document["run_id"] for _, document in answers}) == 1
    other = {"spec": run_spec(rungs=2)}
    status, document = cloud.api("POST", "/v1/runs", other, headers=headers)
    assert (status, document["type"]) == (409, "urn:grpohub:problem:conflict")


def test_validation_says_what_the_contracts_say(cloud: Cloud) -> None:
    spec = run_spec()
    spec["stages"][0]["max_stepz"] = 3
    spec["compute"]["max_wait_hours"] = 1
    status, document = cloud.api("POST", "/v1/runs/validate", {"spec": spec})
    assert (status, document["valid"]) == (200, False)
    with pytest.raises(ValueError, match="problem") as caught:
        parse_run_spec(spec)
    assert document["problems"] == [p.as_dict() for p in caught.value.problems]  # type: ignore[attr-defined]
    status, document = cloud.api("POST", "/v1/runs", {"spec": spec})
    assert (status, document["status"]) == (422, 422)
    assert document["request_id"] == "request-1"
    assert document["problems"][0]["path"]


def test_a_reward_file_is_checked_before_anything_starts(cloud: Cloud) -> None:
    spec = run_spec(stages=[grpo()])
    _, document = cloud.api("POST", "/v1/runs/validate", {"spec": spec, "files": {}})
    assert document["problems"][0]["path"] == "stages[0].rewards[0].file"
    files = {"rewards.py": "def scoer(completions): pass"}
    _, document = cloud.api("POST", "/v1/runs/validate", {"spec": spec, "files": files})
    assert "score" in str(document["problems"])
    run_id = cloud.submit(spec, {"rewards.py": REWARD})
    stored = cloud.s3.get_object(Bucket=BUCKET, Key=f"runs/{run_id}/code/rewards.py")
    assert stored["Body"].read().decode() == REWARD


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("model.source", {"model": {"source": "./model"}}),
        ("model.source", {"model": {"source": "run:no-such-run/sft"}}),
        ("stages[0].data.train", {"data": "train.jsonl"}),
    ],
)
def test_addresses_that_only_the_client_knows_are_refused(
    cloud: Cloud, path: str, change: dict[str, Any]
) -> None:
    spec = run_spec()
    if "data" in change:
        spec["stages"][0]["data"]["train"] = change["data"]
    else:
        spec |= change
    status, document = cloud.api("POST", "/v1/runs", {"spec": spec})
    assert (status, document["problems"][0]["path"]) == (422, path)


def test_runs_are_listed_in_pages_newest_first(cloud: Cloud) -> None:
    ids = [cloud.submit(run_spec()) for _ in range(3)]
    status, first = cloud.api("GET", "/v1/runs", limit="2")
    assert status == 200
    assert [run["run_id"] for run in first["runs"]] == ids[:0:-1]
    _, second = cloud.api("GET", "/v1/runs", limit="2", next_token=first["next_token"])
    assert [run["run_id"] for run in second["runs"]] == ids[:1]
    assert second["next_token"] is None
    _, none = cloud.api("GET", "/v1/runs", state="SUCCEEDED")
    assert none["runs"] == []
    assert cloud.api("GET", "/v1/runs", next_token="not-a-token")[0] == 422
    assert cloud.api("GET", "/v1/runs", state="NEVER")[0] == 422


@pytest.mark.parametrize(
    ("code", "token", "status", "kind", "words"),
    [
        ("ThrottlingException", None, 503, "busy", "Query"),
        ("ValidationException", "W10=", 422, "bad-request", "query.next_token"),
        ("ValidationException", None, 502, "aws-error", "Query: ValidationException"),
        ("AccessDeniedException", None, 502, "aws-error", "Query: AccessDeniedException"),
    ],
    ids=["throttled", "another list's token", "our own fault", "a permission that lacks"],
)
def test_what_aws_refuses_is_a_problem_too(  # noqa: PLR0917
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch,
    code: str, token: str | None, status: int, kind: str, words: str,
) -> None:  # fmt: skip
    secret = "arn:aws:iam::1:role/secret"

    def refuse(*_: object, **__: object) -> None:
        raise ClientError({"Error": {"Code": code, "Message": secret}}, "Query")

    monkeypatch.setattr(type(hub().table), "list_runs", refuse)
    asked = {} if token is None else {"next_token": token}
    found, document = cloud.api("GET", "/v1/runs", **asked)
    assert (found, document["type"]) == (status, f"urn:grpohub:problem:{kind}")
    assert words in document["detail"]
    assert secret not in document["detail"] or kind == "busy"
    assert document["request_id"]


@pytest.mark.parametrize(
    "token",
    [
        [None, 5, 0, None, 0],
        [3, None, 0, None, 0],
        [None, None, "0", None, 0],
        [None, None, 0, "2026-01-01T00:00:00", 0],
        {},
    ],
)
def test_a_log_token_of_another_form_is_refused(cloud: Cloud, token: Any) -> None:
    run_id = cloud.submit(run_spec())
    cloud.sagemaker.job(f"{run_id}-0-a001")
    text = base64.urlsafe_b64encode(json.dumps(token).encode()).decode()
    status, document = cloud.api("GET", f"/v1/runs/{run_id}/logs", next_token=text)
    assert (status, document["type"]) == (422, "urn:grpohub:problem:bad-request")


def test_what_does_not_exist_is_404_with_a_reason(cloud: Cloud) -> None:
    for method, path in (
        ("GET", "/v1/runs/none"), ("POST", "/v1/runs/none/cancel"), ("GET", "/v1/endpoints/none"),
        ("GET", "/v1/recipes/none"), ("GET", "/v1/runs/none/timeline"), ("GET", "/v1/nothing"),
    ):  # fmt: skip
        status, document = cloud.api(method, path)
        assert status == 404, path
        assert document["detail"]
        assert document["request_id"] == "request-1"


def test_metrics_of_a_past_that_did_not_happen_are_dropped(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    cloud.train(f"{run_id}-0-a001")
    layout = stage_layout(run_id)
    rows = {1: [(1, 0.1), (2, 0.2), (3, 0.3)], 2: [(3, 0.33), (4, 0.4)]}
    for attempt, steps in rows.items():
        lines = [
            json.dumps({"step": s, "attempt": attempt, "metrics": {"loss": v}}) for s, v in steps
        ]
        body = "\n".join(lines) + '\n{"step": 9, "cut sho'
        cloud.s3.put_object(Bucket=BUCKET, Key=layout.metrics(attempt, "g"), Body=body.encode())
    _, page = cloud.api("GET", f"/v1/runs/{run_id}/metrics", limit="3")
    assert [(row["step"], row["metrics"]["loss"]) for row in page["rows"]] == [
        (1, 0.1), (2, 0.2), (3, 0.33),
    ]  # fmt: skip
    assert page["next_step"] == 4


def test_logs_go_on_where_the_last_page_ended(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    name = f"{run_id}-0-a001"
    cloud.train(name)
    logs = hub().telemetry._logs
    group, stream = "/aws/sagemaker/TrainingJobs", f"{name}/algo-1-1700000000"
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName=stream)
    start = int(time.time() * 1000) - 10_000

    def write(*texts: tuple[int, str]) -> None:
        logs.put_log_events(
            logGroupName=group, logStreamName=stream,
            logEvents=[{"timestamp": start + at, "message": text} for at, text in texts],
        )  # fmt: skip

    write((0, "a"), (1, "b"))
    _, page = cloud.api("GET", f"/v1/runs/{run_id}/logs")
    assert [line["message"] for line in page["lines"]] == ["a", "b"]
    assert page["lines"][0]["host"] == "algo-1"
    write((1, "same millisecond"), (5, "c"))
    _, page = cloud.api("GET", f"/v1/runs/{run_id}/logs", next_token=page["next_token"])
    assert [line["message"] for line in page["lines"]] == ["same millisecond", "c"]
    assert not page["complete"]
    cloud.complete(name, stage_layout(run_id))
    cloud.wait(run_id)
    _, page = cloud.api("GET", f"/v1/runs/{run_id}/logs", next_token=page["next_token"])
    assert page["lines"] == []
    assert page["complete"]


def test_attempts_and_checkpoints_show_what_happened(cloud: Cloud) -> None:
    run_id = cloud.submit(run_spec())
    layout = stage_layout(run_id)
    cloud.train(f"{run_id}-0-a001")
    cloud.checkpoint(layout, 5, 1)
    cloud.checkpoint(layout, 10, 1, hosts=2, flagged=1)
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/checkpoints")
    shown = [(c["step"], c["complete"]) for c in document["checkpoints"]]
    assert shown == [(10, False), (5, True)]
    assert "no flag of host 1 of 2" in document["checkpoints"][0]["reasons"]
    cloud.complete(f"{run_id}-0-a001", layout)
    cloud.wait(run_id)
    _, document = cloud.api("GET", f"/v1/runs/{run_id}/attempts")
    [attempt] = document["attempts"]
    assert attempt["spot_savings"] == pytest.approx(0.7)
    assert attempt["outcome"] == "completed"


def test_rewards_are_tried_out_in_the_trainer_s_sandbox(cloud: Cloud) -> None:
    samples = [{"completion": text, "columns": {"answer": "4"}} for text in ("4", "5")]
    mine = {"name": "mine", "weight": 2.0, "file": "r.py", "function": "score"}
    judge = {"name": "judge", "weight": 1.0, "judge": {"endpoint": {"url": "http://judge/v1"}}}
    body = {"rewards": [mine, judge], "files": {"r.py": REWARD}, "samples": samples}
    status, document = cloud.api("POST", "/v1/rewards:test", body)
    assert status == 200
    scored, refused = document["sources"]
    assert (scored["state"], scored["scores"]) == ("scored", [1.0, 0.0])
    assert scored["contained"].keys() == {"network", "files", "credentials", "processes"}
    assert refused["state"] == "refused"
    assert "reaches none" in refused["reason"]
    assert document["rewards"] == [2.0, 0.0]


def test_what_is_wrong_with_a_reward_is_said_without_running_it(cloud: Cloud) -> None:
    mine = {"name": "mine", "weight": 1.0, "file": "r.py", "function": "score"}
    body: dict[str, Any] = {
        "rewards": [mine, {"name": "mine", "weight": 1.0, "function": "exactmatch"}],
        "files": {"r.py": "def score(completions, nope): pass", "../x.py": ""},
        "samples": [{"completion": "4", "columns": {"answer": "4"}}],
    }
    _, document = cloud.api("POST", "/v1/rewards:test", body)
    assert [problem["path"] for problem in document["problems"]] == [
        "files.../x.py", "rewards[1].name", "rewards[1].function", "r.py",
    ]  # fmt: skip
    assert document["sources"] == []
    body["files"] = {}
    _, document = cloud.api("POST", "/v1/rewards:test", body)
    assert document["problems"][-1]["reason"] == "is not in the request"
    body["samples"] = [{"completion": 4}]
    assert cloud.api("POST", "/v1/rewards:test", body)[0] == 422


def test_a_model_of_an_earlier_run_is_a_base_model(cloud: Cloud) -> None:
    first = cloud.submit(run_spec())
    cloud.train(f"{first}-0-a001")
    cloud.complete(f"{first}-0-a001", stage_layout(first))
    assert cloud.wait(first).run.state is RunState.SUCCEEDED
    second = cloud.submit({**run_spec(), "model": {"source": f"run:{first}/sft"}})
    job = cloud.train(f"{second}-0-a001")
    uris = [c["DataSource"]["S3DataSource"]["S3Uri"] for c in job["InputDataConfig"]]
    assert f"s3://{BUCKET}/{stage_layout(first).model_prefix}" in uris


def test_the_api_serves_its_own_description(cloud: Cloud) -> None:
    status, document = cloud.api("GET", "/v1/openapi.json")
    assert status == 200
    assert "/v1/runs/{run_id}/cancel" in document["paths"]
    status, info = cloud.api("GET", "/v1/info")
    assert (status, info["bucket"]) == (200, BUCKET)
