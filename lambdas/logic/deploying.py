"""The deployment half of a run, one function per task of the state machine. Every one may run
twice."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any

from contracts.api import SmokeTestView
from contracts.layout import join_uri
from contracts.states import EndpointState, RunState
from lambdas.errors import (
    ConflictError,
    EndpointBusyError,
    EndpointFailedError,
    NoCapacityError,
    RequestRefusedError,
    SmokeTestFailedError,
)
from lambdas.logic.classify import is_capacity_error
from lambdas.logic.deployment import (
    VARIANT,
    Deployment,
    build_endpoint_config_request,
    build_inference_component_request,
    build_model_request,
    build_wake_alarm_request,
    plan_deployment,
)
from lambdas.logic.endpoints import create_or_update, finish_deployment
from lambdas.logic.notes import note
from lambdas.logic.prompts import smoke_prompt
from lambdas.logic.records import PublishedModel, RunRecord
from lambdas.logic.specs import deploy_spec, load_folder, load_spec
from lambdas.logic.training import read_manifest
from lambdas.observability import bind, count
from lambdas.settings import HostingSettings

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["create_endpoint_config", "create_model", "finish_run", "publish_model", "smoke_test",
           "start_or_update"]  # fmt: skip

_TEXTS = ("content", "reasoning", "reasoning_content")
"""Where a chat answer has its text: a reasoning parser leaves `content` null while the thought
outlasts `max_tokens`. An older vLLM calls `reasoning` `reasoning_content`."""


def publish_model(hub: Hub, run_id: str) -> dict[str, Any]:
    """Make the last stage's verified model the run's, and say whether it is to be deployed."""
    folder = load_folder(hub, run_id)
    bind(run_id)
    if folder.over:
        return {"next": "stop"}
    stage = folder.stages[-1]
    manifest = read_manifest(hub, stage.layout)
    published = PublishedModel(
        uri=join_uri(hub.bucket.name, stage.layout.model_prefix),
        version=manifest.version,
        stage=stage.name,
        step=manifest.step,
        size=manifest.size,
    )
    spec = load_spec(hub, folder.run)
    deploy = deploy_spec(folder.run, spec)
    if deploy is None:
        hub.table.update_run(folder.run, published=published)
    else:
        name = deploy.endpoint_name or spec.name
        if not hub.table.update_run(
            folder.run, RunState.DEPLOYING, published=published, endpoint_name=name
        ):
            return {"next": "stop"}
    first = folder.run.published is None
    if first:
        count("ModelsPublished")
        text = f"{published.uri} (version {published.version[:8]}, step {published.step})"
        note(hub, run_id, "model.published", text, time=_now())
    return {"next": "finish" if deploy is None else "deploy", "uri": published.uri}


def create_model(hub: Hub, run_id: str, settings: HostingSettings) -> dict[str, Any]:
    """Create the SageMaker model, or adopt the one of this name."""
    deployment, _ = _deployment(hub, run_id, settings, rung=0)
    created = hub.hosting.create_model(build_model_request(deployment))
    return {"model_name": deployment.model_name, "did": "created" if created else "adopted"}


def create_endpoint_config(hub: Hub, run_id: str, settings: HostingSettings) -> dict[str, Any]:
    """Create the configuration of the deploy ladder's present rung, or adopt it.

    Raises:
        NoCapacityError: no rung is left.
    """
    row = _own_row(hub, run_id)
    rung = 0
    if row is not None:
        refused = row.state is EndpointState.FAILED and is_capacity_error(row.reason)
        rung = row.rung + 1 if refused else row.rung
    try:
        deployment, _ = _deployment(hub, run_id, settings, rung=rung)
    except IndexError as error:
        words = row.reason if row else ""
        raise NoCapacityError(
            f"no instance type of the deploy ladder is to be had: {words}"
        ) from error
    hub.hosting.create_config(build_endpoint_config_request(deployment))
    return {
        "rung": rung,
        "config_name": deployment.config_name,
        "instance_type": deployment.instance_type,
    }


def start_or_update(hub: Hub, run_id: str, rung: int, settings: HostingSettings) -> dict[str, Any]:
    """Create or update the endpoint with the configuration of ``rung``."""
    deployment, _ = _deployment(hub, run_id, settings, rung=rung)
    return create_or_update(hub, deployment, rung)


def smoke_test(hub: Hub, run_id: str, settings: HostingSettings) -> dict[str, Any]:
    """Ask the endpoint one real question, keep the answer with the run, and set up scaling.

    Raises:
        EndpointBusyError: its inference component is still being placed.
        SmokeTestFailedError: it answers nothing usable.
    """
    row = _own_row(hub, run_id)
    deployment, run = _deployment(hub, run_id, settings, rung=row.rung if row else 0)
    if deployment.scales_to_zero:
        _await_component(hub, deployment)
    spec = load_spec(hub, run)
    prompt = smoke_prompt(hub, run, spec)
    body = {
        "messages": prompt.messages,
        "max_tokens": deployment.deploy.smoke_test.max_tokens,
        "temperature": 0,
    }
    begun = time.monotonic()
    try:
        answer = hub.hosting.invoke(deployment.endpoint, body, deployment.component)
    except RequestRefusedError as error:
        raise SmokeTestFailedError(str(error)) from error
    text = _answer_text(answer)
    view = SmokeTestView(
        prompt=prompt.text,
        source=prompt.source,
        answer=text,
        seconds=round(time.monotonic() - begun, 3),
    )
    hub.bucket.write_json(run.layout.smoke_test, view.model_dump(mode="json"))
    if row is not None and deployment.deploy.autoscaling is not None:
        hub.table.update_endpoint(row, scaled=True)
        _scale(hub, deployment)
    return {"answer": text[:200], "seconds": view.seconds}


def finish_run(hub: Hub, run_id: str) -> dict[str, Any]:
    """The run has succeeded; its endpoint is announced."""
    folder = load_folder(hub, run_id)
    bind(run_id)
    run = folder.run
    if run.state is RunState.SUCCEEDED:
        return {"state": run.state.value}
    if run.endpoint_name is not None:
        finish_deployment(hub, run.endpoint_name)
    if not hub.table.update_run(run, RunState.SUCCEEDED, reason=None, deploy_override=None):
        raise ConflictError(f"run {run_id} is {run.state.value}")
    count("RunsSucceeded")
    note(hub, run_id, "run.succeeded", "succeeded", time=_now())
    return {"state": RunState.SUCCEEDED.value, "endpoint": run.endpoint_name}


# -- private --------------------------------------------------------------------------------------


def _deployment(
    hub: Hub, run_id: str, settings: HostingSettings, *, rung: int
) -> tuple[Deployment, RunRecord]:
    run = load_folder(hub, run_id).run
    bind(run_id)
    if run.state is not RunState.DEPLOYING:  # Cancelled while this task was on its way.
        raise ConflictError(f"run {run_id} is {run.state.value}")
    spec = load_spec(hub, run)
    deploy = deploy_spec(run, spec)
    if run.published is None or deploy is None:
        raise ConflictError(f"run {run_id} has nothing to deploy")
    return (
        plan_deployment(spec, deploy, run.published, run_id=run_id, rung=rung, settings=settings),
        run,
    )


def _own_row(hub: Hub, run_id: str) -> Any:
    run = load_folder(hub, run_id).run
    row = hub.table.get_endpoint(run.endpoint_name) if run.endpoint_name else None
    return row if row is not None and row.owned and row.run_id == run_id else None


def _await_component(hub: Hub, deployment: Deployment) -> None:
    assert deployment.component is not None
    hub.hosting.create_component(build_inference_component_request(deployment))
    status = hub.hosting.component_status(deployment.component)
    if status is None or status[0] in ("Creating", "Updating"):
        raise EndpointBusyError(f"inference component {deployment.component} is being placed")
    if status[0] != "InService":
        raise EndpointFailedError(f"inference component is {status[0]}: {status[1]}")


def _answer_text(answer: dict[str, Any]) -> str:
    try:
        message = answer["choices"][0]["message"]
        texts = [message.get(name) for name in _TEXTS]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise SmokeTestFailedError(f"not a chat answer: {str(answer)[:300]}") from error
    for text in texts:
        if isinstance(text, str) and text.strip():
            return text
    raise SmokeTestFailedError(f"an empty answer: {str(answer)[:300]}")


def _scale(hub: Hub, deployment: Deployment) -> None:
    scaling = deployment.deploy.autoscaling
    assert scaling is not None
    if deployment.scales_to_zero:
        resource = f"inference-component/{deployment.component}"
        dimension = "sagemaker:inference-component:DesiredCopyCount"
    else:
        resource = f"endpoint/{deployment.endpoint}/variant/{VARIANT}"
        dimension = "sagemaker:variant:DesiredInstanceCount"
    hub.hosting.scale(
        resource,
        dimension,
        least=scaling.min_instances,
        most=scaling.max_instances,
        target=scaling.target_invocations_per_minute,
    )
    if deployment.component is not None:
        policy_arn = hub.hosting.scale_from_zero(resource, dimension)
        hub.alarms.put(build_wake_alarm_request(deployment.component, policy_arn))


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
