"""Runs that an object in the bucket starts."""

from __future__ import annotations

import json

import pytest
import yaml

from contracts import events
from tests.state_machine.cloud import BUCKET, Cloud
from tests.state_machine.specs import run_spec


def _put(cloud: Cloud, key: str, body: str | bytes, *, etag: str = "e1", times: int = 1) -> None:
    body = body.encode() if isinstance(body, str) else body
    cloud.s3.put_object(Bucket=BUCKET, Key=key, Body=body)
    event = events.object_created_event(BUCKET, key, size=len(body), etag=etag)
    for _ in range(times):
        cloud.invoke("on_object_created", event)


def _runs(cloud: Cloud) -> list[str]:
    _, document = cloud.api("GET", "/v1/runs")
    return [run["run_id"] for run in document["runs"]]


@pytest.fixture(autouse=True)
def quiet(cloud: Cloud) -> None:
    cloud.drop_events = True  # Each test delivers its own.


def test_the_same_object_version_starts_one_run_however_often_it_is_told_of(cloud: Cloud) -> None:
    """aws-solutions-library-samples/accelerated-intelligent-document-processing-on-aws#989,
    aws-solutions/automated-security-response-on-aws#243."""
    text = yaml.safe_dump(run_spec())
    _put(cloud, "uploads/team a+b/run.yaml", text, times=5)
    assert len(_runs(cloud)) == 1
    _put(cloud, "uploads/team a+b/run.yaml", text, etag="e2")
    assert len(_runs(cloud)) == 2
    _, view = cloud.api("GET", f"/v1/runs/{_runs(cloud)[0]}")
    assert view["source"] == f"s3://{BUCKET}/uploads/team a+b/run.yaml"


def test_files_and_data_lie_beside_the_run_file(cloud: Cloud) -> None:
    spec = run_spec()
    spec["stages"][0]["data"] = {"train": "train.jsonl"}
    spec["stages"][0]["prompt"] = {"template_file": "prompt.jinja"}
    cloud.s3.put_object(Bucket=BUCKET, Key="uploads/x/prompt.jinja", Body=b"{{ content }}!")
    cloud.s3.put_object(Bucket=BUCKET, Key="uploads/x/train.jsonl", Body=b"{}\n")
    _put(cloud, "uploads/x/run.yaml", yaml.safe_dump(spec))
    [run_id] = _runs(cloud)
    _, view = cloud.api("GET", f"/v1/runs/{run_id}")
    assert view["spec"]["stages"][0]["data"]["train"] == f"s3://{BUCKET}/uploads/x/train.jsonl"
    code = cloud.s3.get_object(Bucket=BUCKET, Key=f"runs/{run_id}/code/prompt.jinja")
    assert code["Body"].read() == b"{{ content }}!"


def test_modules_that_reward_code_imports_travel_with_it(cloud: Cloud) -> None:
    source = b"import json, helper\ndef score(completions):\n    return helper.all(completions)\n"
    reward = {"name": "r", "file": "code/rewards.py", "function": "score", "weight": 1.0}
    spec = run_spec()
    spec["stages"][0] = {
        "name": "rl", "method": "grpo", "data": {"train": "s3://run-bucket/inputs/train.jsonl"},
        "rewards": [reward], "max_steps": 2,
    }  # fmt: skip
    bodies = {"rewards": source, "helper": b"import deeper\nimport missing\n", "deeper": b"\n"}
    for name, body in bodies.items():
        cloud.s3.put_object(Bucket=BUCKET, Key=f"uploads/x/code/{name}.py", Body=body)
    _put(cloud, "uploads/x/run.yaml", yaml.safe_dump(spec))
    [run_id] = _runs(cloud)
    prefix = f"runs/{run_id}/code/code/"
    found = cloud.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    assert {item["Key"].removeprefix(prefix) for item in found} == {f"{name}.py" for name in bodies}


