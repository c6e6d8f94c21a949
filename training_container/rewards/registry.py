"""Built-in reward functions by name.

A built-in is a function of one sample and of its parameters, which `contracts.built_in_rewards`
describes and checks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.built_in_rewards import BUILT_IN_PARAMETERS, checked_parameters
from contracts.problems import InvalidInputError, nearest
from training_container.rewards.builtin import formats, grid, lengths, lists, maths, texts
from training_container.rewards.interface import RewardConfigError, Sample

__all__ = ["BuiltIn", "built_in", "built_ins", "catalogue"]

_MATHS = ("math_verify",)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A reward function that comes with the hub."""

    name: str
    score: Callable[[Sample, Any], float | None]
    isolated: bool = False
    """Runs in a worker process: its time is not bounded by the length of the text."""
    libraries: tuple[str, ...] = ()
    """Imported before the first sample, whose deadline their seconds are not."""

    @property
    def description(self) -> str:
        return " ".join((self.score.__doc__ or "").split())

    def bind(self, parameters: Mapping[str, Any]) -> Callable[[Sample], float | None]:
        """The function with its parameters checked. Raises RewardConfigError naming each fault."""
        try:
            checked = checked_parameters(self.name, parameters)
        except InvalidInputError as error:
            raise RewardConfigError(str(error)) from error
        return functools.partial(_call, self.score, checked)


def _call(score: Callable[[Sample, Any], float | None], checked: Any, sample: Sample) -> Any:
    return score(sample, checked)


def built_in(name: str) -> BuiltIn:
    """Raises RewardConfigError with the nearest name, or all names."""
    known = built_ins()
    if name not in known:
        guess = nearest(name, list(known))
        hint = f"did you mean {guess!r}?" if guess else f"built in: {', '.join(known)}"
        raise RewardConfigError(f"no built-in reward {name!r}, {hint}")
    return known[name]


@functools.cache
def built_ins() -> Mapping[str, BuiltIn]:
    """All built-ins, in the order of the catalogue."""
    entries = [
        BuiltIn("think_answer_format", formats.think_answer_format),
        BuiltIn("boxed_math", maths.boxed_math, True, _MATHS),
        BuiltIn("open_math", maths.open_math, True, _MATHS),
        BuiltIn("exact_match", texts.exact_match),
        BuiltIn("choice", texts.choice),
        BuiltIn("regex", texts.regex, isolated=True),
        BuiltIn("json_schema", formats.json_schema, True, ("jsonschema",)),
        BuiltIn("numeric_tolerance", texts.numeric_tolerance),
        BuiltIn("length", lengths.length),
        BuiltIn("soft_overlong", lengths.soft_overlong),
        BuiltIn("cosine_length", lengths.cosine_length, True, _MATHS),
        BuiltIn("repetition", lengths.repetition),
        BuiltIn("grid_navigation", grid.grid_navigation),
        BuiltIn("score_side", lists.score_side),
    ]
    return {entry.name: entry for entry in entries}


def catalogue() -> list[dict[str, Any]]:
    """Name, description and parameter schema of every built-in, as JSON's types."""
    return [
        {
            "name": entry.name,
            "description": entry.description,
            "parameters": BUILT_IN_PARAMETERS[entry.name].model_json_schema(),
        }
        for entry in built_ins().values()
    ]


if __name__ == "__main__":
    print(json.dumps(catalogue(), indent=2, ensure_ascii=False))
