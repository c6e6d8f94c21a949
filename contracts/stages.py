"""Stages of a run: data, prompt, algorithm. Names as TRL, verl and EasyR1 users know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from contracts.base import Pattern, Strict
from contracts.layout import MAX_STEP
from contracts.rewards import RewardSpec

__all__ = [
    "ADVANTAGE_SCALES",
    "LOSS_CLIPS",
    "LOSS_FIELDS",
    "AdvantageName",
    "AggregationName",
    "AnyStage",
    "DataSpec",
    "DynamicSamplingSpec",
    "GrpoSettings",
    "GrpoStage",
    "KlSpec",
    "LoraSpec",
    "LossName",
    "OptimizerSpec",
    "OverlongSpec",
    "PromptSpec",
    "RolloutSpec",
    "SftSettings",
    "SftStage",
    "Stage",
    "StartFrom",
    "ValidationSpec",
]

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "gdpo"]
LossName = Literal["ppo_clip", "gspo", "cispo", "sapo"]
AggregationName = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]
Scale = Literal["group", "batch", "none"]
ADVANTAGE_SCALES: Mapping[AdvantageName, tuple[Scale, ...]] = {
    "grpo": ("group", "batch", "none"),
    "dr_grpo": ("none",),
    "rloo": ("none", "group", "batch"),
    "reinforce_plus_plus": ("batch",),
    "remax": ("none",),
    "gdpo": ("batch",),
}
"""Scales each advantage is defined with, the published one first."""
LOSS_FIELDS: Mapping[LossName, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "clip_dual"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
}
"""Settings that each loss reads, of those that not every loss does."""
LOSS_CLIPS: Mapping[LossName, tuple[float, float]] = {
    "ppo_clip": (0.2, 0.2),  # arXiv:1707.06347
    "gspo": (3e-4, 4e-4),  # arXiv:2507.18071, section 5.1: of a whole sequence's mean ratio
    # MiniMax-M1 (arXiv:2506.13585) has no lower bound; the upper one of 5 is ScaleRL's
    # (arXiv:2510.13786), as MiniMax-M1 gives no number.
    "cispo": (1.0, 4.0),
    "sapo": (0.2, 0.2),  # gated, not clipped: nothing reads them
}
"""`clip_low` and `clip_high` of each loss as published."""
StageName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
Positive = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEP)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class StartFrom(Strict):
    """Weights of an earlier stage of the same run. Optimizer, RNG and data start anew."""

    stage: StageName
    """Name of an earlier stage."""
    step: Positive | None = None
    """A named checkpoint of that stage; its exported model when absent."""


class DataSpec(Strict):
    """Where rows are and which columns matter. jsonl, json or parquet."""

    train: str
    """`s3://` object or prefix; a local path is uploaded by the client at submit."""
    validation: str | None = None
    """Held-out rows; validation is off without it."""
    problem: str = "problem"
    """Column with the question (EasyR1 `prompt_key`)."""
    answer: str | None = "answer"
    """Column with the reference answer; SFT trains on it, rewards see it as the ground truth."""
    messages: str | None = None
    """Column with a chat (list of role/content); instead of `problem` (and, in SFT, `answer`)."""
    images: str | None = None
    """Column with images (bytes or paths); checked and carried in the data layer."""
    shuffle: bool = True
    """New order each epoch, a pure function of seed and epoch."""


class PromptSpec(Strict):
    """How a row becomes the user message."""

    template_file: str | None = None
    """Jinja2 file, variable `content` and every column; sandboxed. EasyR1-compatible."""
    template: str | None = None
    """The same, inline."""
    system: str | None = None
    """System message put before every prompt."""
    chat_template_file: str | None = None
    """Jinja2 chat template used instead of the tokenizer's."""
    max_prompt_length: Positive = 2048
    """Tokens; longer prompts are filtered with a count, never cut (GRPO stages)."""

    @model_validator(mode="after")
    def _one_template(self) -> PromptSpec:
        if self.template is not None and self.template_file is not None:
            raise ValueError("give one of `template` and `template_file`")
        return self


class OptimizerSpec(Strict):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; `linear` and `cosine` end at `min_lr_ratio` at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a share of the peak."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""


class LoraSpec(Strict):
    """Train a low-rank adapter instead of all weights."""

    rank: Positive = 64
    """Rank of the update."""
    alpha: Positive = 64
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: Pattern | tuple[str, ...] = "all-linear"
    """Module names, a regular expression, or `all-linear`."""
    exclude_modules: Pattern | None = None
    """Regular expression of module names left alone, such as `.*visual.*`."""
    export_adapter: bool = False
    """Export the adapter beside the merged weights."""


class ValidationSpec(Strict):
    """Scoring of held-out rows during training."""

    every_steps: Positive = 10
    """Steps between validations."""
    before_train: bool = True
    """Score the starting weights first."""
    max_rows: Positive | None = None
    """Only the first rows; all when absent."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy (GRPO stages). vLLM samples at 2 at most."""


class RolloutSpec(Strict):
    """How answers are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`auto`: vLLM on GPU, Hugging Face generate on CPU."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature; log-probabilities are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 keeps every token."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every token."""
    max_response_length: Positive = 2048
    """Tokens of one answer."""
    batch_size: Positive = 64
    """Answers generated at once by the Hugging Face engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of a GPU that vLLM takes; the training state stays beside it."""
    log_samples: Annotated[int, Field(ge=0)] = 16
    """Completions per step kept as parquet, with per-source rewards; 0 keeps none."""


