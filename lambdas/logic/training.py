"""The training half of a run but SubmitAttempt, one function per task of the state machine. Every
one may run twice."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from contracts.attempt import CheckpointRef, WeightsFrom
from contracts.checkpoints import CheckpointReport
from contracts.layout import StageLayout, job_name
from contracts.memory import ModelShape, estimate
from contracts.model_manifest import ModelManifest
from contracts.run_spec import RunSpec
from contracts.states import AttemptState, Outcome, RunState, StageState
from lambdas.errors import (
    AttemptStillRunningError,
    InputMissingError,
    ObjectMissingError,
    TransientError,
)
from lambdas.logic.attempts import observe
from lambdas.logic.folder import RunFolder
from lambdas.logic.notes import note, note_attempt
from lambdas.logic.plan import GiveUp, Plan, plan_attempt
from lambdas.logic.records import AttemptRecord, RunRecord, StageRecord
from lambdas.logic.specs import load_folder, load_spec
from lambdas.logic.training_job import source_stage_index
from lambdas.observability import bind, count, logger

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["finish_stage", "next_after_stages", "plan_next", "prepare_run", "read_manifest"]

MODEL_CONFIG = "config.json"
MODEL_CONFIG_BYTES = 1024 * 1024


def prepare_run(hub: Hub, run_id: str, execution_arn: str) -> dict[str, Any]:
    """Check every input before anything is paid for, and say where the run begins.

    Instances that look too small for the model are told in the timeline; that is an estimate, so
    the run goes on.

    Raises:
        InputMissingError: naming each input that is not there.
    """
    bind(run_id)
    folder = load_folder(hub, run_id)
    if folder.over:
        return {"next": "stop"}
    where = next_after_stages(folder)
    if where == "train":
        spec = load_spec(hub, folder.run)
        sizes = _measure_inputs(hub, folder.run, spec)
        hub.table.update_run(
            folder.run,
            RunState.TRAINING,
            inputs_bytes={uri: sum(files.values()) for uri, files in sizes.items()},
            budget_since=folder.run.budget_since or _now(),
            execution_arn=execution_arn,
        )
        if folder.run.model_uri is not None:
            _doubt_memory(hub, folder.run, spec, sizes[folder.run.model_uri])
    note(hub, run_id, "run.started", f"started by {folder.run.source}", time=_now())
    return {"next": where}


def plan_next(hub: Hub, run_id: str) -> dict[str, Any]:  # noqa: PLR0911 (one return per answer)
    """Plan the next attempt, write its row, and say whether to submit, pause first, or give up.

    Raises:
        AttemptStillRunningError: the attempt before has not ended.
    """
    folder = load_folder(hub, run_id)
    stage = folder.current_stage
    bind(run_id, stage.name if stage else None)
    if folder.over or stage is None:
        return {"next": "stop"}
    attempts = folder.attempts_of(stage.index)
    if attempts and attempts[-1].state is AttemptState.PLANNED:
        return _answer(hub, attempts[-1])  # Planned by an invocation that did not live to say so.
    if attempts and attempts[-1].state is not AttemptState.ENDED:
        seen = observe(hub, run_id, stage.index, attempts[-1].number)
        if seen is None or seen.state is not AttemptState.ENDED:
            raise AttemptStillRunningError(f"{attempts[-1].job_name} has not ended")
        return plan_next(hub, run_id)
    spec = load_spec(hub, folder.run)
    newest = _newest_checkpoint(hub, stage, bool(attempts))
    if isinstance(newest, GiveUp):
        return _give_up(hub, folder.run, newest)
    if stage.state is not StageState.RUNNING:
        start = _begin_stage(hub, folder, stage, spec)
        if isinstance(start, GiveUp):
            return _give_up(hub, folder.run, start)
    now = _now()
    plan = plan_attempt(
        spec,
        attempts,
        budget_from=stage.budget_from,
        newest=newest,
        spent_seconds=folder.spent_seconds,
        budget_since=folder.run.budget_since or now,
        now=now,
    )
    if isinstance(plan, GiveUp):
        return _give_up(hub, folder.run, plan)
    return _write_plan(hub, folder.run, stage, spec=spec, plan=plan, now=now)


def finish_stage(hub: Hub, run_id: str) -> dict[str, Any]:
    """Verify the exported model against its manifest; only then has the stage succeeded."""
    folder = load_folder(hub, run_id)
    stage = folder.current_stage
    attempts = folder.attempts_of(stage.index) if stage else ()
    if stage is None or not attempts or attempts[-1].outcome is not Outcome.COMPLETED:
        return {"next": next_after_stages(folder)}  # Done by an invocation before this one.
    attempt = attempts[-1]
    bind(run_id, stage.name, attempt.number)
    try:
        manifest = read_manifest(hub, stage.layout)
    except (ObjectMissingError, ValueError) as error:
        # The job says Completed, but there is no whole model: an attempt without a result has
        # failed.
        reason = f"the exported model is not whole: {error}"
        logger.error(reason)
        hub.table.update_attempt(attempt, outcome=Outcome.INFRASTRUCTURE_FAILURE, reason=reason)
        note_attempt(hub, attempt, "stage.export_missing", reason, time=_now())
        return {"next": "train"}
    hub.table.update_stage(stage, StageState.SUCCEEDED, newest_step=manifest.step)
    text = f"stage {stage.name} succeeded at step {manifest.step}"
    time = attempt.ended_at or _now()
    note(hub, run_id, "stage.succeeded", text, time=time, stage_index=stage.index)
    return {"next": next_after_stages(load_folder(hub, run_id))}


def next_after_stages(folder: RunFolder) -> str:
    """`train` while a stage has not succeeded, else `publish`."""
    return "publish" if folder.current_stage is None else "train"


def read_manifest(hub: Hub, layout: StageLayout) -> ModelManifest:
    """A stage's model.json, after checking that every file it lists is there with its size.

    Raises:
        ObjectMissingError: there is no model.json.
        ValueError: it cannot be read, or a file is missing or has another size.
    """
    body = hub.bucket.read(layout.model_manifest)
    try:
        manifest = ModelManifest.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(f"model.json: {error.errors()[0]['msg']}") from error
    there = hub.bucket.list_sizes(layout.model_prefix)
    for file in manifest.files:
        size = there.get(f"{layout.model_prefix}{file.path}")
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes, not {file.size}"
            raise ValueError(f"{file.path} {found}")
    return manifest


# -- planning -------------------------------------------------------------------------------------


def _measure_inputs(hub: Hub, run: RunRecord, spec: RunSpec) -> dict[str, dict[str, int]]:
    """Bytes of each input, object by object."""
    uris = [run.model_uri] if run.model_uri else []
    for stage in spec.stages:
        uris += [stage.data.train, *([stage.data.validation] if stage.data.validation else [])]
    sizes: dict[str, dict[str, int]] = {}
    missing: list[str] = []
    for uri in dict.fromkeys(uris):
        try:
            sizes[uri] = hub.bucket.input_sizes(uri)
        except InputMissingError as error:
            missing.append(str(error))
    if run.model_uri in sizes and MODEL_CONFIG not in sizes[run.model_uri]:
        missing.append(f"{run.model_uri}: no {MODEL_CONFIG}, so no Hugging Face model folder")
    if missing:
        raise InputMissingError("; ".join(missing))
    return sizes


def _doubt_memory(hub: Hub, run: RunRecord, spec: RunSpec, model: dict[str, int]) -> None:
    """Tell which instances look too small, as far as the model's folder says how large it is.

    Raises:
        InputMissingError: the model's configuration is no JSON object.
    """
    uri = f"{run.model_uri}{MODEL_CONFIG}"
    try:
        config = json.loads(hub.bucket.first_bytes(uri, MODEL_CONFIG_BYTES))
    except ValueError as error:
        raise InputMissingError(f"{uri}: {error}") from error
    if not isinstance(config, dict):
        raise InputMissingError(f"{uri}: is no JSON object")
    shape = ModelShape.of(config, model)
    if shape is None:
        return
    for index, stage in enumerate(spec.stages):
        for place, rung in enumerate(spec.compute.ladder):
            shortage = estimate(shape, stage, rung).shortage
            if shortage is not None:
                text = f"{rung.instance_type} may be too small for {stage.name}: {shortage}"
                key = f"{index}-{place}"
                time = _now()
                note(hub, run.run_id, "memory.doubt", text, time=time, key=key, stage_index=index)


def _newest_checkpoint(hub: Hub, stage: StageRecord, begun: bool) -> CheckpointRef | GiveUp | None:
    """The resume floor: one LIST and the flags of the newest candidates. A first attempt has
    none."""
    if not begun:
        return None
    report = hub.bucket.newest_checkpoint(stage.layout)
    found = -1 if report is None else report.id.step
    if stage.newest_step is not None and found < stage.newest_step:
        return GiveUp(
            "CheckpointLost",
            f"step {stage.newest_step} of stage {stage.name} was complete and is not any more; "
            f"newest complete now: {found if report else 'none'}",
        )
    return None if report is None else _reference(report)


def _begin_stage(hub: Hub, folder: RunFolder, stage: StageRecord, spec: RunSpec) -> GiveUp | None:
    """Mark the stage RUNNING; find the named checkpoint it starts from, once for all its
    attempts."""
    start = spec.stages[stage.index].start_from
    weights = stage.weights_from
    if weights is None and start is not None and start.step is not None:
        index = source_stage_index(spec, stage.index)
        assert index is not None
        source = folder.stages[index]
        reports = hub.bucket.checkpoints(source.layout)
        named = [r for r in reports if r.complete and r.id.step == start.step]
        if not named:
            steps = sorted({r.id.step for r in reports if r.complete})
            return GiveUp(
                "NamedCheckpointMissing",
                f"stage {source.name} has no complete checkpoint at step {start.step}; "
                f"it has {steps}",
            )
        weights = WeightsFrom(stage_index=index, stage=source.name, checkpoint=_reference(named[0]))
    hub.table.update_stage(stage, StageState.RUNNING, weights_from=weights)
    return None


def _write_plan(
    hub: Hub, run: RunRecord, stage: StageRecord, *, spec: RunSpec, plan: Plan, now: dt.datetime
) -> dict[str, Any]:
    rung = spec.compute.ladder[plan.rung]
    attempt = AttemptRecord(
        run_id=run.run_id,
        stage_index=stage.index,
        stage=stage.name,
        number=plan.number,
        job_name=job_name(run.run_id, stage.index, plan.number),
        state=AttemptState.PLANNED,
        planned_at=now,
        rung=plan.rung,
        instance_type=rung.instance_type,
        instance_count=rung.count,
        spot=rung.spot,
        max_runtime_seconds=plan.max_runtime_seconds,
        max_wait_seconds=plan.max_wait_seconds,
        pause_seconds=plan.pause_seconds,
        resume_floor=plan.resume_floor,
    )
    # The attempt's row comes last: whatever was written before it is written again by a repetition.
    hub.table.update_run(run, plan.state, reason=plan.reason)
    if plan.resume_floor is not None and plan.resume_floor.step != stage.newest_step:
        hub.table.update_stage(
            stage,
            newest_step=plan.resume_floor.step,
            newest_generation=plan.resume_floor.generation,
        )
    if not hub.table.put_attempt(attempt, stage):
        raise TransientError("the run changed while its attempt was planned")
    if plan.number > 1:
        count("Resubmissions")
    return _answer(hub, attempt)


def _answer(hub: Hub, attempt: AttemptRecord) -> dict[str, Any]:
    kind = "Spot" if attempt.spot else "on demand"
    place = f"{attempt.instance_count} x {attempt.instance_type}, {kind}"
    floor = f", from step {attempt.resume_floor.step}" if attempt.resume_floor else ""
    note_attempt(hub, attempt, "attempt.planned", f"{place}{floor}", time=attempt.planned_at)
    return {
        "next": "wait" if attempt.pause_seconds else "submit",
        "wait_seconds": attempt.pause_seconds,
        "stage": attempt.stage,
        "attempt": attempt.number,
        "instance_type": attempt.instance_type,
    }


def _give_up(hub: Hub, run: RunRecord, given_up: GiveUp) -> dict[str, Any]:
    hub.table.update_run(run, error=given_up.error, cause=given_up.cause)
    return {"next": "give_up", "error": given_up.error, "cause": given_up.cause}


def _reference(report: CheckpointReport) -> CheckpointRef:
    return CheckpointRef(step=report.id.step, generation=report.id.generation)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
