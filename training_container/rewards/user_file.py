"""A user's Python reward file, run inside a worker process.

The function's signature says which interface it follows; nothing has to be declared:

| first parameters | interface | called with |
|---|---|---|
| `(completions, **columns)` | ms-swift, TRL | the batch; every named or `**` column as a list |
| `(reward_inputs)`, or one parameter and `REWARD_TYPE = "batch"` | EasyR1 batch | list of dicts |
| `(reward_input)`, or one parameter and `REWARD_TYPE = "sequential"` | EasyR1 | one dict |
| `(predict, ground_truth)` | plain | two values, one sample |
| `(inputs)` | ms-swift plugin | list of rows: `messages` and every column |
| object with `reset` and `step` | environment | `reset(row)`, then `step(completion)` |

A function, an object with `__call__`, or a class (made once, with the source's parameters) will
do, each of them `async` or not. A class that wants `(model, template)` gets the model loaded from
the folder that its parameter `model` names (`plugin.py`). Per-sample results are a number, None
(not applicable), or EasyR1's dict whose `overall` is the reward and whose other entries become
metrics.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.reward_files import (
    COMPLETIONS,
    EASYR1_BATCH,
    EASYR1_ONE,
    GROUND_TRUTH,
    INPUTS,
    PREDICT,
    PROVIDED_COLUMNS,
)
from training_container.rewards.interface import RewardConfigError, Sample

__all__ = ["UserFunction", "load_module", "load_user_function"]

_ACCEPTED = """accepted signatures:
  (completions, **columns) -> list[float | None]
  (reward_inputs: list[dict]) -> list[dict]   EasyR1, REWARD_TYPE = "batch"
  (reward_input: dict) -> dict                EasyR1, REWARD_TYPE = "sequential"
  (predict, ground_truth) -> float
  (inputs: list[dict]) -> list[float | None]
  an object with reset(row) and step(completion) -> float, or (observation, reward, done, ...)"""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function behind one calling convention."""

    style: str
    per_sample: bool
    """The function takes one sample; otherwise the whole batch."""
    columns: tuple[str, ...] | None
    """Dataset columns it reads; None means all of them."""
    call: Callable[[Sequence[Sample]], Any]
    """With one sample where `per_sample`; returns what the user's function returned."""
    reads_prompt: bool = True


def load_module(path: Path, sha256: str) -> types.ModuleType:
    """Import a file under a name made of its content, so that two `rewards.py` never collide.

    Raises RewardConfigError when the file is not the one that was frozen with the run.
    """
    source = path.read_bytes()
    found = hashlib.sha256(source).hexdigest()
    if found != sha256:
        raise RewardConfigError(f"{path.name} has sha256 {found}, the run froze {sha256}")
    name = f"user_reward_{sha256[:16]}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise RewardConfigError(f"{path.name} is not a Python file")
    sys.path.insert(0, str(path.parent))  # sibling modules of the file
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickling look modules up by name
    specification.loader.exec_module(module)
    return module


def load_user_function(
    path: Path,
    sha256: str,
    function: str,
    parameters: Mapping[str, Any],
    available: Sequence[str],
) -> UserFunction:
    """Load ``function`` from a file and work out how it wants to be called.

    `available` are the dataset's columns. Raises RewardConfigError with the accepted signatures;
    whatever the file itself raises while being imported passes through.
    """
    module = load_module(path, sha256)
    if not hasattr(module, function):
        raise RewardConfigError(f"{path.name} has no function {function!r}")
    target = getattr(module, function)
    if inspect.isclass(target):
        target, parameters = _made(target, parameters), {}
    if callable(getattr(target, "reset", None)) and callable(getattr(target, "step", None)):
        return UserFunction("environment", True, None, lambda one: _play(target, one[0]))
    if not callable(target):
        raise RewardConfigError(f"{function} in {path.name} is a {type(target).__name__}")
    return _recognise(target, function, parameters, available, getattr(module, "REWARD_TYPE", None))


def _made(cls: type, parameters: Mapping[str, Any]) -> Any:
    """An instance. Raises RewardConfigError when the parameters do not fit its constructor."""
    wanted = inspect.signature(cls).parameters
    given = dict(parameters)
    if {"model", "template"} <= set(wanted) and isinstance(given.get("model"), str):
        from training_container.rewards.plugin import load_model

        given["model"], given["template"] = load_model(Path(given["model"]))
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        raise RewardConfigError(f"{cls.__name__} cannot be made: {error}") from error
    return cls(**given)


def _play(environment: Any, sample: Sample) -> Any:
    """One episode of one turn: the environment is set to the row and acts on the completion."""
    row = {**sample.columns, "messages": list(sample.prompt), "ground_truth": sample.ground_truth}
    _awaited(environment.reset(row))
    result = _awaited(environment.step(sample.completion))
    return result[1] if isinstance(result, tuple) else result


