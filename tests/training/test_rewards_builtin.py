"""The built-in reward functions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from contracts.built_in_rewards import BUILT_IN_PARAMETERS
from training_container.rewards.interface import GroundTruthError, RewardConfigError, Sample
from training_container.rewards.registry import built_in, built_ins, catalogue


def score(name: str, completion: str, truth: Any = None, tokens: int = 0, **parameters: Any) -> Any:
    sample = Sample(completion, ground_truth=truth, response_length=tokens)
    return built_in(name).bind(parameters)(sample)


GOOD = "<think>left, then up</think> <answer>[{'action': ['LEFT', 'UP']}]</answer>"


@pytest.mark.parametrize(
    ("completion", "parameters", "wanted"),
    [
        (GOOD, {}, 1),
        (f"\n {GOOD}\n", {}, 1),
        ("<think>a</think><answer>b</answer>", {}, 1),
        ("<think>a</think> and <answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b</answer> bye", {}, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0),
        ("<think>a<think>b</think></think><answer>b</answer>", {}, 0),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think></think><answer>b</answer>", {}, 0),
        ("<think></think><answer>b</answer>", {"allow_empty_thinking": True}, 1),
        ("<think>a</think><answer> </answer>", {}, 0),
        ("", {}, 0),
        ("<think>" * 50_000, {}, 0),
        (GOOD, {"answer": "actions"}, 1),
        ("<think>a</think><answer>[{'action': ['JUMP']}]</answer>", {"answer": "actions"}, 0),
        ("<think>a</think><answer>[{'action'</answer>", {"answer": "actions"}, 0),
        ('<think>a</think><answer>{"x": 1}</answer>', {"answer": "json"}, 1),
        ("<think>a</think><answer>{x: 1}</answer>", {"answer": "json"}, 0),
    ],
)
def test_think_answer_format(completion: str, parameters: dict[str, Any], wanted: float) -> None:
    assert score("think_answer_format", completion, **parameters) == wanted


def test_think_answer_format_rebuilds_what_the_template_prefilled() -> None:
    """huggingface/trl#6966: 0 for every answer when the template writes the opening tag."""
    completion = "reasons</think><answer>b</answer>"
    assert score("think_answer_format", completion) == 0
    assert score("think_answer_format", completion, prefill="<think>") == 1


@pytest.mark.parametrize(
    ("name", "completion", "truth", "wanted"),
    [
        ("boxed_math", r"so \boxed{\frac{1}{2}}", "0.5", 1),
        ("boxed_math", r"\boxed{1} no, \boxed{\dfrac12}", r"\frac{1}{2}", 1),
        ("boxed_math", r"\boxed{2}", "0.5", 0),
        ("boxed_math", r"0.5", "0.5", 0),
        ("boxed_math", r"<think>\boxed{0.5}</think> I do not know", "0.5", 0),
        ("boxed_math", r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1),
        ("boxed_math", r"\boxed{\{1,2\}}", r"\{2, 1\}", 1),
        ("boxed_math", r"\boxed{7", "7", 0),
        ("boxed_math", r"\boxed{007}", 7, 1),
        ("open_math", "the result is 1/2", "0.5", 1),
        ("open_math", "<think>x = 3</think> x = 4", "4", 1),
        ("open_math", "<think>5</think><answer>$\\frac{3}{4}$</answer>", "0.75", 1),
        ("open_math", "no numbers here", "4", 0),
        ("open_math", "", "4", 0),
        ("open_math", "答案是5。", "5", 1),
        ("open_math", "答案：5，因为有5个。", "5", 1),
        ("open_math", "答案是1/2。", "2", 0),
        ("open_math", "<answer>共-12个</answer>", -12, 1),
        ("open_math", "정답은5입니다", "5", 1),
        ("open_math", "คำตอบคือ5", "5", 1),
        ("open_math", "\u22125", "-5", 1),
        ("open_math", "\u22125", "5", 0),
        ("open_math", "-5", "\u22125", 1),
        ("boxed_math", "\\boxed{\u22125}", "-5", 1),
    ],
)
def test_mathematical_equality(name: str, completion: str, truth: Any, wanted: float) -> None:
    assert score(name, completion, truth) == wanted


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("boxed_math", {}),
        ("open_math", {}),
        ("exact_match", {"extract": "answer_tag"}),
        ("choice", {}),
        ("choice", {"choices": "NO"}),
        ("regex", {"pattern": "(x)|None", "group_equals_ground_truth": True}),
        ("numeric_tolerance", {}),
        ("cosine_length", {"max_length": 100}),
        ("cosine_length", {"max_length": 100, "correct_by": "boxed_math"}),
        ("cosine_length", {"max_length": 100, "correct_by": "exact_match"}),
        ("grid_navigation", {}),
        ("score_side", {}),
    ],
)
@pytest.mark.parametrize("completion", ["None", r"\boxed{None}", "", "5"])
def test_a_missing_reference_is_a_fault_of_the_data(
    name: str, parameters: dict[str, Any], completion: str
) -> None:
    with pytest.raises(GroundTruthError):
        score(name, completion, None, **parameters)


