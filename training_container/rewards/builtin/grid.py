"""Moving over a grid of buttons, as a TV remote does.

Ground truth, a dict or its JSON:

    {"rows": 4, "cols": 3, "start": [0, 0], "goal": [2, 1], "blocked": [[1, 1]]}

Positions are [row, column] from the top left, from 0; UP lowers the row. Or, for data that holds
only a correct sequence, `{"action": ["DOWN", "RIGHT"]}`: an unbounded grid whose goal is where that
sequence ends.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.built_in_rewards import GridNavigation
from training_container.rewards.builtin.extract import answer_of
from training_container.rewards.interface import GroundTruthError, Sample

__all__ = ["actions_of", "grid_navigation"]

_STEPS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
_QUOTE = "['\"‘’“”]"
# Text of a model is matched, never evaluated. White space is taken possessively: given back bit by
# bit between two optional parts, a long run of it would cost its length squared.
_ITEM = rf"{_QUOTE}(?:UP|DOWN|LEFT|RIGHT){_QUOTE}"
_ANSWER = re.compile(
    rf"\s*+\[?\s*+\{{\s*+{_QUOTE}action{_QUOTE}\s*+:\s*+"
    rf"\[\s*+((?:{_ITEM}\s*+(?:,\s*+{_ITEM}\s*+)*+,?\s*+)?+)\]\s*+\}}\s*+\]?\s*+",
    re.IGNORECASE,
)
_WORD = re.compile(r"UP|DOWN|LEFT|RIGHT", re.IGNORECASE)


def grid_navigation(sample: Sample, parameters: GridNavigation) -> float:
    """Follow the actions in the answer, `[{'action': ['UP', …]}]`. 1 at the goal; `smoothed` also
    gives 1 − d/(max_distance + 1) for a Manhattan distance d up to max_distance. A malformed
    answer, no action at all, or a step off the grid or onto a blocked cell is 0."""
    task = _Task.of(sample.ground_truth)
    answer = answer_of(sample.completion, "answer_tag")
    actions = actions_of(answer) if answer is not None else None
    if actions is None:
        return 0.0
    end = task.follow(actions)
    if end is None:
        return 0.0
    distance = abs(end[0] - task.goal[0]) + abs(end[1] - task.goal[1])
    if distance == 0:
        return 1.0
    if parameters.mode == "strict" or not actions or distance > parameters.max_distance:
        return 0.0
    return 1.0 - distance / (parameters.max_distance + 1)


def actions_of(answer: str) -> list[str] | None:
    """The actions of an answer in upper case; None when it is not of the agreed form."""
    match = _ANSWER.fullmatch(answer)
    if match is None:
        return None
    return [word.upper() for word in _WORD.findall(match[1])]


class _Task:
    """A grid, where the cursor is, and where it should go."""

    def __init__(
        self,
        size: tuple[int, int] | None,
        start: tuple[int, int],
        goal: tuple[int, int],
        blocked: frozenset[tuple[int, int]],
    ) -> None:
        self.size, self.start, self.goal, self.blocked = size, start, goal, blocked

    @classmethod
    def of(cls, ground_truth: Any) -> _Task:
        """Raises GroundTruthError."""
        value = _as_mapping(ground_truth)
        if "action" in value:
            free = cls(None, (0, 0), (0, 0), frozenset())
            end = free.follow([str(action).upper() for action in value["action"]])
            if end is None:
                raise GroundTruthError("an unknown action in the reference answer")
            return cls(None, (0, 0), end, frozenset())
        try:
            size = (int(value["rows"]), int(value["cols"]))
            start, goal = _cell(value["start"]), _cell(value["goal"])
            blocked = frozenset(_cell(cell) for cell in value.get("blocked") or ())
        except (KeyError, TypeError, ValueError) as error:
            wanted = "needs rows, cols, start and goal, or action"
            raise GroundTruthError(f"grid ground truth {wanted}: {error!r}") from error
        task = cls(size, start, goal, blocked)
        for name, cell in (("start", start), ("goal", goal)):
            if not task.free(cell):
                raise GroundTruthError(f"{name} {list(cell)} is off the grid or blocked")
        return task

    def free(self, cell: tuple[int, int]) -> bool:
        if self.size is None:
            return True
        inside = 0 <= cell[0] < self.size[0] and 0 <= cell[1] < self.size[1]
        return inside and cell not in self.blocked

    def follow(self, actions: Sequence[str]) -> tuple[int, int] | None:
        """Where the actions lead; None when one of them is impossible."""
        row, column = self.start
        for action in actions:
            if action not in _STEPS:
                return None
            row, column = row + _STEPS[action][0], column + _STEPS[action][1]
            if not self.free((row, column)):
                return None
        return row, column


def _cell(value: Any) -> tuple[int, int]:
    row, column = value
    return int(row), int(column)


def _as_mapping(ground_truth: Any) -> Mapping[str, Any]:
    value = ground_truth
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value)  # datasets written with Python's repr
            except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
                raise GroundTruthError("grid ground truth is neither JSON nor a dict") from error
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        raise GroundTruthError(f"grid ground truth is a {type(value).__name__}, not a dict")
    return value