def _recognise(
    target: Callable[..., Any],
    name: str,
    parameters: Mapping[str, Any],
    available: Sequence[str],
    reward_type: object,
) -> UserFunction:
    signature = inspect.signature(target)
    free = [p for p in signature.parameters.values() if p.name not in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in free)
    unknown = [] if takes_any else [p for p in parameters if p not in signature.parameters]
    if unknown:
        raise RewardConfigError(f"{name} has no parameter {', '.join(map(repr, unknown))}")
    named = [p for p in free if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p.name for p in named if p.default is p.empty]
    first = named[0].name if named else ""
    call = _runner(target, parameters)

    if first == COMPLETIONS:
        wanted = _wanted_columns(name, named[1:], required, available)
        return _columns_style(call, wanted, takes_any, available)
    if first == INPUTS and required in ([INPUTS], []):
        return UserFunction("plugin", False, None, lambda batch: call(_plugin_rows(batch)))
    if len(required) == 1 and (reward_type is not None or first in (EASYR1_BATCH, EASYR1_ONE)):
        return _easyr1_style(call, name, first, reward_type)
    if len(required) == 2 and required[0] in PREDICT and required[1] in GROUND_TRUTH:
        return UserFunction(
            "plain",
            True,
            (),
            lambda one: call(one[0].completion, one[0].ground_truth),
            reads_prompt=False,
        )
    raise RewardConfigError(f"{name}{signature} is no reward signature; {_ACCEPTED}")


def _runner(target: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _awaited(target(*args, **kwargs, **parameters))

    return run


def _awaited(result: Any) -> Any:
    # An async callable object is no coroutine function; only its result tells.
    return asyncio.run(_settle(result)) if inspect.isawaitable(result) else result


async def _settle(result: Awaitable[Any]) -> Any:
    return await result


# --- (completions, **columns) --------------------------------------------------------------------


def _wanted_columns(
    name: str,
    named: Sequence[inspect.Parameter],
    required: Sequence[str],
    available: Sequence[str],
) -> list[str]:
    known = {*available, *PROVIDED_COLUMNS}
    missing = [p.name for p in named if p.name in required and p.name not in known]
    if missing:
        raise RewardConfigError(
            f"{name} asks for {', '.join(map(repr, missing))}, which the data does not have; "
            f"columns: {', '.join(sorted(known))}"
        )
    return [p.name for p in named if p.name in known]


def _columns_style(
    call: Callable[..., Any], wanted: Sequence[str], takes_any: bool, available: Sequence[str]
) -> UserFunction:
    names = [*dict.fromkeys([*wanted, *available, *PROVIDED_COLUMNS])] if takes_any else [*wanted]

    def run(batch: Sequence[Sample]) -> Any:
        columns = {name: [_column(sample, name) for sample in batch] for name in names}
        return call(completions=[sample.completion for sample in batch], **columns)

    read = None if takes_any else tuple(name for name in names if name in available)
    prompt = not {"prompts", "messages"}.isdisjoint(names)
    return UserFunction("columns", False, read, run, reads_prompt=prompt)


_PROVIDERS: Mapping[str, Callable[[Sample], Any]] = {
    "prompts": lambda sample: list(sample.prompt),
    "messages": lambda sample: [
        *sample.prompt,
        {"role": "assistant", "content": sample.completion},
    ],
    "ground_truth": lambda sample: sample.ground_truth,
    "response_length": lambda sample: sample.response_length,
    "truncated": lambda sample: sample.truncated,
    "is_truncated": lambda sample: sample.truncated,
}
"""`PROVIDED_COLUMNS`, by name."""


def _column(sample: Sample, name: str) -> Any:
    """A dataset column wins over a provided one; a column that only other rows have is None."""
    if name in sample.columns:
        return sample.columns[name]
    return _PROVIDERS[name](sample) if name in _PROVIDERS else None


def _plugin_rows(batch: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            **sample.columns,
            "messages": _column(sample, "messages"),
            "ground_truth": sample.ground_truth,
        }
        for sample in batch
    ]


# --- EasyR1 --------------------------------------------------------------------------------------


def _easyr1_style(
    call: Callable[..., Any], name: str, first: str, reward_type: object
) -> UserFunction:
    kind = reward_type or ("sequential" if first == EASYR1_ONE else "batch")
    if kind == "batch":
        batched = lambda batch: call(_easyr1_inputs(batch))  # noqa: E731
        return UserFunction("easyr1_batch", False, (), batched, reads_prompt=False)
    if kind == "sequential":
        single = lambda one: call(_easyr1_inputs(one)[0])  # noqa: E731
        return UserFunction("easyr1", True, (), single, reads_prompt=False)
    raise RewardConfigError(f"{name}: REWARD_TYPE is {kind!r}, not 'batch' or 'sequential'")


def _easyr1_inputs(batch: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "response": sample.completion,
            "response_length": sample.response_length,
            "ground_truth": sample.ground_truth,
        }
        for sample in batch
    ]
