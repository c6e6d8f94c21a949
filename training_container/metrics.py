"""Where a step's metrics go: a JSONL file, one stdout line, and trackers by name.

Rows are appended and flushed, never rewritten: after a resume, rows of a later generation
supersede earlier ones with the same step.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from contracts.compute import MlflowSpec, SwanlabSpec, TrackingSpec, WandbSpec
from contracts.failures import ExitCode
from contracts.metrics import step_line
from training_container.failure import StageError

__all__ = ["MetricsWriter", "RunIdentity", "Tracker", "trackers", "write_samples"]

log = logging.getLogger(__name__)
Metric = float | int | str | None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Whose metrics these are."""

    run_id: str
    stage: str
    method: str
    attempt: int
    generation: str


class Tracker(Protocol):
    """A service that draws curves. It must not end training: see `MetricsWriter.write`."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step's row; only the leader has one."""

    def __init__(
        self,
        folder: Path,
        identity: RunIdentity,
        *,
        sources: Sequence[str] = (),
        trackers: Sequence[Tracker] = (),
        emit: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._identity = identity
        self._sources = tuple(sources)
        self._trackers = list(trackers)
        self._emit = emit

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append the row of ``step``. A tracker that fails is dropped with a warning: curves on a
        web page are not worth a training run."""
        identity = self._identity
        row = {
            "step": step,
            "attempt": identity.attempt,
            "generation": identity.generation,
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "stage": identity.stage,
            "metrics": {name: _plain(value) for name, value in sorted(metrics.items())},
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._emit(step_line(identity.method, step, metrics, self._sources))
        numbers = {name: v for name, v in metrics.items() if isinstance(v, float | int)}
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception:
                log.exception("tracker %s failed and is switched off", tracker.name)
                self._trackers.remove(tracker)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _plain(value: Metric) -> Metric:
    """JSON has no NaN or infinity: null says "no number"."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_samples(folder: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Sampled completions of ``step`` as parquet; the file appears whole, by rename."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.parquet"
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), partial)
    partial.replace(path)
    return path


def trackers(
    spec: TrackingSpec, identity: RunIdentity, folder: Path, secrets: Mapping[str, str]
) -> list[Tracker]:
    """Trackers that the run file names. ``secrets``: resolved values by Secrets Manager id.

    The tracker's run has a fixed id made from run and stage, so that a later attempt continues it.

    Raises:
        StageError: BAD_INPUT naming the package to install when one is missing.
    """
    built: list[Tracker] = []
    if spec.tensorboard:
        built.append(_TensorBoard(folder / "tensorboard"))
    if spec.wandb is not None:
        built.append(_Wandb(spec.wandb, identity, secrets[spec.wandb.api_key_secret]))
    if spec.mlflow is not None:
        built.append(_Mlflow(spec.mlflow, identity))
    if spec.swanlab is not None:
        built.append(_Swanlab(spec.swanlab, identity, secrets[spec.swanlab.api_key_secret]))
    return built


def _package(name: str, tracker: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StageError(
            ExitCode.BAD_INPUT,
            f"tracking.{tracker} needs {name!r}, which the training image does not have",
        ) from error


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._writer = _package("torch.utils.tensorboard", self.name).SummaryWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, spec: WandbSpec, identity: RunIdentity, key: str) -> None:
        wandb = _package("wandb", self.name)
        wandb.login(key=key, verify=False)
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=f"{identity.run_id}-{identity.stage}",
            name=f"{identity.run_id}/{identity.stage}",
            resume="allow",
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    name = "mlflow"

    def __init__(self, spec: MlflowSpec, identity: RunIdentity) -> None:
        self._mlflow = _package("mlflow", self.name)
        self._mlflow.set_tracking_uri(spec.tracking_uri)
        self._mlflow.set_experiment(spec.experiment)
        name = f"{identity.run_id}/{identity.stage}"
        found = self._mlflow.search_runs(
            filter_string=f"attributes.run_name = '{name}'", max_results=1, output_format="list"
        )
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
        else:
            self._mlflow.start_run(run_name=name)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Swanlab:
    name = "swanlab"

    def __init__(self, spec: SwanlabSpec, identity: RunIdentity, key: str) -> None:
        self._swanlab = _package("swanlab", self.name)
        self._swanlab.login(api_key=key)
        self._swanlab.init(
            project=spec.project, experiment_name=f"{identity.run_id}/{identity.stage}"
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._swanlab.log(dict(numbers), step=step)

    def close(self) -> None:
        self._swanlab.finish()
