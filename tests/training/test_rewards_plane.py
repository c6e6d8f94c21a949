"""The reward plane: policies, ceilings, metrics, several sources at once."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from contracts.rewards import LONGEST_BATCH, JudgeReward, RewardSpec
from training_container.cluster.limits import ClusterLimits
from training_container.rewards import plane as plane_module
from training_container.rewards.interface import (
    Failure,
    FailureKind,
    RewardConfigError,
    RewardError,
    RewardRequest,
    Sample,
    Scores,
)
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext
from training_container.rewards.worker_process import START_SECONDS

FOUR = RewardRequest(tuple(Sample(text, ground_truth="a", columns={"id": 7}) for text in "abcd"))


class Fixed:
    """A source that answers what it is told to."""

    def __init__(self, name: str, answer: Callable[[RewardRequest], Scores]) -> None:
        self.name, self.answer, self.closed = name, answer, False

    def prepare(self) -> None: ...

    def score(self, request: RewardRequest) -> Scores:
        return self.answer(request)

    def confinement(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        self.closed = True


def spec(name: str = "r", weight: float = 1.0, **settings: Any) -> RewardSpec:
    return RewardSpec(name=name, weight=weight, function="exact_match", **settings)


def plane(answer: Scores | Callable[[RewardRequest], Scores], **settings: Any) -> RewardPlane:
    call = (lambda _: answer) if isinstance(answer, Scores) else answer
    return RewardPlane([spec(**settings)], sources=[Fixed("r", call)])


def failing(kind: FailureKind = FailureKind.EXCEPTION, *indices: int) -> Scores:
    values: list[float | None] = [1.0, 2.0, 3.0, 4.0]
    for index in indices:
        values[index] = None
    return Scores(values, {index: Failure(kind, "ZeroDivisionError") for index in indices})


def test_a_failed_sample_is_excluded_by_default() -> None:
    """A made-up 0 would move the whole group's baseline (FACTS of peers: swift, EasyR1)."""
    result = plane(failing(FailureKind.EXCEPTION, 1)).score(FOUR)
    assert result.sources[0].scores == [1.0, None, 3.0, 4.0]
    assert math.isnan(result.scores_B_K[1][0])
    assert result.metrics["reward/r"] == pytest.approx(8 / 3)
    assert result.metrics["reward/r/failure_rate"] == 0.25
    assert result.metrics["reward/r/failed_exception"] == 1
    assert result.unscored == (1,)


def test_on_error_zero_scores_the_failed_sample_zero_and_still_counts_it() -> None:
    result = plane(failing(FailureKind.TIMEOUT, 1), on_error="zero").score(FOUR)
    assert result.sources[0].scores == [1.0, 0.0, 3.0, 4.0]
    assert result.metrics["reward/r/failed_timeout"] == 1
    assert result.unscored == ()


def test_on_error_raise_ends_the_run_with_source_sample_and_reason() -> None:
    with pytest.raises(RewardError, match=r"'r' failed.*sample 2: exception: ZeroDivision"):
        plane(failing(FailureKind.EXCEPTION, 2), on_error="raise").score(FOUR)


@pytest.mark.parametrize("policy", ["none", "zero"])
def test_above_the_failure_ceiling_the_run_ends_whatever_the_policy(policy: str) -> None:
    at = plane(failing(FailureKind.CRASH, 0, 1), on_error=policy, max_failure_rate=0.5)
    assert at.score(FOUR).metrics["reward/r/failure_rate"] == 0.5
    above = plane(failing(FailureKind.CRASH, 0, 1, 2), on_error=policy, max_failure_rate=0.5)
    with pytest.raises(RewardError, match=r"failed on 3 of 4 samples \(75%\).*0: crash"):
        above.score(FOUR)


def test_a_deliberate_none_is_no_failure() -> None:
    result = plane(Scores([None, None, None, 1.0]), max_failure_rate=0.0).score(FOUR)
    assert result.metrics["reward/r/none_rate"] == 0.75
    assert result.metrics["reward/r/failure_rate"] == 0
    assert result.unscored == (0, 1, 2)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0], FailureKind.WRONG_COUNT),
        ([1.0] * 5, FailureKind.WRONG_COUNT),
        ([math.inf] * 4, FailureKind.NOT_FINITE),
        (["1"] * 4, FailureKind.WRONG_TYPE),
    ],
)
def test_no_source_can_hand_rubbish_to_training(values: list[Any], kind: FailureKind) -> None:
    with pytest.raises(RewardError, match=f"4 of 4 samples.*{kind}"):
        plane(Scores(values)).score(FOUR)


def test_nan_means_not_scored() -> None:
    result = plane(Scores([math.nan, 1.0, 1.0, 1.0])).score(FOUR)
    assert result.sources[0].scores[0] is None
    assert result.metrics["reward/r/failure_rate"] == 0


