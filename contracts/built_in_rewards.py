"""The built-in rewards' parameters: checked when a run is submitted, shown by the references.

What the functions do stands in `training_container.rewards.builtin`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from contracts.base import Pattern, Strict
from contracts.problems import InvalidInputError, Problem, nearest
from contracts.spec_report import dotted, field_report

__all__ = [
    "BUILT_IN_PARAMETERS",
    "AnswerPlace",
    "BoxedMath",
    "Choice",
    "CosineLength",
    "ExactMatch",
    "GridNavigation",
    "JsonSchema",
    "Length",
    "MathSettings",
    "NumericTolerance",
    "OpenMath",
    "Regex",
    "Repetition",
    "ScoreSide",
    "SoftOverlong",
    "ThinkAnswerFormat",
    "checked_parameters",
]

AnswerPlace = Literal["auto", "answer_tag", "boxed", "whole"]
"""`auto`: the last answer tag, else the last box, else all that follows the thinking."""


class ThinkAnswerFormat(Strict):
    """Parameters of `think_answer_format`."""

    prefill: str = ""
    """What the chat template writes before the policy does, such as `<think>`."""
    answer: Literal["any", "json", "actions"] = "any"
    """What the answer must hold: anything, JSON, or `[{'action': [...]}]`."""
    allow_empty_thinking: bool = False
    """Accept an empty think block."""


class MathSettings(Strict):
    """Parameters of every comparison by math-verify."""

    precision: Annotated[int, Field(ge=1, le=15)] = 6
    """Decimal places that must agree."""
    seconds: Annotated[int, Field(ge=1, le=60)] = 5
    """Time for one parse or comparison; above it the sample is unscored, not wrong."""


class BoxedMath(MathSettings):
    """Parameters of `boxed_math`."""


class OpenMath(MathSettings):
    """Parameters of `open_math`."""


class ExactMatch(Strict):
    """Parameters of `exact_match`."""

    extract: AnswerPlace = "auto"
    """Where the answer stands."""
    ignore_case: bool = False
    """Compare without regard to case."""


class Choice(Strict):
    """Parameters of `choice`."""

    choices: Annotated[str, Field(min_length=2)] = "ABCDEFGH"
    """The letters of the options."""
    extract: AnswerPlace = "auto"
    """Where the answer stands."""


class Regex(Strict):
    """Parameters of `regex`."""

    pattern: Pattern
    """A Python regular expression; `.` matches line ends too."""
    match: Literal["search", "fullmatch"] = "search"
    """Anywhere in the text, or all of it."""
    extract: AnswerPlace = "whole"
    """Which part of the completion is looked at."""
    group_equals_ground_truth: bool = False
    """The first group of the last match must equal the ground truth."""

    @model_validator(mode="after")
    def _has_the_group(self) -> Regex:
        if self.group_equals_ground_truth and not re.compile(self.pattern).groups:
            raise ValueError("`group_equals_ground_truth` needs a group in `pattern`")
        return self


class JsonSchema(Strict):
    """Parameters of `json_schema`."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema (draft 2020-12) the answer must satisfy."""
    extract: AnswerPlace = "auto"
    """Where the answer stands."""


class NumericTolerance(Strict):
    """Parameters of `numeric_tolerance`."""

    absolute: Annotated[float, Field(ge=0)] = 0.0
    """Largest difference that is right."""
    relative: Annotated[float, Field(ge=0)] = 1e-6
    """Or largest difference as a share of the ground truth."""
    extract: AnswerPlace = "auto"
    """Where the answer stands."""


class Length(Strict):
    """Parameters of `length`; all in tokens."""

    minimum: Annotated[int, Field(ge=0)] = 0
    """Shortest completion with full reward."""
    maximum: Annotated[int, Field(ge=1)]
    """Longest completion with full reward."""
    slack: Annotated[int, Field(ge=0)] = 0
    """Tokens outside the range over which the reward falls to 0."""

    @model_validator(mode="after")
    def _ordered(self) -> Length:
        if self.minimum > self.maximum:
            raise ValueError("`minimum` must not exceed `maximum`")
        return self


