"""Everything an attempt needs before a process starts: settings, run file, user files, model,
data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from contracts.attempt import AttemptConfig
from contracts.failures import ExitCode
from contracts.layout import RunLayout, StageLayout
from contracts.problems import InvalidInputError
from contracts.run_spec import RunSpec, parse_run_spec
from contracts.stages import GrpoStage, SftStage
from training_container.checkpoints.store import Store
from training_container.failure import StageError
from training_container.sagemaker_env import SageMakerEnv

__all__ = ["AttemptInputs", "fetch_code", "fetch_hub_model", "load_attempt", "pinned_steps"]

_SECOND_COPIES = ["consolidated*", "original/*", "onnx/*"]
"""The same weights in the formats of other programs, as large again."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class AttemptInputs:
    """A validated attempt."""

    config: AttemptConfig
    spec: RunSpec
    spec_text: str
    stage: SftStage | GrpoStage

    @property
    def layout(self) -> StageLayout:
        return self.config.layout


def load_attempt(env: SageMakerEnv, store: Store | None = None) -> AttemptInputs:
    """Hyperparameters, then the run file they point at, checked against its sha256.

    Raises:
        StageError: BAD_INPUT when anything is wrong with them, STORAGE when S3 fails.
    """
    try:
        config = AttemptConfig.from_hyperparameters(env.hyperparameters)
        body = (store or Store(config.bucket)).read(config.layout.run.spec)
        digest = hashlib.sha256(body).hexdigest()
        if digest != config.spec_sha256:
            raise StageError(
                ExitCode.BAD_INPUT,
                f"spec.json has sha256 {digest}, the attempt wants {config.spec_sha256}",
            )
        spec = parse_run_spec(json.loads(body))
    except (InvalidInputError, json.JSONDecodeError) as error:
        raise StageError(ExitCode.BAD_INPUT, str(error)) from error
    except KeyError as error:
        raise StageError(ExitCode.BAD_INPUT, f"the run file is missing: {error}") from error
    if config.stage_index >= len(spec.stages):
        raise StageError(ExitCode.BAD_INPUT, f"the run has no stage {config.stage_index}")
    stage = spec.stages[config.stage_index]
    if stage.name != config.stage:
        raise StageError(
            ExitCode.BAD_INPUT,
            f"stage {config.stage_index} is {stage.name!r}, the attempt says {config.stage!r}",
        )
    return AttemptInputs(config, spec, body.decode(), stage)


def fetch_code(store: Store, layout: RunLayout, folder: Path) -> None:
    """The run's frozen user files: reward code, templates."""
    folder.mkdir(parents=True, exist_ok=True)
    for key in store.listing(layout.code_prefix):
        if key.endswith("/"):  # a console's "folder"
            continue
        path = folder / key.removeprefix(layout.code_prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(key))


def pinned_steps(inputs: AttemptInputs) -> frozenset[int]:
    """Steps of this stage that later stages start from."""
    later = inputs.spec.stages[inputs.config.stage_index + 1 :]
    starts = [stage.start_from for stage in later if stage.start_from is not None]
    return frozenset(s.step for s in starts if s.stage == inputs.stage.name and s.step is not None)


def fetch_hub_model(inputs: AttemptInputs, folder: Path, *, weights: bool) -> Path:
    """The base model by its hub id, where the job has no `model` channel; ``weights`` on the host
    that loads it.

    Raises:
        StageError: BAD_INPUT when the source is no hub id or the hub refuses it, STORAGE when the
            hub fails.
    """
    # Imported here: only runs that name a hub id pay for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    model = inputs.spec.model
    if not _HUB_ID.fullmatch(model.source):
        raise StageError(
            ExitCode.BAD_INPUT, f"the job has no `model` channel and {model.source!r} is no hub id"
        )
    patterns = ["*.json", "*.jinja", "*.txt", "*.model"]
    patterns += ["*.safetensors"] if weights else []
    patterns += ["*.py"] if model.trust_remote_code else []
    try:
        snapshot_download(
            model.source,
            revision=model.revision,
            token=read_secret(model.hub_token_secret) if model.hub_token_secret else None,
            local_dir=folder,
            allow_patterns=patterns,
            ignore_patterns=_SECOND_COPIES,
        )
    except HfHubHTTPError as error:
        # Not there, not at this revision, or not for this token: no attempt would fare better.
        refused = error.response.status_code in (401, 403, 404)
        code = ExitCode.BAD_INPUT if refused else ExitCode.STORAGE
        raise StageError(code, f"hub model {model.source!r}: {error}") from error
    except OSError as error:
        raise StageError(ExitCode.STORAGE, f"hub model {model.source!r}: {error}") from error
    return folder


def read_secret(secret_id: str) -> str:
    """A value from Secrets Manager, for this process only: never logged, never in the environment.

    Raises:
        StageError: BAD_INPUT when it cannot be read.
    """
    try:
        answer = boto3.client("secretsmanager").get_secret_value(SecretId=secret_id)
    except (ClientError, BotoCoreError) as error:
        raise StageError(ExitCode.BAD_INPUT, f"secret {secret_id!r}: {error}") from error
    return str(answer["SecretString"])


def secret_ids(spec: RunSpec) -> Iterable[str]:
    """Secrets that the trackers of a run name."""
    for tracker in (spec.tracking.wandb, spec.tracking.swanlab):
        if tracker is not None:
            yield tracker.api_key_secret
