"""What a single field cannot know: references, divisibility, budgets, names that must be unique."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from contracts.built_in_rewards import checked_parameters
from contracts.compute import ENGINE_CHARACTERS
from contracts.idle_settings import best_metric_problems, idle_in_stage, unread_by_source
from contracts.problems import InvalidInputError, Problem, nearest
from contracts.rewards import RewardSpec
from contracts.stages import (
    ADVANTAGE_SCALES,
    LOSS_FIELDS,
    AnyStage,
    GrpoSettings,
    GrpoStage,
    SftStage,
)

if TYPE_CHECKING:
    from contracts.run_spec import RunSpec

__all__ = ["cross_field_problems", "reward_problems", "template_variables"]

_TAG = re.compile(r"[\w\s.:/=+\-@]*")
_TEMPLATE_NAME = re.compile(r"\{\{-?\s*([A-Za-z_][A-Za-z0-9_]*)")


def cross_field_problems(spec: RunSpec, *, known_instances: Sequence[str]) -> Iterator[Problem]:
    """Every cross-field problem of a run file whose fields are valid one by one."""
    yield from _compute(spec, known_instances)
    names: list[str] = []
    for index, stage in enumerate(spec.stages):
        path = f"stages[{index}]"
        if stage.name in names:
            yield Problem(
                f"{path}.name", stage.name, "is used twice", "Give each stage its own name."
            )
        yield from _start_from(stage, path, spec.stages[:index])
        yield from _data(stage, path)
        yield from idle_in_stage(stage, path)
        if isinstance(stage, GrpoStage):
            yield from reward_problems(stage.rewards, f"{path}.rewards")
            yield from _grpo(stage, path)
        names.append(stage.name)
    yield from unread_by_source(spec.model, spec.model.source, "model")
    best = spec.checkpoint.keep_best
    if best is not None:
        yield from best_metric_problems(best.metric, spec.stages, "checkpoint.keep_best.metric")
    yield from _tags(spec)
    yield from _deploy(spec, known_instances)


def template_variables(template: str) -> set[str]:
    """Names a Jinja2 template prints directly; enough to catch a column that does not exist."""
    return set(_TEMPLATE_NAME.findall(template))


def _compute(spec: RunSpec, known: Sequence[str]) -> Iterator[Problem]:
    compute = spec.compute
    for index, rung in enumerate(compute.ladder):
        yield from _instance(rung.instance_type, f"compute.ladder[{index}].instance_type", known)
    spot = any(rung.spot for rung in compute.ladder)
    if compute.max_wait_hours is not None and not spot:
        # SageMaker refuses MaxWaitTimeInSeconds on a job that is not managed Spot.
        yield Problem(
            "compute.max_wait_hours",
            compute.max_wait_hours,
            "has an effect only with a Spot rung",
            "Remove it, or set `spot: true` on a rung.",
        )
    if compute.max_wait_hours is not None and compute.max_wait_hours < compute.max_runtime_hours:
        yield Problem(
            "compute.max_wait_hours",
            compute.max_wait_hours,
            f"is below max_runtime_hours ({compute.max_runtime_hours})",
            "Waiting includes running: set it to at least max_runtime_hours.",
        )
    if spec.checkpoint.every_minutes >= compute.max_runtime_hours * 60:
        yield Problem(
            "checkpoint.every_minutes",
            spec.checkpoint.every_minutes,
            "no checkpoint would be saved within max_runtime_hours",
            "Save more often, or allow more time.",
        )


def _instance(name: str, path: str, known: Sequence[str]) -> Iterator[Problem]:
    if name not in known:
        guess = nearest(name, known)
        fix = (
            f"Did you mean `{guess}`?" if guess else "Use a SageMaker type such as ml.g6e.48xlarge."
        )
        yield Problem(path, name, "is not an instance type this hub knows", fix)


def _start_from(stage: AnyStage, path: str, earlier: Sequence[AnyStage]) -> Iterator[Problem]:
    start = stage.start_from
    if start is None:
        return
    names = [other.name for other in earlier]
    if start.stage not in names:
        guess = nearest(start.stage, names)
        listed = f"Earlier stages: {', '.join(names)}." if names else "This is the first stage."
        yield Problem(
            f"{path}.start_from.stage",
            start.stage,
            "is not an earlier stage",
            f"Did you mean `{guess}`?" if guess else listed,
        )
        return
    source = earlier[names.index(start.stage)]
    if start.step is not None and source.lora is not None:
        yield Problem(
            f"{path}.start_from.step",
            start.step,
            f"stage `{start.stage}` trains an adapter, whose checkpoints hold no whole weights",
            "Remove `step`: the stage then starts from the merged model.",
        )
    if start.step is not None and source.max_steps is not None and start.step > source.max_steps:
        yield Problem(
            f"{path}.start_from.step",
            start.step,
            f"stage `{start.stage}` ends at step {source.max_steps}",
            f"Name a step from 1 to {source.max_steps}.",
        )


def _data(stage: AnyStage, path: str) -> Iterator[Problem]:
    data = stage.data
    fields = ("problem", "answer", "messages", "images")
    columns = [getattr(data, field) for field in fields if getattr(data, field) is not None]
    for column in sorted({name for name in columns if columns.count(name) > 1}):
        yield Problem(
            f"{path}.data",
            column,
            "one column is named for two purposes",
            "Give each of problem, answer, messages and images its own column.",
        )
    if isinstance(stage, SftStage) and data.messages is None and data.answer is None:
        yield Problem(
            f"{path}.data.answer",
            None,
            "SFT has nothing to train on",
            "Name the `answer` column, or `messages`.",
        )
    if data.images is not None:
        yield Problem(
            f"{path}.data.images",
            data.images,
            "this hub trains models of text",
            "Remove it, and use rows without images.",
        )
    if data.messages is not None and (stage.prompt.template or stage.prompt.template_file):
        yield Problem(
            f"{path}.prompt",
            stage.prompt.template or stage.prompt.template_file,
            "a template has no effect on a `messages` column",
            "Remove the template, or name `problem` instead of `messages`.",
        )
    if stage.prompt.template is not None and not template_variables(stage.prompt.template):
        yield Problem(
            f"{path}.prompt.template",
            stage.prompt.template,
            "prints no variable, so every prompt would be the same",
            "Use {{ content }} or a column name.",
        )


def reward_problems(sources: Sequence[RewardSpec], path: str) -> Iterator[Problem]:
    """Problems of a stage's reward sources as a whole; ``path`` is where they stand."""
    names = [source.name for source in sources]
    for index, source in enumerate(sources):
        where = f"{path}[{index}]"
        if source.name in names[:index]:
            yield Problem(
                f"{where}.name",
                source.name,
                "is used twice",
                "Give each reward source its own name.",
            )
        if source.function is not None and source.file is None:
            yield from _built_in(source.function, source.parameters, where)
        if source.model is not None:
            yield from unread_by_source(source.model, source.model.source, f"{where}.model")
        if source.judge is not None:
            yield from unread_by_source(source.judge, source.judge.source, f"{where}.judge")
        other = source.judge.combine_with if source.judge else None
        if other is not None and (other not in names or other == source.name):
            yield Problem(
                f"{where}.judge.combine_with",
                other,
                "is not another source of this stage",
                f"Name one of {', '.join(name for name in names if name != source.name)}.",
            )
    if all(source.weight == 0 for source in sources):
        yield Problem(
            path,
            0,
            "every weight is 0, so nothing is rewarded",
            "Give at least one source a weight other than 0.",
        )


