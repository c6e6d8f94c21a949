"""One class per kind of reward source, and how an entry of the run file becomes one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.reward_files import check_reward_file
from contracts.rewards import RewardSpec
from training_container.rewards.interface import (
    RewardConfigError,
    RewardRequest,
    RewardSource,
    Sample,
    Scores,
)
from training_container.rewards.registry import BuiltIn, built_in
from training_container.rewards.sandbox import PoolConfig, WorkerPool
from training_container.rewards.scorer import Scorer
from training_container.rewards.user_file import UserFunction
from training_container.rewards.worker_process import START_SECONDS

__all__ = ["InlineSource", "PoolSource", "SourceContext", "build_source"]

_BUILT_IN_MEMORY_MB = 4096


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What the sources of a stage need to know about the job."""

    files: Path = Path()
    """The folder that `file` paths of the run file are relative to."""
    columns: tuple[str, ...] = ()
    """Columns of the dataset."""
    workers: int = field(default_factory=lambda: max(2, min(16, (os.cpu_count() or 2) // 8)))
    """Worker processes per source: most cores belong to the rollout."""
    read_paths: tuple[str, ...] = ()
    """Folders a user's file may read besides its own, such as the data channels."""
    cache: Path | None = None
    """Folder for what judges have said; kept in memory only when None."""
    start_seconds: float = START_SECONDS
    """Deadline of a worker process's start."""
    most_memory_mb: int = 2**20
    """No worker process gets more than this, whatever its source asks for."""


class InlineSource:
    """A built-in whose time is bounded by the length of the text: no process is needed."""

    def __init__(self, name: str, score: Callable[[Sample], float | None]) -> None:
        self.name = name
        call = lambda one: score(one[0])  # noqa: E731 - the convention of UserFunction
        self._scorer = Scorer(UserFunction("built_in", True, (), call, reads_prompt=False))

    def prepare(self) -> None:
        """Nothing to load."""

    def score(self, request: RewardRequest) -> Scores:
        return Scores.of_outcomes(
            len(request), [outcome for _, outcome in self._scorer.outcomes(request.samples)]
        )

    def confinement(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Nothing to end."""


class PoolSource:
    """A user's file, or a built-in whose time is not bounded, in worker processes."""

    def __init__(self, name: str, config: PoolConfig) -> None:
        self.name, self.config = name, config
        self._pool = WorkerPool(config)

    def prepare(self) -> None:
        self._pool.prepare()

    def score(self, request: RewardRequest) -> Scores:
        return self._pool.score(request.samples)

    def confinement(self) -> Mapping[str, str]:
        return self._pool.confinement

    def close(self) -> None:
        self._pool.close()


def build_source(spec: RewardSpec, context: SourceContext) -> RewardSource:
    """The source a run file's entry describes, not yet prepared. Raises RewardConfigError."""
    match spec.kind:
        case "file":
            return _file_source(spec, context)
        case "model":
            return _model_source(spec, context)
        case "judge":
            return _judge_source(spec, context)
    assert spec.function is not None
    entry = built_in(spec.function)
    score = entry.bind(spec.parameters)
    if not entry.isolated:
        return InlineSource(spec.name, score)
    return PoolSource(spec.name, _built_in_pool(spec, entry, context))


def _model_source(spec: RewardSpec, context: SourceContext) -> RewardSource:
    # Imported here: torch and boto3 are no business of a dry run of rules.
    from training_container.rewards.assets import fetch_weights, resolve_secret

    assert spec.model is not None
    if spec.model.endpoint is not None:
        from training_container.rewards.model_http import HttpModelSource

        key = resolve_secret(spec.model.endpoint.api_key_secret)
        return HttpModelSource(spec, context.files, key)
    from training_container.rewards.model_source import ModelSource

    assert spec.model.source is not None
    return ModelSource(spec, fetch_weights(spec.model.source), context.files)


def _judge_source(spec: RewardSpec, context: SourceContext) -> RewardSource:
    from training_container.rewards.assets import fetch_weights, resolve_secret
    from training_container.rewards.judge import JudgeSource
    from training_container.rewards.judge_cache import JudgementCache
    from training_container.rewards.judge_reader import JudgementReader

    assert spec.judge is not None
    reader = JudgementReader(
        spec,
        workers=context.workers,
        memory_mb=min(_BUILT_IN_MEMORY_MB, context.most_memory_mb),
        start_seconds=context.start_seconds,
    )
    kept = context.cache is not None and spec.judge.cache
    cache = JudgementCache(context.cache / f"{spec.name}.sqlite" if kept else None)
    if spec.judge.endpoint is not None:
        from training_container.rewards.judge_http import HttpAsker

        key = resolve_secret(spec.judge.endpoint.api_key_secret)
        return JudgeSource(spec, HttpAsker(spec.judge, key), cache, reader)
    from training_container.rewards.judge_local import LocalAsker

    assert spec.judge.source is not None
    weights = fetch_weights(spec.judge.source)
    return JudgeSource(spec, LocalAsker(spec.name, spec.judge, weights), cache, reader)


def _built_in_pool(spec: RewardSpec, entry: BuiltIn, context: SourceContext) -> PoolConfig:
    load = {"function": entry.name, "parameters": dict(spec.parameters)}
    return PoolConfig(
        load=load,
        name=spec.name,
        workers=context.workers,
        timeout_seconds=spec.timeout_seconds,
        memory_mb=min(max(spec.memory_mb, _BUILT_IN_MEMORY_MB), context.most_memory_mb),
        start_seconds=context.start_seconds,
    )


def _file_source(spec: RewardSpec, context: SourceContext) -> PoolSource:
    assert spec.file is not None
    assert spec.function is not None
    path = (context.files / spec.file).resolve()
    if not path.is_file():
        raise RewardConfigError(f"reward {spec.name!r}: there is no file {spec.file}")
    source = path.read_bytes()
    _check_statically(spec, source, context.columns)
    parameters, folders = _with_weights(spec.parameters)
    load: dict[str, Any] = {
        "file": str(path),
        "sha256": hashlib.sha256(source).hexdigest(),
        "function": spec.function,
        "parameters": parameters,
        "available": list(context.columns),
    }
    config = PoolConfig(
        load=load,
        name=spec.name,
        workers=context.workers,
        timeout_seconds=spec.timeout_seconds,
        memory_mb=min(spec.memory_mb, context.most_memory_mb),
        start_seconds=context.start_seconds,
        network=spec.network,
        read_paths=(str(path.parent), *folders, *context.read_paths),
    )
    return PoolSource(spec.name, config)


def _with_weights(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A parameter `{weights: s3://… or a hub id}` becomes the folder they were fetched to: the code
    that uses them has neither network nor credentials to fetch them itself."""
    given, folders = dict(parameters), []
    for name, value in parameters.items():
        if isinstance(value, Mapping) and set(value) == {"weights"}:
            from training_container.rewards.assets import fetch_folder

            given[name] = fetch_folder(str(value["weights"]))
            folders.append(given[name])
    return given, folders


def _check_statically(spec: RewardSpec, source: bytes, columns: Sequence[str]) -> None:
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RewardConfigError(f"{spec.file} is not UTF-8: {error}") from error
    problems = check_reward_file(
        text,
        str(spec.function),
        path=str(spec.file),
        columns=columns or None,
        parameters=list(spec.parameters),
    )
    if problems:
        listed = "; ".join(map(str, problems))
        raise RewardConfigError(f"reward {spec.name!r}: {listed}")