class KlSpec(Strict):
    """KL to the reference policy (the stage's starting weights)."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator: k1 is unbiased, k2 has low variance, k3 is both and not negative."""
    coefficient: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the KL term (its start, with adaptive control)."""
    placement: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward token by token."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient follows the measured KL."""
    target: Annotated[float, Field(gt=0)] = 0.1
    """Adaptive control: the KL aimed at."""
    horizon: Positive = 10000
    """Adaptive control: samples over which it reacts."""


class DynamicSamplingSpec(Strict):
    """DAPO: drop groups without signal and sample more prompts in their place."""

    max_refills: Annotated[int, Field(ge=1, le=100)] = 4
    """Further rounds of sampling; afterwards the step trains on what exists, with a metric."""
    low: float | None = None
    """Also drop groups whose mean reward is at or below this."""
    high: float | None = None
    """Also drop groups whose mean reward is at or above this."""


class OverlongSpec(Strict):
    """DAPO soft overlong punishment, added to the fused reward."""

    buffer: Positive
    """Tokens before `max_response_length` over which the penalty grows to `penalty`."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What an answer of full length loses."""


def _published_scale(data: Mapping[str, Any]) -> Scale:
    return ADVANTAGE_SCALES[data.get("advantage", "grpo")][0]


def _published_clip(data: Mapping[str, Any]) -> tuple[float, float]:
    return LOSS_CLIPS[data.get("loss", "ppo_clip")]


class GrpoSettings(Strict):
    """The GRPO step."""

    group_size: Annotated[int, Field(ge=2)] = 5
    """Answers per prompt (TRL `num_generations`, verl `rollout.n`)."""
    prompts_per_step: Positive = 128
    """Prompts sampled each step (EasyR1 `rollout_batch_size`)."""
    mini_batch_prompts: Positive | None = None
    """Prompts per optimizer update (EasyR1 `global_batch_size`); all of the step when absent."""
    epochs_per_batch: Positive = 1
    """Passes over each step's samples (`ppo_epochs`)."""
    advantage: AdvantageName = "grpo"
    """How rewards of a group become advantages."""
    scale_rewards: Scale = Field(default_factory=_published_scale)
    """By what deviation advantages are divided; absent, as `advantage` was published. `grpo`:
    `group` (or `batch`, `none`); `rloo`: `none` (or `group`, `batch`); the others know one."""
    reward_fusion: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How sources are combined; `gdpo` implies `normalize_then_sum`."""
    loss: LossName = "ppo_clip"
    """The surrogate objective."""
    aggregation: AggregationName = "token_mean"
    """How token losses become one number."""
    clip_low: float = Field(ge=0, default_factory=lambda data: _published_clip(data)[0])
    """The ratio is clipped below at 1 - clip_low; absent, as `loss` was published: `ppo_clip` 0.2,
    `gspo` 0.0003, `cispo` 1 (no bound)."""
    clip_high: float = Field(ge=0, default_factory=lambda data: _published_clip(data)[1])
    """The ratio is clipped above at 1 + clip_high; absent: `ppo_clip` 0.2 (DAPO clip-higher: 0.28),
    `gspo` 0.0004, `cispo` 4."""
    clip_dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the ratio where the advantage is negative (`ppo_clip`); null turns it off."""
    sapo_tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the SAPO gate where the advantage is positive."""
    sapo_tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Temperature of the SAPO gate where the advantage is negative."""
    kl: KlSpec | None = KlSpec()
    """null: no reference model is loaded and no KL computed."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; 0 has none."""
    mask_truncated: bool = False
    """Truncated answers count in the group baseline but carry no loss."""
    dynamic_sampling: DynamicSamplingSpec | None = None
    overlong: OverlongSpec | None = None


class SftSettings(Strict):
    """The SFT step."""

    batch_size: Positive = 32
    """Rows per optimizer update."""
    max_length: Positive = 4096
    """Tokens of prompt and answer; longer rows are filtered with a count."""


class StageBase(Strict):
    """What every stage has."""

    name: StageName
    """Lower case, unique within the run."""
    start_from: StartFrom | None = None
    """Absent: the stage before, or the run's model in the first stage."""
    data: DataSpec
    prompt: PromptSpec = PromptSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    lora: LoraSpec | None = None
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. `auto`: on
    GPU, where a 7B model's micro-batch would not fit without."""
    micro_batch_tokens: Positive = 16384
    """Tokens of one forward and backward pass on one rank; memory, never mathematics."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto`: bfloat16 on GPU, float32 on CPU. Weights that are trained are kept in
    float32, the frozen ones under an adapter in the compute type."""
    max_steps: Steps | None = None
    """Optimizer-visible steps of the stage, counted from 1."""
    epochs: Steps | None = None
    """Give `max_steps`, `epochs`, or both (the smaller wins)."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Of data order, sampling and initialisation."""
    validation: ValidationSpec = ValidationSpec()

    def recomputes(self, *, on_gpu: bool) -> bool:
        """`gradient_checkpointing` on a device."""
        return on_gpu if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @model_validator(mode="after")
    def _ends(self) -> StageBase:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("give `max_steps` or `epochs`")
        return self


class SftStage(StageBase):
    """Supervised fine-tuning: loss on assistant tokens only."""

    method: Literal["sft"]
    """Supervised fine-tuning."""
    sft: SftSettings = SftSettings()
    optimizer: OptimizerSpec = OptimizerSpec(learning_rate=1e-5)


class GrpoStage(StageBase):
    """Group relative policy optimisation with one or more reward sources."""

    method: Literal["grpo"]
    """Group relative policy optimisation."""
    rewards: Annotated[tuple[RewardSpec, ...], Field(min_length=1)]
    grpo: GrpoSettings = GrpoSettings()
    rollout: RolloutSpec = RolloutSpec()


AnyStage = SftStage | GrpoStage
Stage = Annotated[SftStage | GrpoStage, Field(discriminator="method")]
