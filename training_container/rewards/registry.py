"""Built-in reward functions by name.

A built-in is a function of one sample and a model of its parameters; the model checks what the run
file says, and its JSON Schema is the catalogue that the API shows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from contracts.base import Strict
from contracts.problems import nearest
from training_container.rewards.builtin import formats, grid, lengths, lists, maths, texts
from training_container.rewards.interface import RewardConfigError, Sample

__all__ = ["BuiltIn", "built_in", "built_ins", "catalogue"]

_MATHS = ("math_verify",)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A reward function that comes with the hub."""

    name: str
    parameters: type[Strict]
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
            # A run file is YAML: its lists arrive as lists where a frozen model holds tuples.
            checked = self.parameters.model_validate_json(json.dumps(dict(parameters)))
        except ValidationError as error:
            raise RewardConfigError(f"built-in {self.name!r}: {self._explain(error)}") from error
        except TypeError as error:
            raise RewardConfigError(f"built-in {self.name!r}: {error}") from error
        return functools.partial(_call, self.score, checked)

    def _explain(self, error: ValidationError) -> str:
        known = [f.alias or name for name, f in self.parameters.model_fields.items()]
        parts = []
        for fault in error.errors():
            where = ".".join(map(str, fault["loc"])) or "parameters"
            if fault["type"] == "extra_forbidden":
                guess = nearest(where, known)
                listed = ", ".join(known) or "none"
                hint = f"did you mean {guess!r}?" if guess else f"known: {listed}"
                parts.append(f"no parameter {where!r}, {hint}")
            else:
                parts.append(f"{where}: {fault['msg']}")
        return "; ".join(parts)


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
        BuiltIn("think_answer_format", formats.ThinkAnswerFormat, formats.think_answer_format),
        BuiltIn("boxed_math", maths.BoxedMath, maths.boxed_math, True, _MATHS),
        BuiltIn("open_math", maths.OpenMath, maths.open_math, True, _MATHS),
        BuiltIn("exact_match", texts.ExactMatch, texts.exact_match),
        BuiltIn("choice", texts.Choice, texts.choice),
        BuiltIn("regex", texts.Regex, texts.regex, isolated=True),
        BuiltIn("json_schema", formats.JsonSchema, formats.json_schema, True, ("jsonschema",)),
        BuiltIn("numeric_tolerance", texts.NumericTolerance, texts.numeric_tolerance),
        BuiltIn("length", lengths.Length, lengths.length),
        BuiltIn("soft_overlong", lengths.SoftOverlong, lengths.soft_overlong),
        BuiltIn("cosine_length", lengths.CosineLength, lengths.cosine_length, True, _MATHS),
        BuiltIn("repetition", lengths.Repetition, lengths.repetition),
        BuiltIn("grid_navigation", grid.GridNavigation, grid.grid_navigation),
        BuiltIn("score_side", lists.ScoreSide, lists.score_side),
    ]
    return {entry.name: entry for entry in entries}


def catalogue() -> list[dict[str, Any]]:
    """Name, description and parameter schema of every built-in, as JSON's types."""
    return [
        {
            "name": entry.name,
            "description": entry.description,
            "parameters": entry.parameters.model_json_schema(),
        }
        for entry in built_ins().values()
    ]


if __name__ == "__main__":
    print(json.dumps(catalogue(), indent=2, ensure_ascii=False))
