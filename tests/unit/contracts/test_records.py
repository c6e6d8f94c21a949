"""Small records that cross a boundary: attempts, control, failures, manifests, metrics."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from contracts.attempt import AttemptConfig, CheckpointRef, WeightsFrom
from contracts.built_in_rewards import BUILT_IN_PARAMETERS
from contracts.control import Control
from contracts.failures import EXIT_MEANINGS, ExitCode, Failure, parse_failure
from contracts.instances import INSTANCES, instance
from contracts.metrics import (
    MARK,
    MAX_DEFINITIONS,
    NOT_COMPUTED,
    STEP_METRICS,
    metric_definitions,
    step_line,
)
from contracts.model_manifest import ManifestFile, ModelManifest
from contracts.problems import InvalidInputError, nearest
from contracts.reward_catalogue import REWARD_SUMMARIES
from contracts.states import Outcome

CONFIG = AttemptConfig(
    run_id="tv-20260102-abc123",
    stage_index=1,
    stage="smooth",
    attempt=2,
    bucket="b",
    spec_sha256="0" * 64,
    resume_floor=CheckpointRef(step=20, generation="g"),
    weights_from=WeightsFrom(
        stage_index=0, stage="warm-up", checkpoint=CheckpointRef(step=9, generation="h")
    ),
)


def test_an_attempt_survives_the_trip_through_hyperparameters() -> None:
    """SageMaker: values are strings of at most 2500 characters; the config names the checkpoint
    an attempt resumes from (aws/sagemaker-python-sdk#1040)."""
    values = CONFIG.to_hyperparameters()
    assert AttemptConfig.from_hyperparameters(values) == CONFIG
    assert all(isinstance(value, str) and len(value) <= 2500 for value in values.values())
    assert len(values) <= 100
    assert CONFIG.layout.control == "runs/tv-20260102-abc123/stages/1-smooth/control.json"


def test_an_attempt_without_options_sends_none() -> None:
    bare = CONFIG.model_copy(update={"resume_floor": None, "weights_from": None})
    assert set(bare.to_hyperparameters()).isdisjoint({"resume_floor", "weights_from"})
    assert AttemptConfig.from_hyperparameters(bare.to_hyperparameters()) == bare


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempt": "zero"}, "is not JSON"),
        ({"attempt": "0"}, "attempt: Input should be greater than or equal to 1"),
        ({"step": "1"}, "step: Extra inputs"),
    ],
)
def test_hyperparameters_of_another_kind_are_refused_by_name(
    change: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        AttemptConfig.from_hyperparameters({**CONFIG.to_hyperparameters(), **change})


def test_only_the_current_or_a_newer_attempt_may_commit() -> None:
    control = Control(attempt=3)
    assert [control.allows(attempt) for attempt in (2, 3, 4)] == [False, True, True]


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_has_a_meaning_and_survives_sagemakers_wrapping(code: ExitCode) -> None:
    failure = Failure(code, "the cause\nin two lines")
    wrapped = f"AlgorithmError: ExecuteUserScriptError: {failure.text()}, exit code: {int(code)}"
    found = parse_failure(wrapped)
    assert found is not None
    assert (found.code, found.outcome, found.retryable) == (code, *EXIT_MEANINGS[code][:2])
    assert found.cause.startswith("the cause")


def test_a_failure_file_never_exceeds_what_sagemaker_keeps() -> None:
    assert len(Failure(ExitCode.DATA, "x" * 5000).text()) == 1024


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "InternalServerError: We encountered an internal error.",
        "outcome=user_failure retryable=false code=from_the_future\nx",
    ],
)
def test_a_reason_of_somebody_else_is_not_taken_for_ours(reason: str) -> None:
    assert parse_failure(reason) is None


def test_only_a_finished_container_means_completed() -> None:
    completed = [
        code for code, (outcome, *_) in EXIT_MEANINGS.items() if outcome is Outcome.COMPLETED
    ]
    assert completed == [ExitCode.OK]
    assert set(EXIT_MEANINGS) == set(ExitCode)


