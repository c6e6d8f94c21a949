"""Keys and names: legal, deterministic, and read back as written."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.layout import (
    MAX_STEP,
    RunLayout,
    StageLayout,
    attempt_of_job,
    endpoint_alarm_name,
    endpoint_config_name,
    job_name,
    join_uri,
    model_name,
    new_run_id,
    parse_flag_key,
    parse_host_key,
    parse_job_name,
    parse_s3_uri,
    recipe_file_key,
    recipe_files_prefix,
    recipe_key,
    upload_error_key,
    wake_alarm_name,
)

AWS_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
LONGEST_NAME = "a" * 28
DAY = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
names = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,26}[a-z0-9])?\Z")
STAGE = RunLayout("tv-20260102-abc123").stage(1, "smooth")


@given(name=names, stage=st.integers(0, 9), attempt=st.integers(1, 9999))
def test_every_aws_name_of_a_run_is_legal_and_says_whose_it_is(
    name: str, stage: int, attempt: int
) -> None:
    """CreateTrainingJob, CreateModel and CreateEndpointConfig take at most 63 characters."""
    run_id = new_run_id(name, now=DAY, token="0a1b2c")
    job = job_name(run_id, stage, attempt)
    version = "f" * 64
    for aws_name in (
        job, model_name(run_id, version, version), endpoint_config_name(job, version, version)
    ):  # fmt: skip
        assert AWS_NAME.fullmatch(aws_name)
        assert len(aws_name) <= 63
    assert parse_job_name(job) == (run_id, stage, attempt)
    assert attempt_of_job(job) == attempt


def test_names_are_a_function_of_what_they_name() -> None:
    assert job_name("tv-1", 0, 7) == "tv-1-0-a007"
    assert job_name("tv-1", 0, 1234) == "tv-1-0-a1234"
    assert model_name("tv-1", "1" * 64, "2" * 64) == f"tv-1-{'1' * 8}-{'2' * 7}"
    assert endpoint_config_name("e" * 63, "1" * 64, "2" * 64) == f"{'e' * 44}-{'1' * 8}-{'2' * 8}"
    assert endpoint_alarm_name("GrpoHub", "tv") == "GrpoHub-endpoint-tv-errors"
    assert wake_alarm_name("tv-12345678-87654321") == "grpohub-wake-tv-12345678-87654321"


@pytest.mark.parametrize("name", ["Tv", "-tv", "tv-", "tv_1", "", "ä", "a" * 47])
def test_a_run_id_that_would_be_no_aws_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        RunLayout(name)


def test_a_new_run_id_that_would_be_too_long_is_refused() -> None:
    assert len(new_run_id(LONGEST_NAME, now=DAY, token="1234567")) == 45
    with pytest.raises(ValueError, match="1 to 46"):
        new_run_id(LONGEST_NAME, now=DAY, token="1-2-3-4-5")


@pytest.mark.parametrize(("stage", "attempt"), [(-1, 1), (10, 1), (0, 0), (0, 10_000)])
def test_a_stage_or_attempt_out_of_range_has_no_job_name(stage: int, attempt: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        job_name("tv-1", stage, attempt)


@pytest.mark.parametrize(
    "name", ["somebody-elses-job", "tv-1-0-a01", "tv-1-10-a001", "TV-1-0-a001"]
)
def test_names_of_other_jobs_are_not_taken_for_ours(name: str) -> None:
    assert parse_job_name(name) is None
    with pytest.raises(ValueError, match="not a job name"):
        attempt_of_job(name)


@given(
    step=st.integers(0, MAX_STEP),
    host=st.integers(0, 63),
    generation=st.from_regex(r"\A[A-Za-z0-9._-]{1,80}\Z"),
)
def test_a_flag_key_says_all_it_was_built_from(step: int, host: int, generation: str) -> None:
    parsed = parse_flag_key(STAGE.flag(step, generation, host))
    assert parsed is not None
    assert (parsed.run_id, parsed.stage_index, parsed.stage) == (STAGE.run.run_id, 1, "smooth")
    assert (parsed.step, parsed.generation, parsed.host_rank) == (step, generation, host)


def test_a_host_key_says_all_it_was_built_from() -> None:
    parsed = parse_host_key(STAGE.host(12, 3))
    assert parsed is not None
    assert (parsed.run_id, parsed.stage_index, parsed.stage) == (STAGE.run.run_id, 1, "smooth")
    assert (parsed.attempt, parsed.host_rank) == (12, 3)
    assert parse_host_key(STAGE.control) is None


@given(steps=st.lists(st.integers(0, MAX_STEP), min_size=2))
def test_checkpoint_prefixes_sort_as_their_steps(steps: list[int]) -> None:
    prefixes = [STAGE.checkpoint_prefix(step, "g") for step in sorted(steps)]
    assert prefixes == sorted(prefixes)


@pytest.mark.parametrize("step", [-1, MAX_STEP + 1])
def test_a_step_that_would_not_sort_has_no_key(step: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        STAGE.checkpoint_prefix(step, "g")


@pytest.mark.parametrize("generation", ["", "a/b", "a" * 81, "ä"])
def test_a_generation_that_would_split_a_key_is_refused(generation: str) -> None:
    with pytest.raises(ValueError, match="not a generation"):
        STAGE.checkpoint_prefix(1, generation)


def test_no_key_has_a_double_slash_and_every_key_is_under_its_run() -> None:
    """A double slash once made complete checkpoints invisible."""
    run = STAGE.run
    keys = [
        run.spec, run.code_prefix, run.code("a/b.py"), run.smoke_test, STAGE.prefix,
        STAGE.checkpoints_prefix, STAGE.host_prefix(1, "g", 0), STAGE.flag(1, "g", 0),
        STAGE.control, STAGE.metrics(1, "g"), STAGE.rollouts(1), STAGE.tensorboard_prefix,
        STAGE.hosts_prefix, STAGE.host(1, 0), STAGE.cluster(1), STAGE.model_prefix,
        STAGE.model_manifest, STAGE.rollouts_prefix, STAGE.metrics_prefix, STAGE.sample_prompt,
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("runs/tv-20260102-abc123/") and "//" not in key for key in keys)


def test_the_keys_are_those_of_the_documented_layout() -> None:
    assert STAGE.flag(20, "g", 1) == (
        "runs/tv-20260102-abc123/stages/1-smooth/checkpoints/step-00000020/g/sync_completed_1.flag"
    )
    assert STAGE.host_prefix(20, "g", 1).endswith("/step-00000020/g/host-1/")
    assert STAGE.metrics(2, "g").endswith("/metrics/002-g.jsonl")
    assert STAGE.rollouts(3).endswith("/rollouts/step-00000003.parquet")
    assert recipe_key("nightly") == "recipes/nightly.yaml"
    assert recipe_file_key("nightly", "a/b.py") == "recipes/nightly/a/b.py"
    assert recipe_file_key("nightly", "b.py").startswith(recipe_files_prefix("nightly"))
    assert upload_error_key("uploads/x/run.yaml") == "uploads/x/run.yaml.error.json"


@pytest.mark.parametrize("path", ["../x.py", "/x.py", "a//b.py", "a/./b.py", "", "a\\b.py", "a/"])
def test_a_user_file_cannot_leave_its_runs_code_prefix(path: str) -> None:
    with pytest.raises(ValueError, match="plain relative path"):
        RunLayout("tv").code(path)
    with pytest.raises(ValueError, match="plain relative path"):
        recipe_file_key("nightly", path)


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://b/k/x", ("b", "k/x")),
        ("s3://b/k/", ("b", "k/")),
        ("s3://b", ("b", "")),
        ("s3://b/a b+c\n", ("b", "a b+c\n")),
    ],
)
def test_an_s3_address_splits_into_bucket_and_key(uri: str, parts: tuple[str, str]) -> None:
    assert parse_s3_uri(uri) == parts


@pytest.mark.parametrize("uri", ["", "s3:/b/k", "https://b/k", "s3:///k", "b/k"])
def test_what_is_no_s3_address_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="not an s3"):
        parse_s3_uri(uri)


def test_joining_is_the_reverse_of_splitting() -> None:
    assert parse_s3_uri(join_uri("b", "k/x")) == ("b", "k/x")


def test_a_stage_layout_is_its_runs() -> None:
    assert StageLayout(RunLayout("tv"), 0, "sft").prefix == "runs/tv/stages/0-sft/"
