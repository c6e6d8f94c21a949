"""What SageMaker and the hub tell the container, and the one error of a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from contracts.compute import EngineSpec

__all__ = ["Settings", "StartError"]


class StartError(Exception):
    """The container cannot serve; the text is the first cause, in one line."""

    def __init__(self, cause: object) -> None:
        super().__init__(" ".join(str(cause).split()))


@dataclass(frozen=True)
class Settings:
    """Where the model lies, where to listen, and what the run file says about the engine."""

    base: Path
    port: int
    engine: EngineSpec
    version: str | None
    """The published model's version; None when started by hand."""
    code_uri: str | None
    """S3 prefix of the run's frozen files, where a chat template lies."""

    @property
    def model(self) -> Path:
        return self.base / "model"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read SageMaker's and our own variables.

        Raises:
            StartError: naming the variable that makes no sense.
        """
        text = environment.get("GRPOHUB_DEPLOY", "{}")
        try:
            engine = EngineSpec.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, ("deploy.engine", *first["loc"])))
            raise StartError(f"GRPOHUB_DEPLOY: {place}: {first['msg']}") from error
        port = environment.get("SAGEMAKER_BIND_TO_PORT", "8080")
        if not port.isdigit():
            raise StartError(f"SAGEMAKER_BIND_TO_PORT: {json.dumps(port)} is not a port")
        return cls(
            base=Path(environment.get("SAGEMAKER_BASE_DIR", "/opt/ml")),
            port=int(port),
            engine=engine,
            version=environment.get("GRPOHUB_MODEL_VERSION"),
            code_uri=environment.get("GRPOHUB_CODE_URI"),
        )