@pytest.mark.parametrize("name", ["boxed_math", "open_math"])
def test_an_unreadable_reference_is_a_fault_of_the_data_and_not_a_wrong_answer(name: str) -> None:
    """ms-swift scores 0 here and so punishes every answer to the row."""
    with pytest.raises(GroundTruthError):
        score(name, r"\boxed{1}", "")


def test_exact_match_normalises_white_space_and_accepts_any_of_a_list() -> None:
    assert score("exact_match", "<answer> New \n York </answer>", "New York") == 1
    assert score("exact_match", "<answer>new york</answer>", "New York") == 0
    assert score("exact_match", "new york", "New York", ignore_case=True) == 1
    assert score("exact_match", "<think>x</think>NYC", ["New York", "NYC"]) == 1
    assert score("exact_match", "NYC", "NYC", extract="answer_tag") == 0
    for nothing in ([], ["x", None]):
        with pytest.raises(GroundTruthError):
            score("exact_match", "x", nothing)


@pytest.mark.parametrize(
    ("completion", "truth", "wanted"),
    [
        ("<answer>B</answer>", "B", 1),
        ("(b)", "B", 1),
        ("B. Paris", "B. Paris", 1),
        ("I first thought A, but the answer is B", "B", 1),
        ("The answer is: C", "B", 0),
        (r"\boxed{B}", "b", 1),
        ("I had a bad day", "A", 0),
        ("", "A", 0),
        ("答案是B", "B", 1),
        ("答案是b。", "B", 1),
        ("选B", "B", 1),
        ("选项B正确", "B", 1),
        ("不选A，选B，不选C", "B", 1),
        ("答案不是A，而是B", "B", 1),
        ("答案是B，因为A不对", "B", 1),
        ("정답은 B입니다", "B", 1),
        ("คำตอบคือBครับ", "B", 1),
        ("Die Antwort ist A, wie Häuser", "A", 1),
        ("Ответ: В конце", "B", 0),
        ("A. cat\nB. dog\nThe answer is B", "B", 1),
        ("A. cat\nB. dog\nThe answer is B", "A", 0),
        ("- A. cat\n- (B) dog\n\n**B. dog**", "B", 1),
        ("A) cat B) dog. The answer is B.", "B", 1),
        ("B. Option A is wrong", "B", 1),
        ("B, the answer is a city", "B", 1),
    ],
)
def test_choice(completion: str, truth: str, wanted: float) -> None:
    assert score("choice", completion, truth) == wanted


