"""What can be said of a reward trial without running any of it."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.layout import RunLayout
from contracts.problems import Problem
from contracts.reward_files import check_reward_file
from contracts.reward_trial import RewardTestRequest
from contracts.spec_checks import reward_problems

__all__ = ["trial_problems"]


def trial_problems(request: RewardTestRequest) -> Iterator[Problem]:
    """Every problem of the sources and of the files they name."""
    columns = sorted({name for sample in request.samples for name in sample.columns})
    for path in request.files:
        try:
            RunLayout("x").code(path)
        except ValueError as error:
            yield Problem(f"files.{path}", path, str(error), "Give a path below the run file.")
    yield from reward_problems(request.rewards, "rewards")
    for index, spec in enumerate(request.rewards):
        if spec.file is None:
            continue
        text = request.files.get(spec.file)
        if text is None:
            fix = "Send its text in `files`."
            yield Problem(f"rewards[{index}].file", spec.file, "is not in the request", fix)
            continue
        yield from check_reward_file(
            text,
            str(spec.function),
            path=spec.file,
            columns=columns if request.samples else None,
            parameters=tuple(spec.parameters),
        )
