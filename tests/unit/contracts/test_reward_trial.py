"""What a person is shown of a reward trial."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from contracts.reward_trial import (
    MAX_SAMPLES,
    RewardSourceView,
    RewardTestRequest,
    RewardTestView,
    SampleFailureView,
    trial_table,
)

ROW = {"name": "exact", "weight": 1.0, "function": "exact_match"}


def test_the_table_shows_each_answer_score_failure_and_reason() -> None:
    late = SampleFailureView(sample=1, kind="timeout", detail="not within 2 s")
    sources = [
        RewardSourceView(
            name="exact", kind="function", weight=0.5, state="scored", scores=[1.0, 0.25]
        ),
        RewardSourceView(
            name="mine", kind="file", weight=2, state="scored", scores=[None, None],
            failures=[late], seconds=1.5, contained={"network": "none (namespace)"},
        ),
        RewardSourceView(name="down", kind="judge", weight=1, state="failed", reason="no judge"),
        RewardSourceView(name="rm", kind="model", weight=1, state="refused", reason="not here"),
    ]  # fmt: skip
    view = RewardTestView(sources=sources, rewards=[0.5])
    answers = ["a\n long  answer", "x" * 60]
    lines = trial_table(answers, view).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "answer",
        "a long answer",
        "x" * 39 + "…",
    ]
    assert [line[40:].split() for line in lines[:3]] == [
        ["exact", "mine", "down", "rm", "reward"],
        ["1", "–", "failed", "–", "0.5"],
        ["0.25", "failed", "failed", "–", "–"],
    ]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3:] == [
        "",
        "exact: function, weight 0.5, 0.00 s",
        "",
        "mine: file, weight 2, 1.50 s",
        "  network: none (namespace)",
        "  1 failed (timeout), for example: not within 2 s",
        "",
        "down: judge, weight 1, 0.00 s",
        "  failed: no judge",
        "",
        "rm: model, weight 1, 0.00 s",
        "  refused: not here",
    ]


def test_an_answer_without_sources_has_a_head_only() -> None:
    assert trial_table([], RewardTestView()).split() == ["answer", "reward"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": []},
        {"samples": [{"completion": ""}] * (MAX_SAMPLES + 1)},
        {"samples": [{"completion": 1}]},
        {"reward": []},
    ],
)
def test_a_request_is_bounded_and_strict(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardTestRequest.model_validate({"rewards": [ROW], **changes})
    assert RewardTestRequest.model_validate({"rewards": [ROW]}).samples == []