def test_regex_searches_or_matches_fully_and_can_compare_a_group() -> None:
    assert score("regex", "id=12", pattern=r"id=\d+") == 1
    assert score("regex", "id=12 x", pattern=r"id=\d+", match="fullmatch") == 0
    compare = {"pattern": r"id=(\d+)", "group_equals_ground_truth": True}
    assert score("regex", "id=1 id=12", 12, **compare) == 1
    assert score("regex", "id=12 id=1", 12, **compare) == 0
    either = {"pattern": "(x)|None", "group_equals_ground_truth": True}
    assert score("regex", "None", "None", **either) == 0
    with pytest.raises(RewardConfigError, match="no regular expression"):
        score("regex", "x", pattern="(")


def test_json_schema() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert score("json_schema", '<answer>{"a": 1}</answer>', schema=schema) == 1
    assert score("json_schema", '```json\n{"a": 1}\n```', schema=schema) == 1
    assert score("json_schema", '{"a": "1"}', schema=schema) == 0
    assert score("json_schema", "{", schema=schema) == 0
    assert score("json_schema", "[" * 100_000, schema=schema) == 0


def test_numeric_tolerance() -> None:
    assert score("numeric_tolerance", "about 3.14", 3.14159, absolute=0.01) == 1
    assert score("numeric_tolerance", "about 3.2", 3.14159, absolute=0.01) == 0
    assert score("numeric_tolerance", "it is 1,234.5 in all", "1234.5") == 1
    assert score("numeric_tolerance", "so 25%", 0.25) == 1
    assert score("numeric_tolerance", "\u22125", -5) == 1
    assert score("numeric_tolerance", "\u22125", 5) == 0
    assert score("numeric_tolerance", "-5", "\u22125") == 1
    assert score("numeric_tolerance", "1e400", 1.0) == 0
    assert score("numeric_tolerance", "none", 1.0) == 0
    with pytest.raises(GroundTruthError):
        score("numeric_tolerance", "1", "one")


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1), (200, -1)]
)
def test_soft_overlong_is_floored_at_minus_one(tokens: int, wanted: float) -> None:
    """ms-swift goes on to −2 at L + cache and −6 at 2L."""
    assert score("soft_overlong", "", tokens=tokens, max_length=100, cache=20) == pytest.approx(
        wanted
    )


COSINE = [(0, 1), (25, 0.9268), (50, 0.75), (75, 0.5732), (100, 0.5), (150, 0.5), (200, 0.5)]
COSINE_WRONG = [(0, -0.5), (50, -0.25), (100, 0), (150, 0), (200, 0)]


@pytest.mark.parametrize(
    ("answer", "tokens", "wanted"),
    [("7", *pair) for pair in COSINE] + [("8", *pair) for pair in COSINE_WRONG],
)
def test_cosine_length_is_clamped_at_its_end(answer: str, tokens: int, wanted: float) -> None:
    """Unclamped, ms-swift's comes back to 1.0 at twice the length."""
    got = score(
        "cosine_length", answer, "7", tokens=tokens, max_length=100, correct_by="exact_match"
    )
    assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("", 0),
        ("a b", 0),
        ("a b c", 0),
        ("a b c a b c", -0.25),
        ("a a a a a a", -0.75),
        ("The the THE the", -0.5),
    ],
)
def test_repetition_over_words(completion: str, wanted: float) -> None:
    assert score("repetition", completion) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "text", ["我们我们我们我们我们我们", "ไปไปไปไปไปไปไปไป", "はいはいはいはいはい", "ha" * 40]
)
def test_repetition_sees_scripts_without_spaces(text: str) -> None:
    """ms-swift splits on white space: Chinese is one word and never repetitive."""
    assert score("repetition", text) < -0.6
    assert score("repetition", "今天天气很好，适合出去走走。") == pytest.approx(0, abs=0.1)


def test_length_rewards_a_range_and_falls_off_over_the_slack() -> None:
    wanted = {9: 0.8, 10: 1, 20: 1, 24: 0.2, 25: 0, 99: 0}
    for tokens, value in wanted.items():
        got = score("length", "", tokens=tokens, minimum=10, maximum=20, slack=4)
        assert got == pytest.approx(value)


