"""Endpoints: create or update, look at, release, delete. Every function may run twice."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any

from contracts.layout import wake_alarm_name
from contracts.states import EndpointState, is_terminal
from lambdas.errors import (
    ConflictError,
    EndpointBusyError,
    EndpointTakenError,
    NoCapacityError,
    NotFoundError,
    QuotaError,
)
from lambdas.logic.classify import is_capacity_error
from lambdas.logic.deployment import (
    VARIANT,
    Deployment,
    build_alarm_request,
    build_endpoint_request,
    build_update_request,
)
from lambdas.logic.notes import note
from lambdas.logic.records import EndpointRecord
from lambdas.observability import count, logger

if TYPE_CHECKING:
    from lambdas.adapters.hosting import EndpointObservation
    from lambdas.hub import Hub

__all__ = ["await_endpoint", "create_or_update", "delete_endpoint", "finish_deployment",
           "observe_endpoint", "release_endpoint", "retry_deletion"]  # fmt: skip

_BUSY = {"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"}
_DEAD = {"Failed", "UpdateRollbackFailed", "OutOfService"}
"""On these DeleteEndpoint is the only operation that AWS allows."""
_STATES = {
    "Creating": EndpointState.CREATING,
    "Updating": EndpointState.UPDATING,
    "RollingBack": EndpointState.ROLLING_BACK,
    "InService": EndpointState.IN_SERVICE,
    "Deleting": EndpointState.DELETING,
    "Failed": EndpointState.FAILED,
    "UpdateRollbackFailed": EndpointState.FAILED,
    "OutOfService": EndpointState.FAILED,
}


def create_or_update(hub: Hub, deployment: Deployment, rung: int) -> dict[str, Any]:
    """Begin to put a deployment behind its endpoint. The row comes first and owns the endpoint
    meanwhile.

    Raises:
        EndpointBusyError: it is changing, or was just deleted; the state machine tries again.
        EndpointTakenError: an endpoint of that name is not this stack's.
    """
    name = deployment.endpoint
    seen = hub.hosting.describe(name)
    row = hub.table.get_endpoint(name)
    if seen is not None and not _is_ours(hub, seen, deployment):
        raise EndpointTakenError(f"endpoint {name} exists and is not of stack "
                                 f"{deployment.settings.stack}")  # fmt: skip
    if seen is not None and seen.config == deployment.config_name and seen.status not in _DEAD:
        _claim(hub, deployment, row, seen, rung)
        return {"endpoint": name, "did": "adopted"}
    if seen is not None and seen.status in _DEAD:
        hub.hosting.delete_endpoint(name)
        seen = hub.hosting.describe(name)
    if seen is not None and seen.status != "InService":
        raise EndpointBusyError(f"endpoint {name} is {seen.status}")
    if not hub.hosting.config_exists(deployment.config_name):
        raise EndpointBusyError(f"configuration {deployment.config_name} is not visible yet")
    claimed = _claim(hub, deployment, row, seen, rung)
    if deployment.alarm is not None:
        hub.alarms.put(build_alarm_request(deployment))
    try:
        if seen is None:
            hub.hosting.create_endpoint(build_endpoint_request(deployment))
        else:
            hub.hosting.update_endpoint(build_update_request(deployment))
    except (NoCapacityError, QuotaError) as error:
        # In SageMaker's own word, by which `is_capacity_error` knows it again.
        hub.table.update_endpoint(claimed, EndpointState.FAILED, reason=f"CapacityError: {error}")
        logger.warning("no capacity for the endpoint", extra={"cause": str(error)})
    did = "created" if seen is None else "updated"
    text = f"endpoint {name} {did} on {deployment.instance_type}"
    note(hub, deployment.run_id, "endpoint.deploying", text, time=_now())
    return {"endpoint": name, "did": did}


def await_endpoint(hub: Hub, name: str, token: str) -> None:
    """Keep the token, and answer at once if there is nothing to wait for."""
    row = hub.table.get_endpoint(name)
    if row is None:
        raise NotFoundError(f"no endpoint {name}")
    hub.table.update_endpoint(row, token=token)
    observe_endpoint(hub, name)


def observe_endpoint(  # noqa: PLR0911 (one return per thing seen)
    hub: Hub, name: str
) -> EndpointRecord | None:
    """Ask SageMaker about an endpoint, write what changed and answer a waiting task."""
    row = hub.table.get_endpoint(name)
    if row is None or row.state is EndpointState.DELETED:
        if row is not None and row.token is not None:  # AwaitEndpoint, redriven after a cancel.
            _settle(hub, row, "the endpoint was deleted")
        return row
    if row.state is EndpointState.FAILED and row.owned and row.token is not None:
        # It failed before anybody waited for it: AWS refused the request, or an event was quicker.
        _settle(hub, row, row.reason or "failed")
        return row
    seen = hub.hosting.describe(name)
    if seen is None:
        changing = row.state in (EndpointState.CREATING, EndpointState.UPDATING)
        refused = row.state is EndpointState.FAILED and row.owned
        if refused or (changing and _young(row)):
            return row  # AWS would not make it, or it is not visible yet.
        # Deleted by hand, it has left alarm, scaling, configuration and model. The reconciler
        # deletes them, and then says DELETED: this runs where nothing may be deleted.
        hub.table.update_endpoint(row, EndpointState.DELETING, owned=False)
        if row.token is not None:
            _settle(hub, row, "the endpoint was deleted")
        return dataclasses.replace(row, state=EndpointState.DELETING)
    state = _STATES.get(seen.status)
    if state is None:
        if seen.status != "SystemUpdating":
            logger.error("unknown endpoint status", extra={"status": seen.status})
            count("AttemptsNeedingAttention")
        return row
    if state is EndpointState.IN_SERVICE and seen.config != row.config_name:
        return _other_config(hub, row, seen)
    if state is not row.state or seen.failure_reason is not None:
        hub.table.update_endpoint(row, state, reason=seen.failure_reason)
    if row.token is not None and state is EndpointState.IN_SERVICE:
        hub.executions.settle(row.token, {"outcome": "in_service", "endpoint": name})
        hub.table.update_endpoint(row, token=None)
    elif row.token is not None and state is EndpointState.FAILED:
        _settle(hub, row, seen.failure_reason or seen.status)
    return dataclasses.replace(row, state=state, reason=seen.failure_reason)


def finish_deployment(hub: Hub, name: str) -> None:
    """The endpoint is announced: it is no longer half made. What it replaced goes; an inference
    component that is being changed goes by a later call."""
    row = hub.table.get_endpoint(name)
    if row is None:
        return
    hub.table.update_endpoint(row, owned=False, previous_config=None, previous_model=None)
    for delete, resource in (
        (hub.hosting.delete_config, row.previous_config),
        (hub.hosting.delete_model, row.previous_model),
    ):
        if resource is not None and resource not in (row.config_name, row.model_name):
            delete(resource)
    if row.previous_component is not None and _delete_component(hub, row.previous_component):
        hub.table.update_endpoint(row, previous_component=None)


def release_endpoint(hub: Hub, run_id: str, reason: str) -> str | None:
    """Undo a half-made deployment of a run: go back to what served before, or delete.

    Returns the first words of a container that did not come up, for the run's failure text.
    """
    run = hub.table.get_run(run_id)
    row = hub.table.get_endpoint(run.endpoint_name) if run and run.endpoint_name else None
    if row is None or not row.owned or row.run_id != run_id:
        return None
    words = None
    if row.state is not EndpointState.IN_SERVICE:
        lines = hub.telemetry.endpoint_lines(row.name)
        words = "\n".join(line.message for line in lines)[:1500] or None
    logger.info("releasing endpoint", extra={"endpoint": row.name})
    _undo(hub, row, reason)
    return words


def retry_deletion(hub: Hub, row: EndpointRecord) -> None:
    """What the reconciler does about an endpoint that should be gone but could not be deleted
    before."""
    _undo(hub, row, row.reason or "the run is over")


def delete_endpoint(hub: Hub, row: EndpointRecord) -> tuple[list[str], list[str]]:
    """Delete inference components, endpoint, configuration and model. Returns (deleted, remaining).

    An endpoint that is being created cannot be deleted; the reconciler tries again while it is
    DELETING.

    Raises:
        ConflictError: it was deployed anew since ``row`` was read.
    """
    if not hub.table.update_endpoint(
        row, EndpointState.DELETING, owned=False, previous_config=None
    ):
        raise ConflictError(f"endpoint {row.name} was deployed anew meanwhile")
    deleted: list[str] = []
    remaining: list[str] = []
    if row.scaled and row.inference_component is None:
        hub.hosting.unscale(
            f"endpoint/{row.name}/variant/{VARIANT}", "sagemaker:variant:DesiredInstanceCount"
        )
    if row.alarm is not None:
        hub.alarms.delete(row.alarm)
    # DeleteEndpoint leaves components where they are.
    steps = [
        (f"inference component {name}", _delete_component(hub, name)) for name in row.components
    ]
    if all(gone for _, gone in steps):
        accepted = hub.hosting.delete_endpoint(row.name)
        steps.append((f"endpoint {row.name}", accepted))
    else:
        steps.append((f"endpoint {row.name}", False))
    if steps[-1][1]:
        steps.append(
            (f"configuration {row.config_name}", hub.hosting.delete_config(row.config_name))
        )
        steps.append((f"model {row.model_name}", hub.hosting.delete_model(row.model_name)))
    else:
        steps += [(f"configuration {row.config_name}", False), (f"model {row.model_name}", False)]
    for what, gone in steps:
        (deleted if gone else remaining).append(what)
    if not remaining and hub.hosting.describe(row.name) is None:
        hub.table.update_endpoint(row, EndpointState.DELETED)
    return deleted, remaining


# -- private --------------------------------------------------------------------------------------


def _delete_component(hub: Hub, name: str) -> bool:
    """Delete an inference component and what scales it. False: it is there still."""
    hub.hosting.unscale(
        f"inference-component/{name}", "sagemaker:inference-component:DesiredCopyCount"
    )
    hub.alarms.delete(wake_alarm_name(name))
    return hub.hosting.delete_component(name) and hub.hosting.component_status(name) is None


def _claim(
    hub: Hub,
    deployment: Deployment,
    row: EndpointRecord | None,
    seen: EndpointObservation | None,
    rung: int,
) -> EndpointRecord:
    """Write the endpoint's row for this deployment, or find it written by an invocation before
    this one."""
    now = _now()
    mine = row is not None and row.owned and row.run_id == deployment.run_id
    failed = row is not None and row.state is EndpointState.FAILED
    if mine and row is not None and row.config_name == deployment.config_name and not failed:
        return row
    there = row if row is not None and row.state is not EndpointState.DELETED else None
    if there is not None and there.previous_component is not None and not there.owned:
        raise EndpointBusyError(f"inference component {there.previous_component} is being deleted")
    adopted = seen is not None and seen.config == deployment.config_name
    previous = seen.config if seen is not None and not adopted else None
    previous_model = row.model_name if row is not None and previous is not None else None
    previous_component = there.inference_component if there is not None else None
    if (
        mine and row is not None
    ):  # A further rung of the same deployment: what served before stays it.
        previous = previous and row.previous_config
        previous_model = row.previous_model
        previous_component = row.previous_component
    if previous_component == deployment.component:
        previous_component = None
    claimed = EndpointRecord(
        name=deployment.endpoint,
        run_id=deployment.run_id,
        state=EndpointState.UPDATING if previous else EndpointState.CREATING,
        created_at=now if row is None or row.state is EndpointState.DELETED else row.created_at,
        updated_at=now,
        model_version=deployment.model.version,
        model_name=deployment.model_name,
        config_name=deployment.config_name,
        instance_type=deployment.instance_type,
        instance_count=deployment.deploy.instance_count,
        rung=rung,
        previous_config=previous,
        previous_model=previous_model,
        owned=not adopted or mine,
        idle_ttl_hours=deployment.deploy.idle_ttl_hours,
        inference_component=deployment.component,
        previous_component=previous_component,
        scaled=row is not None and row.scaled,
        alarm=deployment.alarm or (row.alarm if row is not None else None),
    )
    if not hub.table.claim_endpoint(claimed):
        raise EndpointBusyError(f"another run is deploying to endpoint {deployment.endpoint}")
    return claimed


def _is_ours(hub: Hub, seen: EndpointObservation, deployment: Deployment) -> bool:
    return hub.hosting.tags(seen.arn).get("grpohub:stack") == deployment.settings.stack


def _other_config(hub: Hub, row: EndpointRecord, seen: EndpointObservation) -> EndpointRecord:
    """In service with another configuration: the update has not begun to show, or was rolled
    back."""
    if not row.owned or seen.modified_at <= row.updated_at:
        return row
    reason = seen.failure_reason or "the update was rolled back to the configuration before it"
    hub.table.update_endpoint(row, EndpointState.FAILED, reason=reason)
    if row.token is not None:
        _settle(hub, row, reason)
    return dataclasses.replace(row, state=EndpointState.FAILED, reason=reason)


def _settle(hub: Hub, row: EndpointRecord, reason: str) -> None:
    """Answer the waiting task: another rung if that may help, else failure."""
    assert row.token is not None
    run = hub.table.get_run(row.run_id)
    assert run is not None
    kept = reason[:1000]
    # CreateEndpointConfig reads the same words, to take the next rung.
    outcome = "out_of_capacity" if is_capacity_error(kept) else "failed"
    message = {"outcome": outcome, "endpoint": row.name, "reason": kept}
    hub.table.update_endpoint(row, reason=kept)
    if outcome == "failed" and not is_terminal(run.state):
        hub.table.update_run(run, error="EndpointFailed", cause=reason[:2000])
    hub.executions.settle(row.token, message)
    hub.table.update_endpoint(row, token=None)


def _undo(hub: Hub, row: EndpointRecord, reason: str) -> None:
    seen = hub.hosting.describe(row.name)
    if row.previous_config is not None and seen is not None and seen.status not in _DEAD:
        made = row.inference_component
        if seen.status in _BUSY or (made is not None and not _delete_component(hub, made)):
            # Nothing can be done until it has come to rest; the row stays owned for the reconciler.
            hub.table.update_endpoint(row, reason=f"reverting: {reason}"[:1000])
            return
        if seen.status == "InService" and seen.config == row.config_name:
            hub.hosting.update_endpoint(
                {"EndpointName": row.name, "EndpointConfigName": row.previous_config}
            )
        restored = dataclasses.replace(
            row,
            config_name=row.previous_config,
            model_name=row.previous_model or row.model_name,
            state=EndpointState.UPDATING,
            previous_config=None,
            previous_model=None,
            inference_component=row.previous_component,
            previous_component=None,
            owned=False,
            token=None,
            reason=f"reverted: {reason}"[:1000],
        )
        hub.table.claim_endpoint(restored)
        return
    delete_endpoint(hub, row)


def _young(row: EndpointRecord) -> bool:
    return _now() - row.updated_at < dt.timedelta(minutes=10)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