def _built_in(function: str, parameters: Mapping[str, Any], where: str) -> Iterator[Problem]:
    try:
        checked_parameters(function, parameters)
    except InvalidInputError as error:
        for problem in error.problems:
            yield replace(problem, path=f"{where}.{problem.path}")


def _grpo(stage: GrpoStage, path: str) -> Iterator[Problem]:
    grpo, rollout = stage.grpo, stage.rollout
    where = f"{path}.grpo"
    mini = grpo.mini_batch_prompts
    if mini is not None and grpo.prompts_per_step % mini:
        yield Problem(
            f"{where}.mini_batch_prompts",
            mini,
            f"does not divide prompts_per_step ({grpo.prompts_per_step})",
            "Choose a divisor.",
        )
    scales = ADVANTAGE_SCALES[grpo.advantage]
    if grpo.scale_rewards not in scales:
        yield Problem(
            f"{where}.scale_rewards",
            grpo.scale_rewards,
            f"advantage `{grpo.advantage}` is not defined with it",
            f"Remove it, or use {' or '.join(f'`{scale}`' for scale in scales)}.",
        )
    yield from _loss(grpo, where)
    if grpo.advantage == "gdpo" and len(stage.rewards) < 2:
        yield Problem(
            f"{where}.advantage",
            "gdpo",
            "needs at least two reward sources",
            "Use `grpo`, or add a source.",
        )
    if grpo.reward_fusion == "normalize_then_sum" and grpo.advantage not in ("grpo", "gdpo"):
        yield Problem(
            f"{where}.reward_fusion",
            grpo.reward_fusion,
            f"has no effect with advantage `{grpo.advantage}`",
            "Remove it.",
        )
    if grpo.overlong is not None and grpo.overlong.buffer >= rollout.max_response_length:
        yield Problem(
            f"{where}.overlong.buffer",
            grpo.overlong.buffer,
            f"is not below max_response_length ({rollout.max_response_length})",
            "Make the buffer shorter than an answer may be.",
        )
    if stage.micro_batch_tokens < stage.prompt.max_prompt_length + rollout.max_response_length:
        yield Problem(
            f"{path}.micro_batch_tokens",
            stage.micro_batch_tokens,
            "is below max_prompt_length + max_response_length "
            f"({stage.prompt.max_prompt_length + rollout.max_response_length})",
            "Raise it, or shorten prompts or answers: one sequence must fit.",
        )


