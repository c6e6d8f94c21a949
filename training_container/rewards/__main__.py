"""Try a run file's reward sources on real rows, before anything is trained.

    python -m training_container.rewards run.yaml --rows data.jsonl [--stage NAME]
        [--answers answers.jsonl] [--limit 4] [--json]

Runs every source as the training job would: the same worker processes, judges and models. Each row
is scored with the answers in `answers.jsonl` (a JSON string or `{"completion": …}` a line, given
to the rows in turn), else with its own reference answer and with an empty one. Prints scores,
seconds, failures, and how code that is not ours was contained. Exit status 1 when a source cannot
work at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contracts.problems import InvalidInputError
from contracts.run_spec import load_run_yaml, parse_run_spec
from contracts.stages import GrpoStage
from training_container.engine.data import data_files, load_rows
from training_container.engine.errors import DataError
from training_container.rewards.interface import (
    PlaneResult,
    RewardConfigError,
    RewardError,
    Sample,
)
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext

_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    given = _parser().parse_args(arguments)
    try:
        stage = _stage(given.run_file, given.stage)
        samples = list(_samples(stage, given.rows, given.answers, given.limit))
        context = SourceContext(
            files=given.run_file.parent,
            columns=tuple(sorted({name for sample in samples for name in sample.columns})),
            workers=1,
            read_paths=(str(given.rows.resolve().parent),),
        )
        with RewardPlane(stage.rewards, context) as plane:
            plane.prepare()
            result = plane.dry_run(samples)
    except (DataError, InvalidInputError, RewardConfigError, RewardError) as error:
        print(error, file=sys.stderr)
        return 1
    shown = _as_json(samples, result) if given.json else _as_table(samples, result)
    print(shown)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training_container.rewards",
        description="Try a run file's reward sources on real rows.",
    )
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="jsonl, json or parquet")
    parser.add_argument("--stage", help="its name; the first GRPO stage when absent")
    parser.add_argument("--answers", type=Path, help="sample answers, a JSON value a line")
    parser.add_argument("--limit", type=int, default=4, help="rows to try (4)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _stage(run_file: Path, name: str | None) -> GrpoStage:
    try:
        text = run_file.read_text("utf-8")
    except OSError as error:
        raise RewardConfigError(f"{run_file}: {error.strerror}") from error
    spec = parse_run_spec(load_run_yaml(text))
    stages = [stage for stage in spec.stages if isinstance(stage, GrpoStage)]
    for stage in stages:
        if name is None or stage.name == name:
            return stage
    known = ", ".join(stage.name for stage in stages) or "none"
    raise RewardConfigError(f"no GRPO stage {name or ''!r}; GRPO stages: {known}")


def _samples(
    stage: GrpoStage, rows_file: Path, answers_file: Path | None, limit: int
) -> Iterator[Sample]:
    rows = load_rows(data_files(rows_file))[:limit]
    answers = None if answers_file is None else load_answers(answers_file)
    column = stage.data.answer
    for number, row in enumerate(rows):
        truth = None if column is None else row.get(column)
        texts = [str(truth), ""] if answers is None else [answers[number % len(answers)]]
        prompt = [{"role": "user", "content": str(row.get(stage.data.problem, ""))}]
        for text in texts:
            yield Sample(
                completion=text,
                prompt=prompt,
                response_length=len(text.split()),
                ground_truth=truth,
                columns=row,
            )


def load_answers(path: Path) -> list[str]:
    """Sample answers of a file. Raises RewardConfigError naming the line."""
    answers = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            value = json.loads(line)
            answers.append(str(value["completion"] if isinstance(value, dict) else value))
        except (ValueError, KeyError) as error:
            raise RewardConfigError(f"{path.name}, line {number}: {error!r}") from error
    if not answers:
        raise RewardConfigError(f"{path.name} is empty")
    return answers


def _as_json(samples: Sequence[Sample], result: PlaneResult) -> str:
    document: dict[str, Any] = {
        "samples": [
            {
                "completion": sample.completion,
                "scores": {source.name: source.scores[row] for source in result.sources},
            }
            for row, sample in enumerate(samples)
        ],
        "sources": {
            source.name: {
                "weight": source.weight,
                "seconds": round(source.seconds, 3),
                "failures": {
                    index: f"{failure.kind}: {failure.detail}"
                    for index, failure in source.failures.items()
                },
                "contained": dict(source.confinement),
            }
            for source in result.sources
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _as_table(samples: Sequence[Sample], result: PlaneResult) -> str:
    width = max(8, *(len(name) for name in result.names))
    lines = ["  ".join(["answer".ljust(_SHOWN), *(name.rjust(width) for name in result.names)])]
    for row, sample in enumerate(samples):
        text = " ".join(sample.completion.split())
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        cells = [_cell(source.scores[row], row in source.failures) for source in result.sources]
        lines.append("  ".join([text.ljust(_SHOWN), *(cell.rjust(width) for cell in cells)]))
    for source in result.sources:
        lines.append(f"\n{source.name}: weight {source.weight:g}, {source.seconds:.2f} s")
        lines += [f"  {area}: {state}" for area, state in source.confinement.items()]
        for kind, count in source.failure_counts.items():
            example = next(f for f in source.failures.values() if f.kind == kind)
            lines.append(f"  {count} failed ({kind}), for example: {example.detail}")
    return "\n".join(lines)


def _cell(score: float | None, failed: bool) -> str:
    if score is None:
        return "failed" if failed else "–"
    return f"{score:.4g}"


if __name__ == "__main__":
    sys.exit(main())
