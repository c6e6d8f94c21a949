"""What the control plane tells a training job, and how it travels.

SageMaker passes hyperparameters as strings of at most 2500 characters, shows them in events and
keeps them for ever: so a job gets the *address* of its run file and its own coordinates, never
settings and never secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from contracts.base import Strict
from contracts.layout import RunLayout, StageLayout
from contracts.problems import InvalidInputError, Problem

__all__ = ["AttemptConfig", "CheckpointRef", "WeightsFrom"]


class CheckpointRef(Strict):
    """A checkpoint by its coordinates."""

    step: Annotated[int, Field(ge=0)]
    generation: str


class WeightsFrom(Strict):
    """Weights-only start from a checkpoint of an earlier stage (continue, not resume)."""

    stage_index: Annotated[int, Field(ge=0)]
    stage: str
    checkpoint: CheckpointRef


class AttemptConfig(Strict):
    """Coordinates of one attempt."""

    run_id: str
    stage_index: Annotated[int, Field(ge=0)]
    stage: str
    attempt: Annotated[int, Field(ge=1)]
    bucket: str
    spec_sha256: str
    """sha256 of `spec.json`; the container refuses another file."""
    resume_floor: CheckpointRef | None = None
    """Newest complete checkpoint at submission; the container must find this or a newer one."""
    weights_from: WeightsFrom | None = None
    """Named checkpoint of an earlier stage; the `model` channel then gives architecture and
    tokenizer."""

    @property
    def layout(self) -> StageLayout:
        return RunLayout(self.run_id).stage(self.stage_index, self.stage)

    def to_hyperparameters(self) -> dict[str, str]:
        """The job's HyperParameters map: one JSON text per field."""
        dumped = self.model_dump(mode="json", exclude_none=True)
        return {key: json.dumps(value) for key, value in dumped.items()}

    @classmethod
    def from_hyperparameters(cls, values: Mapping[str, str]) -> AttemptConfig:
        """Read back what `to_hyperparameters` wrote.

        Raises:
            InvalidInputError: naming each hyperparameter that is missing or wrong.
        """
        try:
            document = {key: json.loads(value) for key, value in values.items()}
            return cls.model_validate_json(json.dumps(document))
        except json.JSONDecodeError as error:
            problem = Problem(
                "hyperparameters", error.doc, "is not JSON", "Submit through the hub."
            )
            raise InvalidInputError([problem], subject="hyperparameters") from error
        except ValidationError as error:
            problems = [
                Problem(
                    ".".join(map(str, d["loc"])), d["input"], d["msg"], "Submit through the hub."
                )
                for d in error.errors(include_url=False)
            ]
            raise InvalidInputError(problems, subject="hyperparameters") from error