def _loss(grpo: GrpoSettings, where: str) -> Iterator[Problem]:
    if grpo.kl is not None and (grpo.kl.estimator, grpo.kl.placement) == ("k1", "loss"):
        yield Problem(
            f"{where}.kl.estimator",
            "k1",
            "as a term of the loss its gradient is zero on average: nothing would hold the policy",
            "Use `k3` (or `k2`), or keep `k1` with `placement: reward`.",
        )
    unset = GrpoSettings(loss=grpo.loss)
    for field in dict.fromkeys(chain.from_iterable(LOSS_FIELDS.values())):
        value = getattr(grpo, field)
        if field not in LOSS_FIELDS[grpo.loss] and value != getattr(unset, field):
            readers = [loss for loss, fields in LOSS_FIELDS.items() if field in fields]
            listed = " and ".join(f"`{reader}`" for reader in readers)
            yield Problem(
                f"{where}.{field}", value, f"has no effect with loss `{grpo.loss}`",
                f"Remove it; it goes with {listed}.",
            )  # fmt: skip


def _tags(spec: RunSpec) -> Iterator[Problem]:
    for key, value in spec.tags.items():
        if key.lower().startswith(("aws:", "grpohub:")):
            yield Problem(f"tags.{key}", value, "the prefix is reserved", "Use another key.")
        elif not 1 <= len(key) <= 128 or len(value) > 256:
            yield Problem(
                f"tags.{key}",
                value,
                "AWS allows keys to 128 and values to 256 characters",
                "Shorten it.",
            )
        elif not _TAG.fullmatch(key + value):
            yield Problem(
                f"tags.{key}",
                value,
                "holds a character that AWS refuses",
                "Use letters, digits, spaces and _ . : / = + - @ only.",
            )


def _deploy(spec: RunSpec, known: Sequence[str]) -> Iterator[Problem]:
    deploy = spec.deploy
    if deploy is None:
        return
    yield from _instance(deploy.instance_type, "deploy.instance_type", known)
    for index, name in enumerate(deploy.fallback_instance_types):
        yield from _instance(name, f"deploy.fallback_instance_types[{index}]", known)
    scaling = deploy.autoscaling
    if scaling is not None and scaling.max_instances < max(1, scaling.min_instances):
        yield Problem(
            "deploy.autoscaling.max_instances",
            scaling.max_instances,
            f"is below min_instances ({scaling.min_instances})",
            "Raise it.",
        )
    if scaling is not None and deploy.instance_count > scaling.max_instances:
        yield Problem(
            "deploy.instance_count",
            deploy.instance_count,
            f"is above autoscaling.max_instances ({scaling.max_instances})",
            "Lower it, or raise max_instances.",
        )
    if spec.model.trust_remote_code and not deploy.engine.trust_remote_code:
        yield Problem(
            "deploy.engine.trust_remote_code",
            False,
            "the model has code of its own (`model.trust_remote_code`), which the endpoint must "
            "run as well",
            "Set it to true, or leave `deploy` out.",
        )
    engine = deploy.engine.compact_json()
    if len(engine) > ENGINE_CHARACTERS:
        yield Problem(
            "deploy.engine",
            engine,
            f"has {len(engine)} characters as JSON; an environment variable of a SageMaker model "
            f"holds {ENGINE_CHARACTERS}",
            "Name fewer adapters, or shorter prefixes.",
        )
    names = [adapter.name for adapter in deploy.engine.lora_adapters]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(
            "deploy.engine.lora_adapters",
            name,
            "adapter name is used twice",
            "Give each adapter its own name.",
        )
