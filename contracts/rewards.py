"""Reward sources of a stage, as the run file writes them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from contracts.base import Pattern, Strict

__all__ = [
    "LONGEST_BATCH",
    "EndpointSpec",
    "JudgeParserSpec",
    "JudgeReward",
    "ModelReward",
    "RewardKind",
    "RewardSpec",
]

LONGEST_BATCH = 1000.0
"""Seconds. With the start of a worker it must end before the ranks that wait are taken for hung."""
RewardKind = Literal["function", "file", "model", "judge"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]


class EndpointSpec(Strict):
    """A service outside the job that scores: OpenAI-compatible, or a SageMaker endpoint."""

    url: str | None = None
    """Base address such as `https://judge.example.com/v1`."""
    sagemaker_endpoint: str | None = None
    """Name of a SageMaker endpoint in the run's account and region, called with SigV4."""
    model: str | None = None
    """Model name sent with each request; the service's only model when absent."""
    api_key_secret: str | None = None
    """Secrets Manager id or ARN of the key; resolved inside the container, never logged."""
    max_concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Requests under way at once."""
    call_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one request, retries excluded."""
    max_retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Further tries after 429, 5xx or a broken connection, with exponential backoff."""

    @model_validator(mode="after")
    def _one_address(self) -> EndpointSpec:
        if (self.url is None) == (self.sagemaker_endpoint is None):
            raise ValueError("give exactly one of `url` and `sagemaker_endpoint`")
        return self


class ModelReward(Strict):
    """An outcome reward model: sequence classification, `logits[:, 0]` is the reward."""

    source: str | None = None
    """S3 prefix or hub id of the classifier; absent when `endpoint` scores."""
    revision: str | None = None
    """Revision of a hub id."""
    adapter: str | None = None
    """S3 prefix or hub id of a LoRA adapter put on the classifier."""
    template_file: str | None = None
    """Jinja2 chat template for the classifier; its tokenizer's own when absent."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 16
    """Conversations in one forward pass, at most."""
    micro_batch_tokens: Annotated[int, Field(ge=8)] = 16384
    """Tokens of one forward pass, padding included, at most; a longer conversation goes alone."""
    max_length: Annotated[int, Field(ge=8)] = 4096
    """Tokens of a conversation; a longer one is not scored (None), never cut."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")] = "auto"
    """Where the classifier lives: `auto` beside the policy, `cuda:1` on a GPU of the leader's host,
    `cpu`."""
    endpoint: EndpointSpec | None = None
    """Score over HTTP instead (vLLM pooling/classify)."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelReward:
        if (self.source is None) == (self.endpoint is None):
            raise ValueError("give exactly one of `source` and `endpoint`")
        return self


class JudgeParserSpec(Strict):
    """How a judge's text becomes a number. Last match wins; anything else is None, never 0."""

    kind: Literal["reward", "brackets", "verdict", "json", "regex"] = "reward"
    """`Reward: x` | `[[x]]` or `[[x/10]]` | YES/NO | a JSON field | your own pattern."""
    minimum: float = 0.0
    """Lowest legal score, mapped to 0."""
    maximum: float = 1.0
    """Highest legal score, mapped to 1."""
    pattern: Pattern | None = None
    """For `regex`: one capture group holding the number."""
    field: str | None = None
    """For `json`: the key holding the number."""

    @model_validator(mode="after")
    def _parts_fit(self) -> JudgeParserSpec:
        if self.maximum <= self.minimum:
            raise ValueError("`maximum` must be above `minimum`")
        if (self.kind == "regex") != (self.pattern is not None):
            raise ValueError("`pattern` goes with kind `regex`, and only with it")
        if self.pattern is not None and not re.compile(self.pattern).groups:
            raise ValueError("`pattern` needs a group around the number")
        if (self.kind == "json") != (self.field is not None):
            raise ValueError("`field` goes with kind `json`, and only with it")
        return self


class JudgeReward(Strict):
    """A generative reward model: in the job (`source`) or outside it (`endpoint`)."""

    source: str | None = None
    """S3 prefix or hub id of a causal LM run inside the job."""
    revision: str | None = None
    """Revision of a hub id."""
    endpoint: EndpointSpec | None = None
    """An OpenAI-compatible service."""
    system: str | None = None
    """System prompt."""
    query_template: str = (
        "{{ conversation }}\n\nRate the last answer. Finish with `Reward: x`, x from 0 to 1."
    )
    """Jinja2 over `conversation`, `messages`, `completion` and every dataset column."""
    choices: Annotated[int, Field(ge=1, le=32)] = 1
    """Judgements per answer; those that parse are averaged."""
    temperature: Annotated[float, Field(ge=0)] = 0.3
    """Sampling temperature of the judge."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Tokens of one judgement."""
    parser: JudgeParserSpec = JudgeParserSpec()
    """How the text becomes a number."""
    combine: Literal["max", "min"] | None = None
    """Take the larger or smaller of this and the source named in `combine_with`."""
    combine_with: str | None = None
    """Name of another source of this stage."""
    cache: bool = True
    """Do not ask twice about the same conversation within a run."""

    @model_validator(mode="after")
    def _parts_fit(self) -> JudgeReward:
        if (self.source is None) == (self.endpoint is None):
            raise ValueError("give exactly one of `source` and `endpoint`")
        if (self.combine is None) != (self.combine_with is None):
            raise ValueError("`combine` and `combine_with` go together")
        return self


class RewardSpec(Strict):
    """One reward source. Exactly one of a built-in `function`, `file`, `model`, `judge`."""

    name: Name
    """Unique within the stage; metrics are `reward/<name>`."""
    weight: float
    """Factor in the fused reward; explicit, so that the sum is never a surprise."""
    function: str | None = None
    """A built-in's name, or with `file` the function in that file."""
    file: str | None = None
    """Python file with your own reward, relative to the run file."""
    model: ModelReward | None = None
    """An outcome reward model."""
    judge: JudgeReward | None = None
    """A generative reward model."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    on_error: Literal["none", "zero", "raise"] = "none"
    """A sample the source failed on: not scored by it, scored 0, or the run fails at once."""
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Above this share of failed samples in a step the run ends with the reason."""
    timeout_seconds: Annotated[float, Field(gt=0, le=LONGEST_BATCH)] = 120.0
    """Deadline of one batch; work still running is killed."""
    memory_mb: Annotated[int, Field(ge=128)] = 4096
    """Address space of one worker process running your file."""
    network: bool = False
    """Your file needs the network; without this it has none where the host allows."""

    @property
    def kind(self) -> RewardKind:
        """Which of the four kinds this source is."""
        if self.file is not None:
            return "file"
        if self.model is not None:
            return "model"
        return "judge" if self.judge is not None else "function"

    @field_validator("function")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not value.isidentifier():
            raise ValueError("must be a Python name")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> RewardSpec:
        kinds = [k for k in ("file", "model", "judge") if getattr(self, k) is not None]
        if len(kinds) > 1:
            raise ValueError(f"give one of `file`, `model`, `judge`, not {' and '.join(kinds)}")
        if not kinds and self.function is None:
            raise ValueError("give one of `function`, `file`, `model`, `judge`")
        if self.kind == "file" and self.function is None:
            raise ValueError("`file` needs `function`: which function of the file to call")
        if self.kind in ("model", "judge") and self.function is not None:
            raise ValueError(f"`function` has no effect beside `{self.kind}`")
        if self.kind in ("model", "judge") and self.parameters:
            raise ValueError(f"`parameters` has no effect beside `{self.kind}`")
        if self.network and self.kind != "file":
            raise ValueError("`network` has an effect only with `file`")
        return self
