"""What a worker process runs: a user's function or a built-in one, normalised to outcomes.

An outcome is what is sent back for one sample: `{"value": float | None, "extra": {...}}` or
`{"failed": [kind, detail]}`.
"""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from training_container.rewards.interface import FailureKind, GroundTruthError, Sample
from training_container.rewards.user_file import UserFunction, load_user_function

__all__ = ["Outcome", "Scorer", "load_scorer", "outcome_of"]

Outcome = Mapping[str, Any]
_OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward function."""

    function: UserFunction

    @property
    def style(self) -> str:
        return self.function.style

    @property
    def per_sample(self) -> bool:
        return self.function.per_sample

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self.function.columns

    @property
    def reads_prompt(self) -> bool:
        return self.function.reads_prompt

    def outcomes(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Outcome]]:
        """Per-sample functions: as they come, one sample's exception being that sample's only."""
        if self.per_sample:
            for index, sample in enumerate(samples):
                yield index, self._one(sample)
            return
        results = self.function.call(samples)
        if hasattr(results, "tolist"):  # a numpy array or a torch tensor
            results = results.tolist()
        problem = _shape_problem(results, len(samples))
        if problem is not None:
            yield from ((index, problem) for index in range(len(samples)))
            return
        yield from ((index, outcome_of(value)) for index, value in enumerate(results))

    def _one(self, sample: Sample) -> Outcome:
        try:
            return outcome_of(self.function.call([sample]))
        except GroundTruthError as error:
            return failed(FailureKind.GROUND_TRUTH, str(error))
        except TimeoutError as error:
            return failed(FailureKind.TIMEOUT, str(error))
        except Exception as error:  # noqa: BLE001 - anything a user's function may raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} (line {last.lineno} of {last.name})"
            return failed(FailureKind.EXCEPTION, detail)


def failed(kind: FailureKind, detail: str) -> Outcome:
    """The outcome of a sample that could not be scored."""
    return {"failed": [kind, detail]}


def _shape_problem(results: Any, expected: int) -> Outcome | None:
    if not isinstance(results, (list, tuple)):
        found = type(results).__name__
        return failed(FailureKind.WRONG_TYPE, f"returned a {found}, not a list of scores")
    if len(results) != expected:
        detail = f"returned {len(results)} scores for {expected} completions"
        return failed(FailureKind.WRONG_COUNT, detail)
    return None


def outcome_of(value: Any) -> Outcome:
    """One returned value as an outcome. NaN means what None means: not scored, no failure."""
    extra: dict[str, float] = {}
    if isinstance(value, Mapping):
        if _OVERALL not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            return failed(FailureKind.WRONG_TYPE, f"a dict without `{_OVERALL}` (has {keys})")
        extra = {
            str(key): number
            for key, item in value.items()
            if key != _OVERALL and (number := _number(item)) is not None and math.isfinite(number)
        }
        value = value[_OVERALL]
    if value is None:
        return {"value": None, "extra": extra}
    number = _number(value)
    if number is None:
        return failed(FailureKind.WRONG_TYPE, f"a score of type {type(value).__name__}")
    if math.isinf(number):
        return failed(FailureKind.NOT_FINITE, f"a score of {number}")
    return {"value": None if math.isnan(number) else number, "extra": extra}


def _number(value: Any) -> float | None:
    if isinstance(value, Real):  # bool and numpy's scalars among them
        return float(value)
    item = getattr(value, "item", None)  # a zero-dimensional tensor
    if callable(item) and getattr(value, "ndim", None) == 0:
        return float(item())
    return None


def load_scorer(message: Mapping[str, Any]) -> Scorer:
    """The scorer a `load` message asks for: a user's file, a judge's parser with a pattern of the
    user's own, or a built-in function."""
    if "file" in message:
        function = load_user_function(
            Path(message["file"]),
            message["sha256"],
            message["function"],
            message["parameters"],
            message["available"],
        )
        return Scorer(function)
    if "parser" in message:
        from contracts.rewards import JudgeParserSpec
        from training_container.rewards.judge_parser import own_number

        parser = JudgeParserSpec.model_validate(message["parser"])
        read = lambda one: own_number(one[0].completion, parser)  # noqa: E731
        return Scorer(UserFunction("parser", True, (), read, reads_prompt=False))
    from training_container.rewards.registry import built_in

    entry = built_in(message["function"])
    score = entry.bind(message["parameters"])
    for library in entry.libraries:
        importlib.import_module(library)
    return Scorer(UserFunction("built_in", True, (), lambda one: score(one[0]), reads_prompt=False))
