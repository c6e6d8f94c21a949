"""Compute ladder, checkpointing, recovery, deployment and tracking, as the run file writes them."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, field_validator

from contracts.base import Strict

__all__ = [
    "BASE_MODEL_NAME",
    "ENGINE_CHARACTERS",
    "AutoscalingSpec",
    "CheckpointSpec",
    "ComputeSpec",
    "DeploySpec",
    "EngineSpec",
    "KeepBestSpec",
    "LoraAdapterSpec",
    "RecoverySpec",
    "Rung",
    "SmokeTestSpec",
    "TrackingSpec",
]

BASE_MODEL_NAME = "default"
"""What requests may call the model of every endpoint; adapters have names of their own."""
ENGINE_CHARACTERS = 1024
"""SageMaker's limit for the value of a hosting container's environment variable."""
Positive = Annotated[int, Field(ge=1)]


class Rung(Strict):
    """One entry of the capacity ladder."""

    instance_type: str
    """SageMaker training instance type."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Hosts."""
    spot: bool = True
    """Managed Spot; false is on demand."""
    volume_gb: Annotated[int, Field(ge=10, le=16384)] = 500
    """EBS volume where the type has no NVMe (NVMe types ignore it)."""


class ComputeSpec(Strict):
    """Where the run trains, and for how long at most."""

    ladder: Annotated[tuple[Rung, ...], Field(min_length=1, max_length=10)]
    """Tried in order when capacity runs out; from the top again after the last."""
    max_runtime_hours: Annotated[float, Field(gt=0, le=672)] = 72.0
    """Training time of the whole run, over all attempts."""
    max_wait_hours: Annotated[float, Field(gt=0, le=720)] | None = None
    """Waiting for Spot capacity plus training; only with a Spot rung, >= max_runtime_hours."""


class KeepBestSpec(Strict):
    """The checkpoint that pruning never touches."""

    metric: str = "validation/reward"
    """A metric of the stage, such as `validation/reward` or `validation/loss`."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better."""


class CheckpointSpec(Strict):
    """How much work an interruption may cost, and how many checkpoints stay in S3."""

    every_minutes: Annotated[float, Field(gt=0)] = 20.0
    """At most this long between saves, rounded to whole steps by the measured step time."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Complete checkpoints kept; the newest two, the best and named ones are never pruned."""
    keep_best: KeepBestSpec | None = None


class RecoverySpec(Strict):
    """Budgets of the recovery rules. Capacity waits are bounded by max_wait_hours alone."""

    max_failures: Annotated[int, Field(ge=0)] = 3
    """Infrastructure failures of a stage that are resubmitted."""
    in_place_wait_minutes: Annotated[float, Field(gt=0)] = 15.0
    """How long managed Spot may take to restart a job by itself before it is moved."""
    max_stalled_attempts: Positive = 3
    """Attempts in a row without a new complete checkpoint before the run fails."""
    capacity_wait_minutes: Annotated[float, Field(gt=0)] = 30.0
    """How long a new job may wait for instances before the next rung is tried (a single rung
    waits)."""
    capacity_backoff_seconds: Annotated[int, Field(ge=1)] = 60
    """First pause after the whole ladder had no capacity or quota; doubles up to an hour, with more
    than one rung up to 33 minutes a rung."""
    failure_backoff_seconds: Annotated[int, Field(ge=1)] = 30
    """First pause after an infrastructure failure; doubles up to an hour."""


class LoraAdapterSpec(Strict):
    """One adapter served beside the base model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    """Model name that requests choose the adapter by."""
    source: str
    """S3 prefix of the adapter."""

    @field_validator("name")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value == BASE_MODEL_NAME:
            raise ValueError("is what requests call the base model; choose another name")
        return value


class EngineSpec(Strict):
    """Settings of the serving engine, passed to vLLM under its own names."""

    max_model_len: Positive | None = None
    """Tokens of prompt and answer together; what the model and memory allow when absent."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` is the model's own, but in vLLM at most 16 bits."""
    quantization: str | None = None
    """A vLLM quantization method, such as `fp8`."""
    tensor_parallel_size: Positive | None = None
    """When absent all GPUs of the instance, or as many as the model splits over evenly."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of a GPU for weights and KV cache."""
    reasoning_parser: str | None = None
    """vLLM's parser that splits thoughts from the answer, such as `qwen3`."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`."""
    chat_template_file: str | None = None
    """Jinja2 chat template used instead of the tokenizer's."""
    trust_remote_code: bool = False
    """Run model code from the model's folder in the endpoint."""
    lora_adapters: tuple[LoraAdapterSpec, ...] = ()

    def compact_json(self) -> str:
        """What is not default, as the endpoint's container gets it: at most ENGINE_CHARACTERS."""
        return json.dumps(
            self.model_dump(mode="json", exclude_defaults=True), separators=(",", ":")
        )


class AutoscalingSpec(Strict):
    """Target tracking on invocations per instance and minute."""

    min_instances: Annotated[int, Field(ge=0)] = 1
    """0 scales to zero, through an inference component."""
    max_instances: Positive = 2
    """Upper bound of instances."""
    target_invocations_per_minute: Positive = 60
    """Requests per instance and minute that the number of instances follows."""


class SmokeTestSpec(Strict):
    """The question asked before the endpoint is announced."""

    prompt: str | None = None
    """The first validation row's prompt when absent."""
    max_tokens: Positive = 256
    """Tokens of the answer."""


class DeploySpec(Strict):
    """A live endpoint at the end of the run."""

    instance_type: str
    """SageMaker hosting instance type."""
    fallback_instance_types: tuple[str, ...] = ()
    """Tried in order when the first has no capacity."""
    instance_count: Positive = 1
    """Instances at the start; autoscaling moves it afterwards."""
    when: Literal["succeeded", "never"] = "succeeded"
    """`never` keeps the settings for a later `grpohub deploy`."""
    endpoint_name: (
        Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$", max_length=63)] | None
    ) = None
    """The run's name when absent; an existing endpoint of ours is updated blue/green."""
    engine: EngineSpec = EngineSpec()
    autoscaling: AutoscalingSpec | None = None
    idle_ttl_hours: Annotated[float, Field(gt=0)] | None = None
    """Delete the endpoint after this long without a request."""
    smoke_test: SmokeTestSpec = SmokeTestSpec()


class WandbSpec(Strict):
    """Weights & Biases."""

    project: str
    """Project name."""
    entity: str | None = None
    """Team or user; the key's default when absent."""
    api_key_secret: str
    """Secrets Manager id or ARN; resolved in the container."""


class MlflowSpec(Strict):
    """MLflow: a server of your own, or SageMaker's by the ARN of its tracking server."""

    tracking_uri: str
    """`http(s)://` address, or ARN of a SageMaker tracking server."""
    experiment: str
    """Experiment the run is logged in."""


class SwanlabSpec(Strict):
    """SwanLab."""

    project: str
    """Project name."""
    api_key_secret: str
    """Secrets Manager id or ARN; resolved in the container."""


class TrackingSpec(Strict):
    """Where metrics go besides the run's own JSONL in S3."""

    tensorboard: bool = False
    """Also write TensorBoard event files beside the metrics."""
    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
    swanlab: SwanlabSpec | None = None
