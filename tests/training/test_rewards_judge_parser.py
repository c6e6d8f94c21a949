"""From a judge's text to a number."""

from __future__ import annotations

import pytest

from contracts.rewards import JudgeParserSpec
from training_container.rewards.interface import FailureKind
from training_container.rewards.judge_parser import parse_judgement

LOST, BEYOND = FailureKind.UNPARSABLE, FailureKind.OUT_OF_RANGE


def check(text: str, wanted: float | FailureKind, **parser: object) -> None:
    verdict = parse_judgement(text, JudgeParserSpec(**parser))  # type: ignore[arg-type]
    if isinstance(wanted, FailureKind):
        assert (verdict.value, verdict.failure) == (None, wanted)
    else:
        assert verdict.failure is None
        assert verdict.value == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Reward: 0.85", 0.85),
        ("Reward:1", 1),
        ("Reward:\n0.7", 0.7),
        ("Reward:\n\n0.7", 0.7),
        ("Reward: 1.5", BEYOND),
        ("Reward: 10", BEYOND),  # a peer reads 1.0
        ("Reward: 2", BEYOND),
        ("Reward: -0.3", BEYOND),
        ("**Reward:** 0.9", 0.9),
        ("**Reward: 0.9**", 0.9),
        ("reward: 0.4", 0.4),
        ("REWARD = 0.4", 0.4),
        ("The reward is 0.4.", 0.4),
        ("Reward : 0.9", 0.9),
        ("Reward: .7", 0.7),
        ("Reward: {0.6}", 0.6),
        ("Reward: $0.6$", 0.6),
        ('"reward": 0.6', 0.6),
        ("Reward：0.6", 0.6),
        ("Reward: 0.5/1", 0.5),
        ("Reward: 5/10", LOST),
        ("Reward: 0,8", LOST),  # a peer reads 0
        ("Reward: 85%", LOST),
        ("Reward: 0.7-0.8", LOST),
        ("Reward: 0.5.1", LOST),
        ("Reward: high", LOST),
        ("Reward:", LOST),
        ("", LOST),
        ("I give 0.8", LOST),
        ("e.g. `Reward: 0.85` as asked. My verdict is Reward: 0.1", 0.1),
        ("Reward: 0.9 at first, but no: Reward: 7", BEYOND),
        ("Reward: 0.3\nThat is the reward I find fair.", 0.3),
        ("<think>Reward: 0.9?</think>Reward: 0.2", 0.2),
        ("<think>Maybe Reward: 0.9, let me see", LOST),
        ("Reward: 0.5 / 1", 0.5),
        ("Reward: 0.5 (out of 1)", 0.5),
        ("Reward: 1 / 10", LOST),
        ("Reward: 1 out of 10", LOST),
        ("**Reward: 1** / 10", LOST),
        ("Reward: 1 point out of 10", LOST),
        ("Reward: 1 of 10", LOST),
        ("Reward: 0 to 1", LOST),
        ("Reward: 0 or 1", LOST),
        ("Reward: `0` - `1`", LOST),
        ("Reward: 1 %", LOST),
        ("Reward: 0.5 + 0.3 = 0.8", LOST),
        ("Reward: 0.9 - good", 0.9),
        ("Reward: 0.9 or so", 0.9),
        ("Reward: 0.9\n- 2 typos", 0.9),
        ("Reward: 0.5 (on a scale of 0 to 1)", 0.5),
        ("Reward: " + "9" * 400, BEYOND),
    ],
)
def test_reward_label(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="reward")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("Reward: 4 / 5", LOST), ("Reward: 4 / 10", 0.4), ("Reward: 4 out of 10.", 0.4)],
)
def test_reward_label_from_0_to_10(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="reward", maximum=10.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[7]]", 0.7),
        ("[[7.5]]", 0.75),
        ("[[8/10]]", 0.8),
        ("[[ 8 ]]", 0.8),
        ("[[10]]", 1),
        ("[[0]]", 0),
        ("[[11]]", BEYOND),
        ("[[-3]]", BEYOND),
        ("[[4/5]]", LOST),
        ("[[7 or 8]]", LOST),
        ("[7]", LOST),
        ("[[score]]", LOST),
        ("I give 8", LOST),  # a peer takes any trailing number
        ("it took 30", LOST),
        ("", LOST),
        ("example [[7]] but my score is [[2]]", 0.2),
        ("[[2]], in the form [[score]] you asked for", 0.2),
        ("[[4 / 5]]", LOST),
        ("[[7\n]]", 0.7),
        ("[[1" + " " * 100_000 + "x", LOST),
    ],
)
def test_double_brackets_from_0_to_10(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="brackets", maximum=10.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[YES]]", 1),
        ("[[no]]", 0),
        ("If equal say [[YES]]. They differ: [[NO]]", 0),
        ("Verdict: YES", 1),
        ("**Verdict:** no", 0),
        ("They agree.\nYes.", 1),
        ("They differ.\n**NO**", 0),
        ("yes and no", LOST),
        ("No doubt they agree", LOST),
        ("[[MAYBE]]", LOST),
        ("", LOST),
        ("Finish with [[YES]] or [[NO]].\nVerdict: yes", 1),
        ("I was told to end with [[YES]] or [[NO]].\n\nYES", 1),
        ("Finish with [[YES]] or [[NO]].", LOST),
        ("Verdict: [[YES]]", 1),
        ("Verdict: [[YES]] or [[NO]]", LOST),
        ("[[YES]], I thought.\n\nFinal verdict: NO", 0),
        ("Verdict: no. On second thought [[YES]]", 1),
        ("Verdict: YES/NO", LOST),
        ("Verdict: yes or no?", LOST),
        ("Verdict: No errors found, so it is correct.", LOST),
        ("[[NO]] is wrong. Verdict: No errors found, so it is correct.", LOST),
        ("Verdict: No, the second one differs.", 0),
        ("Verdict: yes - they agree", 1),
        ("Verdict: yes. The reference answer is no longer needed", 1),
        ("The answer is no.", 0),
        ("<answer>Verdict: no</answer>", 0),
        ("Verdict: yes。", 1),
    ],
)
def test_verdict(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="verdict")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"score": 3, "why": "ok"}', 0.5),
        ('```json\n{"score": 5}\n```', 1),
        ('like {"score": 1}: I say {"score": 5}', 1),
        ('{"score": 5} and {"other": 1}', 1),
        ('{"score": "3"}', 0.5),
        ('{"score": 3.0, "parts": {"a": {"score": 1}}}', 0.5),
        ('{"score": 5, "criteria": {"clarity": {"score": 2}}}', 1),
        ('{"criteria": {"clarity": {"score": 2}}}', LOST),
        ('{"criteria": {"score": 2}, \'score\': 5}', LOST),
        ('{"criteria": {"score": 2}, "score": ', LOST),
        ('{"score": 3, that is, {"score": 5}', 1),
        ('{"score": 5} {"score": "bad"}', LOST),
        ('{"score": 1' + "0" * 400 + "}", BEYOND),
        ('{"score": 3} {"score": ' + "9" * 5000 + "}", BEYOND),
        ('{"score": NaN}', BEYOND),
        ('{"score": 6}', BEYOND),
        ('{"score": true}', LOST),
        ('{"score": null}', LOST),
        ('{"points": 3}', LOST),
        ('{"score": 3', LOST),
        ("{" * 3000, LOST),
        ('{"a":[' * 100_000, LOST),
        ('{"' * 100_000, LOST),
        ('{"score": 3}' + '{"' * 2000 + '{"score": 5}', LOST),
        (r"\frac{1}{2} " * 2000 + '{"score": 5}', 1),
        ('{"a":[' * 300 + "0," * 300_000, LOST),
    ],
)
def test_json_field_from_1_to_5(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="json", field="score", minimum=1.0, maximum=5.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("Note: 4 Punkte", 0.4), ("Note: 4, dann Note: 9", 0.9), ("Note: 12", BEYOND), ("4", LOST)],
)
def test_own_pattern(text: str, wanted: float | FailureKind) -> None:
    check(text, wanted, kind="regex", pattern=r"Note:\s*(\d+)", maximum=10.0)