@pytest.mark.parametrize(
    "body",
    [
        b"name: [", b"name: x\nnmae: y\n", b"- 1", b"{}", b"", b"null", b"\xff\xfe",
        b"name: caf\xe9", b"stages: 5", b"stages: {a: 1}", b"stages: [5]", b"stages: [{data: 7}]",
        b"stages: text", b"stages: true", b"stages: [{data: }]", b"stages: [{data: {train: 7}}]",
        b"&a [*a]",
    ],
)  # fmt: skip
def test_a_bad_run_file_or_recipe_leaves_a_report_beside_it(cloud: Cloud, body: bytes) -> None:
    _put(cloud, "uploads/bad/run.yaml", body)
    _put(cloud, "recipes/nightly.yaml", body)
    _put(cloud, "uploads/nightly/rows.jsonl", "{}\n")
    for key in ("uploads/bad/run.yaml", "recipes/nightly.yaml", "uploads/nightly/rows.jsonl"):
        found = cloud.s3.get_object(Bucket=BUCKET, Key=f"{key}.error.json")
        report = json.loads(found["Body"].read())
        assert report["problems"][0]["path"]
        assert report["problems"][0]["fix"]
    assert _runs(cloud) == []


def test_each_object_version_starts_its_own_run_however_late_it_is_told_of(cloud: Cloud) -> None:
    enabled = {"Status": "Enabled"}
    cloud.s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration=enabled)
    key, told = "uploads/x/run.yaml", []
    for name in ("first", "second"):
        body = yaml.safe_dump({**run_spec(), "name": name}).encode()
        put = cloud.s3.put_object(Bucket=BUCKET, Key=key, Body=body)
        version, etag = put["VersionId"], put["ETag"].strip('"')
        told.append(
            events.object_created_event(BUCKET, key, size=len(body), etag=etag, version_id=version)
        )
    for event in (*told, told[0]):
        cloud.invoke("on_object_created", event)
    runs = [cloud.api("GET", f"/v1/runs/{run_id}")[1] for run_id in _runs(cloud)]
    assert sorted(run["spec"]["name"] for run in runs) == ["first", "second"]
    found = cloud.s3.list_objects_v2(Bucket=BUCKET, Prefix="uploads/x/")["Contents"]
    assert [item["Key"] for item in found] == [key]


def test_a_data_file_starts_the_recipe_of_its_folder(cloud: Cloud) -> None:
    recipe = {"yaml": yaml.safe_dump(run_spec())}
    status, view = cloud.api("PUT", "/v1/recipes/nightly", recipe)
    assert (status, view["name"]) == (200, "nightly")
    assert cloud.api("GET", "/v1/recipes")[1]["recipes"] == ["nightly"]
    _put(cloud, "uploads/nightly/rows.jsonl", "{}\n", times=3)
    _put(cloud, "uploads/unknown/rows.jsonl", "{}\n")
    [run_id] = _runs(cloud)
    _, view = cloud.api("GET", f"/v1/runs/{run_id}")
    data = view["spec"]["stages"][0]["data"]
    assert data["train"] == f"s3://{BUCKET}/uploads/nightly/rows.jsonl"
    assert data["validation"] == "s3://run-bucket/inputs/val.jsonl"
    assert cloud.api("DELETE", "/v1/recipes/nightly")[0] == 204
    assert cloud.api("GET", "/v1/recipes")[1]["recipes"] == []


def test_a_bad_recipe_is_refused_by_the_api_and_reported_in_the_bucket(cloud: Cloud) -> None:
    status, document = cloud.api("PUT", "/v1/recipes/bad", {"yaml": "name: x"})
    assert (status, document["type"]) == (422, "urn:grpohub:problem:invalid-run-file")
    _put(cloud, "recipes/bad.yaml", "name: x")
    keys = cloud.s3.list_objects_v2(Bucket=BUCKET, Prefix="recipes/")["Contents"]
    assert [item["Key"] for item in keys] == ["recipes/bad.yaml", "recipes/bad.yaml.error.json"]


def test_other_objects_start_nothing(cloud: Cloud) -> None:
    for key in ("uploads/run.yaml.bak", "uploads/a/b/rows.jsonl", "uploads/x/run.yaml.error.json"):
        _put(cloud, key, "name: x")
    assert _runs(cloud) == []
