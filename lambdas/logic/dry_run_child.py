"""The process that runs a user's reward function for `dry_run`. Standard library only; reads JSON,
prints one line.

It calls the function as the trainer does, by its signature:
`(completions, **columns)`, EasyR1's `(reward_inputs)` and `(reward_input)`, `(inputs)`, `(predict,
ground_truth)`.
"""

import asyncio
import inspect
import json
import math
import os
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

_PLAIN = ("predict", "prediction", "predict_str", "completion", "response")


def main() -> None:
    request = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the user's code prints is not our answer.
    try:
        answer: dict[str, Any] = {"scores": score(request)}
    except BaseException as error:  # noqa: BLE001 (whatever user code raises, SystemExit too, is the answer)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename == "<reward file>"]
        where = f" at line {lines[-1]}" if lines else ""
        answer = {"error": f"{type(error).__name__}{where}: {error}"}
    answer_to.write("\n" + json.dumps(answer) + "\n")
    answer_to.flush()


def score(request: Mapping[str, Any]) -> list[float | None]:
    module = types.ModuleType("user_reward")
    sys.modules["user_reward"] = module
    exec(compile(request["file"], "<reward file>", "exec"), module.__dict__)
    target = getattr(module, request["function"])
    parameters = request.get("parameters") or {}
    if inspect.isclass(target):
        target, parameters = target(**parameters), {}
    samples = request["samples"]
    scores = _call(target, parameters, samples, getattr(module, "REWARD_TYPE", None))
    if len(scores) != len(samples):
        raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
    return [_number(value) for value in scores]


def _call(
    target: Callable[..., Any],
    parameters: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    reward_type: object,
) -> list[Any]:
    free = [
        p
        for p in inspect.signature(target).parameters.values()
        if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())
    required = [p.name for p in free if p.default is p.empty]
    first = free[0].name if free else ""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs, **parameters)
        return asyncio.run(_settle(result)) if inspect.isawaitable(result) else result

    if first == "completions":
        columns = {name for sample in samples for name in sample if name != "completion"}
        wanted = columns if takes_any else columns & {p.name for p in free}
        given = {name: [sample.get(name) for sample in samples] for name in sorted(wanted)}
        return list(run(completions=[sample["completion"] for sample in samples], **given))
    if first == "inputs":
        return list(run([_row(sample) for sample in samples]))
    one = reward_type == "sequential" or (reward_type is None and first == "reward_input")
    if len(required) == 1 and (reward_type is not None or first.startswith("reward_input")):
        inputs = [_easyr1(sample) for sample in samples]
        return [run(item) for item in inputs] if one else list(run(inputs))
    if len(required) == 2 and required[0] in _PLAIN:
        return [run(sample["completion"], sample.get("ground_truth")) for sample in samples]
    raise TypeError(f"{inspect.signature(target)} is no reward signature")


async def _settle(result: Awaitable[Any]) -> Any:
    return await result


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": sample["completion"]}
    return {**sample, "messages": [*sample.get("messages", []), answer]}


def _easyr1(sample: Mapping[str, Any]) -> dict[str, Any]:
    text = sample["completion"]
    return {
        "response": text,
        "response_length": len(text.split()),
        "ground_truth": sample.get("ground_truth"),
    }


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value["overall"]
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


if __name__ == "__main__":
    main()
