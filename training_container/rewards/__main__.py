"""Try reward sources on sample answers, before anything is trained.

    grpohub rewards test run.yaml --data rows.jsonl        # what people type
    python -m training_container.rewards [--files FOLDER] [--read FOLDER] < request.json

Reads a `RewardTestRequest` (contracts/reward_trial.py) and runs every source as the training job
would: the same worker processes, judges and models. Prints a `RewardTestView`, or a table with
`--table`. Exit status 1 when the request is not one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from contracts.reward_trial import RewardTestRequest, trial_table
from training_container.rewards.sources import SourceContext
from training_container.rewards.trial import columns_of, try_out


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    given = _parser().parse_args(arguments)
    try:
        request = RewardTestRequest.model_validate_json(sys.stdin.read())
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 1
    context = SourceContext(
        files=given.files,
        columns=columns_of(request),
        workers=1,
        read_paths=tuple(str(folder.resolve()) for folder in given.read),
    )
    view = try_out(request, context)
    completions = [sample.completion for sample in request.samples]
    print(trial_table(completions, view) if given.table else view.model_dump_json())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training_container.rewards",
        description="Try reward sources on the samples of a request (standard input, JSON).",
    )
    parser.add_argument("--files", type=Path, default=Path(), help="where `file` paths start")
    parser.add_argument(
        "--read", type=Path, action="append", default=[], help="a folder that files may read"
    )
    parser.add_argument("--table", action="store_true", help="print a table, not JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