class SoftOverlong(Strict):
    """Parameters of `soft_overlong`; both in tokens."""

    max_length: Annotated[int, Field(ge=1)]
    """The length at which the penalty is full."""
    cache: Annotated[int, Field(ge=1)]
    """Tokens before that over which the penalty grows."""

    @model_validator(mode="after")
    def _fits(self) -> SoftOverlong:
        if self.cache > self.max_length:
            raise ValueError("`cache` must not exceed `max_length`")
        return self


class CosineLength(Strict):
    """Parameters of `cosine_length`."""

    max_length: Annotated[int, Field(ge=1)]
    """Tokens at which the schedule ends; longer completions get the value at the end."""
    correct_by: Literal["open_math", "boxed_math", "exact_match"] = "open_math"
    """The built-in that says whether the answer is right."""
    shortest_correct: float = 1.0
    """Right, at 0 tokens."""
    longest_correct: float = 0.5
    """Right, at max_length."""
    shortest_wrong: float = -0.5
    """Wrong, at 0 tokens."""
    longest_wrong: float = 0.0
    """Wrong, at max_length."""


class Repetition(Strict):
    """Parameters of `repetition`."""

    n: Annotated[int, Field(ge=1)] = 3
    """Units in one n-gram."""
    max_penalty: Annotated[float, Field(le=0)] = -1.0
    """Penalty if everything were repetition."""


class GridNavigation(Strict):
    """Parameters of `grid_navigation`."""

    mode: Literal["smoothed", "strict"] = "strict"
    """`strict`: 1 at the goal, else 0. `smoothed`: falls linearly with the distance left."""
    max_distance: Annotated[int, Field(ge=1)] = 5
    """For `smoothed`: above this distance the reward is 0."""


class ScoreSide(Strict):
    """Parameters of `score_side`."""

    threshold: float = 3.0
    """Scores at or above it are on the good side; below, a person must look."""
    compare: Literal["each", "any_below", "fraction"] = "each"
    """`each`: every position on the label's side. `any_below`: the same verdict on whether any
    score is below. `fraction`: the share of positions on the label's side."""


BUILT_IN_PARAMETERS: Mapping[str, type[Strict]] = {
    "think_answer_format": ThinkAnswerFormat,
    "boxed_math": BoxedMath,
    "open_math": OpenMath,
    "exact_match": ExactMatch,
    "choice": Choice,
    "regex": Regex,
    "json_schema": JsonSchema,
    "numeric_tolerance": NumericTolerance,
    "length": Length,
    "soft_overlong": SoftOverlong,
    "cosine_length": CosineLength,
    "repetition": Repetition,
    "grid_navigation": GridNavigation,
    "score_side": ScoreSide,
}
"""Every built-in by name; a test holds the trainer's registry against it."""


def checked_parameters(function: str, parameters: Mapping[str, Any]) -> Strict:
    """A run file's ``parameters`` of the built-in ``function``.

    Raises:
        InvalidInputError: with every fault, at `function` or below `parameters`.
    """
    subject = f"built-in reward {function!r}"
    model = BUILT_IN_PARAMETERS.get(function)
    if model is None:
        guess = nearest(function, tuple(BUILT_IN_PARAMETERS))
        listed = f"Built in: {', '.join(BUILT_IN_PARAMETERS)}."
        fix = f"Did you mean `{guess}`?" if guess else listed
        problem = Problem("function", function, "is not a built-in reward", fix)
        raise InvalidInputError([problem], subject=subject)
    try:
        # A run file is YAML: its lists arrive as lists where a frozen model holds tuples.
        return model.model_validate_json(json.dumps(dict(parameters), default=str))
    except ValidationError as error:
        report = field_report(error.errors(), dict(parameters), model.model_json_schema())
        raise InvalidInputError(map(_below_parameters, report.problems), subject=subject) from error


def _below_parameters(problem: Problem) -> Problem:
    """With the path as it stands in a reward source."""
    whole = problem.path == dotted(())
    return replace(problem, path="parameters" if whole else f"parameters.{problem.path}")
