"""Settings that would do nothing where they stand: refused, as who wrote them expects an effect.

A setting counts as written when it differs from its default: a frozen run file states all defaults.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from contracts.metrics import step_metrics
from contracts.problems import Problem, nearest
from contracts.stages import AnyStage, GrpoStage, SftStage

__all__ = ["best_metric_problems", "idle_in_stage", "unread_by_source"]


def idle_in_stage(stage: AnyStage, path: str) -> Iterator[Problem]:
    """Settings of one stage that its other settings leave without effect."""
    if stage.data.validation is None:
        yield from _idle(
            stage.validation,
            ("every_steps", "before_train", "max_rows", "temperature"),
            f"{path}.validation",
            "has no effect without `data.validation`",
            "Name held-out rows there, or remove it.",
        )
    elif isinstance(stage, SftStage):
        reason = "has no effect in an SFT stage, which samples nothing"
        yield from _idle(
            stage.validation, ("temperature",), f"{path}.validation", reason, "Remove it."
        )
    if isinstance(stage, SftStage):
        reason = "has no effect in an SFT stage"
        fix = "Use `sft.max_length`: prompt and answer together."
        yield from _idle(stage.prompt, ("max_prompt_length",), f"{path}.prompt", reason, fix)
    if stage.optimizer.lr_scheduler == "constant":
        reason = "has no effect with lr_scheduler `constant`"
        fix = "Remove it, or choose `linear` or `cosine`."
        yield from _idle(stage.optimizer, ("min_lr_ratio",), f"{path}.optimizer", reason, fix)
    kl = stage.grpo.kl if isinstance(stage, GrpoStage) else None
    if kl is not None and kl.control == "fixed":
        reason, fix = "has no effect with control `fixed`", "Remove it, or use `control: adaptive`."
        yield from _idle(kl, ("target", "horizon"), f"{path}.grpo.kl", reason, fix)


def unread_by_source(holder: BaseModel, source: str | None, path: str) -> Iterator[Problem]:
    """`revision` and `hub_token_secret` beside a ``source`` that is no hub id."""
    if source is None or source.startswith(("s3://", "run:")):
        reason, fix = "has an effect only with a hub id as `source`", "Remove it."
        known = type(holder).model_fields
        fields = tuple(name for name in ("revision", "hub_token_secret") if name in known)
        yield from _idle(holder, fields, path, reason, fix)


def best_metric_problems(metric: str, stages: tuple[AnyStage, ...], path: str) -> Iterator[Problem]:
    """A ``metric`` of `keep_best` that no stage computes: no checkpoint would be the best."""
    found = dict.fromkeys(name for stage in stages for name in _metrics(stage))
    if metric not in found:
        guess = nearest(metric, tuple(found))
        fix = f"Did you mean `{guess}`?" if guess else f"Computed are {', '.join(found)}."
        yield Problem(path, metric, "is computed by no stage of this run", fix)


def _metrics(stage: AnyStage) -> Iterator[str]:
    sources = [source.name for source in stage.rewards] if isinstance(stage, GrpoStage) else []
    for name in step_metrics(stage.method, sources):
        if stage.data.validation is not None or not name.startswith("validation/"):
            yield name


def _idle(
    holder: BaseModel, fields: tuple[str, ...], path: str, reason: str, fix: str
) -> Iterator[Problem]:
    for field in fields:
        value = getattr(holder, field)
        if value != type(holder).model_fields[field].default:
            yield Problem(f"{path}.{field}", value, reason, fix)