def manifest(*files: tuple[str, int, str]) -> ModelManifest:
    return ModelManifest(
        run_id="r",
        stage="s",
        step=1,
        architecture="Qwen3ForCausalLM",
        parameters=5,
        dtype="bfloat16",
        base_model="s3://b/m/",
        files=tuple(
            ManifestFile(path=path, size=size, sha256=sha * 64) for path, size, sha in files
        ),
    )


def test_a_models_version_is_its_content_in_any_order() -> None:
    one = manifest(("a", 1, "0"), ("b", 2, "1"))
    assert one.version == manifest(("b", 2, "1"), ("a", 1, "0")).version
    assert one.version != manifest(("a", 1, "0"), ("b", 2, "2")).version
    assert one.version != manifest(("a", 1, "0"), ("c", 2, "1")).version
    assert one.size == 3
    assert ModelManifest.model_validate_json(one.model_dump_json()) == one


def test_a_manifest_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError):
        ModelManifest.model_validate({**manifest().model_dump(), "extra": 1})


def test_an_instance_has_one_rank_per_gpu_and_one_without() -> None:
    assert instance("ml.g6e.48xlarge").ranks == 8
    assert instance("ml.m5.xlarge").ranks == 1
    with pytest.raises(KeyError):
        instance("ml.nothing")


def test_the_instance_table_is_plausible() -> None:
    for name, row in INSTANCES.items():
        assert name == row.name
        assert name.startswith("ml.")
        assert (row.gpus == 0) == (row.gpu_memory_gib == 0)
        assert row.memory_gib >= row.vcpus >= 2


def test_the_nearest_name_is_suggested_only_when_it_is_near() -> None:
    assert nearest("max_stepz", ["max_steps", "epochs"]) == "max_steps"
    assert nearest("zzz", ["max_steps", "epochs"]) is None
    assert nearest(7, ["max_steps"]) is None


def test_every_built_in_reward_has_its_line_in_the_catalogue() -> None:
    assert set(REWARD_SUMMARIES) == set(BUILT_IN_PARAMETERS)
    assert all(summary.endswith(".") for summary in REWARD_SUMMARIES.values())


# Metrics


@pytest.mark.parametrize("method", sorted(STEP_METRICS))
def test_sagemaker_reads_from_the_line_every_number_that_was_written(method: str) -> None:
    values = {name: 0.5 + index for index, name in enumerate(STEP_METRICS[method])}
    values |= {"reward/a": -1e-9, "validation/reward/a": 3.0} if method == "grpo" else {}
    sources = ["a"] if method == "grpo" else []
    line = step_line(method, 12, values, sources)

    read = {}
    for definition in metric_definitions(method, sources):
        match = re.search(definition["Regex"], line)
        assert match is not None, definition
        read[definition["Name"]] = float(match[1])

    assert read == pytest.approx({"step": 12.0, **values})
    assert line.startswith(MARK)


def test_what_is_no_number_leaves_a_gap_and_not_a_zero() -> None:
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": NOT_COMPUTED,
               "tokens_per_second": True, "seconds/step": 2}  # fmt: skip
    assert step_line("sft", 1, metrics, []) == f"{MARK} step=1 seconds/step=2"


def test_other_output_is_not_taken_for_metrics() -> None:
    [loss] = [d for d in metric_definitions("sft", []) if d["Name"] == "loss"]
    assert re.search(loss["Regex"], "the user printed loss=3") is None
    assert re.search(loss["Regex"], f"{MARK} step=1 validation/loss=3") is None


def test_definitions_stay_within_sagemakers_limits() -> None:
    definitions = metric_definitions("grpo", [f"source_{index}" for index in range(50)])
    assert len(definitions) == MAX_DEFINITIONS
    assert all(len(d["Name"]) <= 255 and len(d["Regex"]) <= 500 for d in definitions)
    assert all(re.compile(d["Regex"]).groups == 1 for d in definitions)
