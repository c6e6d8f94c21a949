"""`--dry-run`: everything that a start would use, resolved and printed; nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contracts.memory import ModelShape, estimate
from training_container.inputs import AttemptInputs, pinned_steps
from training_container.sagemaker_env import SageMakerEnv

__all__ = ["describe"]


def describe(env: SageMakerEnv, inputs: AttemptInputs) -> str:
    """The resolved attempt as JSON, then the memory estimate of every rung of the ladder."""
    document: dict[str, Any] = {
        "attempt": inputs.config.model_dump(mode="json"),
        "host": {
            "name": env.current_host,
            "rank": env.host_rank,
            "hosts": list(env.hosts),
            "ranks_per_host": env.ranks_per_host,
            "world_size": env.world_size,
            "network_interface": env.network_interface,
        },
        "channels": {name: _contents(path) for name, path in sorted(env.channels.items())},
        "stage": inputs.stage.model_dump(mode="json"),
        "checkpoint": {
            **inputs.spec.checkpoint.model_dump(mode="json"),
            "pinned_steps": sorted(pinned_steps(inputs)),
        },
    }
    return "\n".join([json.dumps(document, indent=2), "", *_memory(env, inputs)])


def _contents(path: Any) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return {
        "path": str(path),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _memory(env: SageMakerEnv, inputs: AttemptInputs) -> list[str]:
    if "model" not in env.channels:
        return ["Memory: the model's shape is not known before it is fetched from its hub."]
    shape = _shape(env.channels["model"])
    if shape is None:
        return ["Memory: the model's folder does not tell how many weights it holds."]
    head = (
        f"Memory per rank ({shape.parameters / 1e6:.2f}M weights, {shape.layers} layers, hidden "
        f"{shape.hidden}, micro-batch of {inputs.stage.micro_batch_tokens} tokens):"
    )
    rungs = [estimate(shape, inputs.stage, rung) for rung in inputs.spec.compute.ladder]
    return [head, *(line for rung in rungs for line in rung.lines())]


def _shape(folder: Path) -> ModelShape | None:
    config = folder / "config.json"
    if not config.is_file():
        return None
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    return ModelShape.of(json.loads(config.read_text()), sizes)