def test_the_matrix_has_a_column_per_source_in_the_run_file_s_order() -> None:
    """huggingface/trl#2839 lost later sources, #5352 logged without weights."""
    sources = [
        Fixed("a", lambda _: Scores([1.0, 0.0, None, 0.0])),
        Fixed("b", lambda _: Scores([0.1, 0.2, None, 0.4])),
    ]
    both = RewardPlane([spec("a", 0.7), spec("b", 0.3)], sources=sources)
    with both:
        result = both.score(FOUR)
    assert result.names == ("a", "b")
    assert result.weights == (0.7, 0.3)
    assert result.scores_B_K[:2] == [[1.0, 0.1], [0.0, 0.2]]
    assert result.unscored == (2,)
    assert result.metrics["reward/b"] == pytest.approx(0.7 / 3)
    assert result.metrics["reward/a/std"] == pytest.approx(math.sqrt(1 / 3))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_a_source_of_weight_0_makes_no_score_of_a_failed_one(weight: float) -> None:
    """Its 0 x 1 would be a made-up 0 in a group of 0.9."""
    down = {1: Failure(FailureKind.TIMEOUT, "down")}
    sources = [
        Fixed("format", lambda _: Scores([1.0, 1.0, 1.0, 1.0])),
        Fixed("judge", lambda _: Scores([0.9, None, 0.9, 0.9], down)),
    ]
    specs = [spec("format", 0.0), spec("judge", weight)]
    result = RewardPlane(specs, sources=sources).score(FOUR)
    assert result.unscored == (1,)
    assert result.metrics["reward/unscored_samples"] == 1
    own = 0.9 * weight
    assert result.fused() == [own, None, own, own]


def test_sources_run_at_the_same_time() -> None:
    """Each waits for the other; one after the other they would never meet."""
    meeting = threading.Barrier(2)

    def wait(_: RewardRequest) -> Scores:
        meeting.wait(timeout=20)
        return Scores([1.0] * 4)

    both = RewardPlane([spec("a"), spec("b")], sources=[Fixed("a", wait), Fixed("b", wait)])
    assert both.score(FOUR).metrics["reward/a"] == 1.0


def test_a_source_that_ignores_its_deadline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """volcengine/verl#6673: a reward that never returned hung the run for ever."""
    monkeypatch.setattr("training_container.rewards.plane._GRACE_SECONDS", 0.1)
    never = threading.Event()

    def hang(_: RewardRequest) -> Scores:
        never.wait()
        return Scores([])

    sources, context = [Fixed("r", hang)], SourceContext(start_seconds=0.1)
    with pytest.raises(RewardError, match=r"hang.*r"):
        RewardPlane([spec(timeout_seconds=0.1)], context, sources).score(FOUR)
    never.set()


def test_a_fault_of_a_source_itself_ends_the_run() -> None:
    def broken(_: RewardRequest) -> Scores:
        raise KeyError("bug")

    with pytest.raises(RewardError, match="'r': 'bug'"):
        plane(broken).score(FOUR)


def test_a_sample_no_source_scored_is_logged_with_its_inputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        plane(failing(FailureKind.TIMEOUT, 1)).score(FOUR)
    assert '"completion": "b"' in caplog.text
    assert '"id": 7' in caplog.text
    assert "timeout: ZeroDivisionError" in caplog.text


def test_scores_that_stay_zero_raise_an_alarm_once(caplog: pytest.LogCaptureFixture) -> None:
    """hiyouga/EasyR1#232: all rewards 0 after an update, and nobody was told."""
    zeros = plane(Scores([0.0] * 4))
    for _ in range(7):
        metrics = zeros.score(FOUR).metrics
    assert metrics["reward/r/zero_batches"] == 7
    assert caplog.text.count("0 for every sample") == 1


@pytest.mark.parametrize(
    ("combine", "wanted"), [("max", [1.0, 0.5, 0.2, 0.0]), ("min", [0.0, 0.5, 0.2, 0.0])]
)
def test_a_judge_combines_with_the_source_it_names(combine: str, wanted: list[float]) -> None:
    """The second seed's equivalence judge: the larger of verdict and rule."""
    judge = RewardSpec(
        name="judge",
        weight=1.0,
        judge=JudgeReward(source="x", combine=combine, combine_with="rule"),
    )
    sources = [
        Fixed("judge", lambda _: Scores([0.0, None, 0.2, 0.0])),
        Fixed("rule", lambda _: Scores([1.0, 0.5, None, 0.0])),
    ]
    result = RewardPlane([judge, spec("rule", 0.0)], sources=sources).score(FOUR)
    assert list(result.sources[0].scores) == wanted
    assert list(result.sources[1].scores) == [1.0, 0.5, None, 0.0]


def test_the_dry_run_refuses_a_source_that_fails_on_every_row_whatever_its_policy() -> None:
    everything = plane(failing(FailureKind.GROUND_TRUTH, 0, 1, 2, 3), on_error="zero")
    with pytest.raises(RewardConfigError, match=r"failed on all 4 rows.*ground_truth"):
        everything.dry_run(FOUR.samples)
    some = plane(failing(FailureKind.EXCEPTION, 0, 1, 2), on_error="raise")
    assert len(some.dry_run(FOUR.samples).sources[0].failures) == 3


def test_names_are_unique_and_there_is_at_least_one_source() -> None:
    with pytest.raises(RewardConfigError, match="not unique"):
        RewardPlane([spec("a"), spec("a")])
    with pytest.raises(RewardConfigError, match="at least one"):
        RewardPlane([])


def test_a_source_that_hangs_is_named_before_the_ranks_that_wait_for_it() -> None:
    longest = LONGEST_BATCH + START_SECONDS + plane_module._GRACE_SECONDS
    assert longest < ClusterLimits().idle