GRID = {"rows": 3, "cols": 3, "start": [0, 0], "goal": [2, 1], "blocked": [[0, 1]]}


def answer(*actions: str) -> str:
    return f"<think>t</think><answer>[{{'action': {list(actions)}}}]</answer>"


@pytest.mark.parametrize(
    ("completion", "strict", "smoothed"),
    [
        (answer("DOWN", "DOWN", "RIGHT"), 1, 1),
        (answer("down", "right", "down"), 1, 1),
        (answer("DOWN"), 0, 1 - 2 / 6),
        (answer("DOWN", "DOWN"), 0, 1 - 1 / 6),
        (answer("UP", "DOWN", "DOWN", "DOWN", "RIGHT"), 0, 0),  # off the grid on the way
        (answer("RIGHT", "DOWN", "DOWN"), 0, 0),  # onto a blocked cell
        (answer(), 0, 0),
        (answer("JUMP"), 0, 0),
        ('<answer>{"action": ["DOWN","DOWN","RIGHT"]}</answer>', 1, 1),
        ("<answer> [ { 'action' :\n[ 'DOWN' , 'DOWN' , 'RIGHT' , ] } ] </answer>", 1, 1),
        ("<answer>{'action': ['DOWN', 'DOWN', 'RIGHT',,]}</answer>", 0, 0),
        ("<answer>[{‘action’: [‘DOWN’, ‘DOWN’, ‘RIGHT’]}]</answer>", 1, 1),
        ("<answer>[{'action': ['DOWN' 'DOWN' 'RIGHT']}]</answer>", 0, 0),
        ("[{'action': ['DOWN', 'DOWN', 'RIGHT']}]", 0, 0),
        ("<answer>__import__('os').system('true')</answer>", 0, 0),
        ("<answer>" + "[" * 100_000 + "</answer>", 0, 0),
        ("<answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_grid_navigation(completion: str, strict: float, smoothed: float) -> None:
    """The first seed's TV navigation; malformed answers there raised and killed the job."""
    for truth in (GRID, json.dumps(GRID), repr(GRID)):
        assert score("grid_navigation", completion, truth, mode="strict") == strict
        assert score("grid_navigation", completion, truth, mode="smoothed") == pytest.approx(
            smoothed
        )


def test_grid_navigation_accepts_the_seed_s_reference_of_a_correct_sequence() -> None:
    truth = "{'action': ['UP', 'UP', 'UP']}"
    assert score("grid_navigation", answer("UP", "UP", "UP"), truth) == 1
    assert score("grid_navigation", answer("UP", "UP"), truth) == 0
    assert score("grid_navigation", answer("UP"), truth, mode="smoothed") == pytest.approx(
        1 - 2 / 6
    )
    assert score("grid_navigation", answer("DOWN"), truth, mode="smoothed", max_distance=3) == 0


@pytest.mark.parametrize(
    "truth", [None, "north", "[1, 2]", {"rows": 3}, {**GRID, "goal": [3, 0]}, {**GRID, "start": 1}]
)
def test_grid_navigation_names_a_bad_reference(truth: Any) -> None:
    with pytest.raises(GroundTruthError):
        score("grid_navigation", answer("UP"), truth)


@pytest.mark.parametrize(
    ("completion", "compare", "wanted"),
    [
        ("<think>t</think>, my ratings is [1, 5, 5]", "each", 1),
        ("<think>t</think>, my ratings is [3, 5, 5]", "each", 0),  # the seed's bad case: 2 became 3
        ("my ratings is [2, 2, 5]", "each", 0),
        ("my ratings is [2, 2, 5]", "any_below", 1),
        ("my ratings is [2, 2, 5]", "fraction", 2 / 3),
        ("[5, 5, 5] no, [0, 3, 4]", "each", 1),
        ("[2, 5]", "each", 0),
        ("<think>[2, 5, 5]</think> none", "each", 0),
        ("[2, five, 5]", "each", 0),
        ("[ 1 ,\n5 , 5 , ]", "each", 1),
        ("[1, 5, 5,,]", "each", 0),
        ("[\u22121, 5, 5]", "each", 1),
        ("", "each", 0),
    ],
)
def test_score_side(completion: str, compare: str, wanted: float) -> None:
    assert score("score_side", completion, "[2, 5, 5]", compare=compare) == pytest.approx(wanted)


NEEDED: dict[str, dict[str, Any]] = {
    "think_answer_format": {"answer": "actions"},
    "length": {"maximum": 100},
    "soft_overlong": {"max_length": 100, "cache": 5},
}
OPENINGS = [
    "",
    "[1",
    "[1,",
    "<think>a</think><answer>",
    "<answer>",
    "<answer>[",
    "<answer>[{'action': [",
    "<answer>[{'action': ['UP'",
    "<answer>[{'action': ['UP',",
    "<answer>[{'action': ['UP']",
    "<answer>[{'action': ['UP']}",
    "answer ",
    "B",
]
PIECES = [" ", "\n", "1", ",", ", 1", "[", "[1 ", "{", "'UP', ", "-", "(", ".", "A ", "A. \n", "答"]
PIECES += ["answer ", "<answer>", "</think>", "\\boxed{", "选"]


@pytest.mark.parametrize("name", [name for name, one in built_ins().items() if not one.isolated])
def test_what_runs_in_the_trainer_takes_time_linear_in_the_completion(name: str) -> None:
    """A collapsed policy writes one thing until its limit. Of 10 times the text, 100 times the
    work is refused; what is counted is the thread's own processor time, the least of three."""
    truth = {"grid_navigation": {"action": ["UP"]}, "score_side": "[1]", "choice": "B"}.get(name, 5)
    function = built_in(name).bind(NEEDED.get(name, {}))

    def work(opening: str, piece: str, times: int) -> float:
        text = f"{opening}{piece * times}x</answer>"
        sample = Sample(text, ground_truth=truth, response_length=times)
        taken = []
        for _ in range(3):
            start = time.thread_time()
            function(sample)
            taken.append(time.thread_time() - start)
        return min(taken)

    slow = [
        (opening, piece)
        for opening in OPENINGS
        for piece in PIECES
        if work(opening, piece, 3000) > 40 * work(opening, piece, 300)
    ]
    assert slow == []


def test_the_catalogue_describes_every_built_in_the_run_file_knows() -> None:
    entries = json.loads(json.dumps(catalogue()))
    assert (
        tuple(entry["name"] for entry in entries)
        == tuple(BUILT_IN_PARAMETERS)
        == tuple(built_ins())
    )
    assert all(entry["description"] for entry in entries)
    by_name = {entry["name"]: entry["parameters"] for entry in entries}
    assert by_name["soft_overlong"]["required"] == ["max_length", "cache"]
    assert "schema" in by_name["json_schema"]["properties"]


def test_a_misspelt_name_or_parameter_is_an_error_that_names_the_right_one() -> None:
    """The first seed's platform silently chose another reward."""
    with pytest.raises(RewardConfigError, match="did you mean 'soft_overlong'"):
        built_in("soft_overlog")
    with pytest.raises(RewardConfigError, match="Did you mean `max_length`"):
        built_in("soft_overlong").bind({"maxlength": 10, "cache": 5})
    with pytest.raises(RewardConfigError, match="cache"):
        built_in("soft_overlong").bind({"max_length": 10})
    with pytest.raises(RewardConfigError, match="valid integer"):
        built_in("soft_overlong").bind({"max_length": "ten", "cache": 5})
    with pytest.raises(RewardConfigError, match="must not exceed"):
        built_in("soft_overlong").bind({"max_length": 10, "cache": 50})
