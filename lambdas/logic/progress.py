"""What hosts tell through the bucket, and Spot warnings: none of it moves a run, all of it
helps."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from contracts.checkpoints import CheckpointId
from contracts.control import Control
from contracts.layout import FlagKey, HostKey, RunLayout
from lambdas.errors import ObjectChangedError, ObjectMissingError, TransientError
from lambdas.logic.notes import note
from lambdas.logic.records import InstanceOwner
from lambdas.observability import bind, count, logger

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["on_flag", "on_host_report", "on_spot_warning"]

_INSTANCE_LIFE = dt.timedelta(days=30)
"""No training job lives longer."""


def on_flag(hub: Hub, flag: FlagKey) -> bool:
    """A host has finished its part of a checkpoint. True: the checkpoint is complete, and shown."""
    layout = RunLayout(flag.run_id).stage(flag.stage_index, flag.stage)
    bind(flag.run_id, flag.stage)
    found = hub.bucket.checkpoint(layout, CheckpointId(flag.step, flag.generation))
    folder = hub.table.load(flag.run_id)
    if found is None or not found[0].complete or folder is None:
        return False
    report, time = found
    stage = folder.stages[flag.stage_index]
    number = report.flags[0].attempt
    attempt = folder.attempt(flag.stage_index, number)
    if stage.newest_step is None or flag.step > stage.newest_step:
        hub.table.update_stage(stage, newest_step=flag.step, newest_generation=flag.generation)
    if attempt is not None and (attempt.newest_step is None or attempt.newest_step < flag.step):
        hub.table.update_attempt(attempt, newest_step=flag.step)
    new = note(
        hub,
        flag.run_id,
        "checkpoint.complete",
        f"checkpoint of step {flag.step} is complete",
        time=time,
        key=f"{flag.step}-{flag.generation}",
        stage_index=flag.stage_index,
        attempt=number,
        step=flag.step,
    )
    if new:
        count("CheckpointsComplete")
    return True


def on_host_report(hub: Hub, host: HostKey) -> str | None:
    """A host says which EC2 instance it is. Returns the instance id; None when it could not
    tell."""
    layout = RunLayout(host.run_id).stage(host.stage_index, host.stage)
    bind(host.run_id, host.stage, host.attempt)
    try:
        report = hub.bucket.read_json(layout.host(host.attempt, host.host_rank))
    except ObjectMissingError:
        return None
    instance_id = report.get("instance_id") if isinstance(report, dict) else None
    if not isinstance(instance_id, str):
        return None
    owner = InstanceOwner(host.run_id, host.stage_index, host.stage, host.attempt)
    hub.table.put_instance(instance_id, owner, dt.datetime.now(dt.UTC) + _INSTANCE_LIFE)
    return instance_id


def on_spot_warning(hub: Hub, instance_id: str, time: dt.datetime, text: str) -> bool:
    """EC2 will take an instance: ask its stage for a checkpoint. False: not an instance of ours.

    A head start only: whether the job is interrupted, and what follows, is decided elsewhere.

    Raises:
        TransientError: control.json was being written; EventBridge delivers again.
    """
    owner = hub.table.get_instance(instance_id)
    if owner is None:
        return False
    bind(owner.run_id, owner.stage, owner.attempt)
    layout = RunLayout(owner.run_id).stage(owner.stage_index, owner.stage)
    found = hub.bucket.read_control(layout)
    if found is None or found[0].attempt != owner.attempt:
        logger.info("warning for an attempt that is over", extra={"instance_id": instance_id})
        return False
    control, etag = found
    # One warning, delivered twice, is one request.
    request = f"{instance_id}-{time:%Y%m%dT%H%M%S}"
    if control.checkpoint_request != request:
        asked = Control(attempt=control.attempt, checkpoint_request=request)
        try:
            hub.bucket.write_control(layout, asked, etag)
        except ObjectChangedError as error:
            raise TransientError("control.json changed meanwhile") from error
    count("SpotWarnings")
    note(
        hub,
        owner.run_id,
        "attempt.spot_warning",
        f"{text} for {instance_id}: a checkpoint was asked for",
        time=time,
        key=instance_id,
        stage_index=owner.stage_index,
        attempt=owner.attempt,
    )
    return True
