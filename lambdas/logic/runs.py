"""Creating runs, from the API or from uploads. The same request never makes two."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contracts.compute import DeploySpec
from contracts.layout import RunLayout, join_uri, new_run_id
from contracts.problems import InvalidInputError, Problem
from contracts.run_spec import RunSpec, canonical_json, load_run_yaml, parse_run_spec
from contracts.spec_files import check_named_files
from contracts.states import RunState, StageState
from lambdas.errors import ConflictError
from lambdas.logic.endings import execution_arn, execution_name
from lambdas.logic.folder import RunFolder
from lambdas.logic.notes import note
from lambdas.logic.records import RunRecord, StageRecord
from lambdas.logic.specs import load_folder, load_spec
from lambdas.observability import bind, count

if TYPE_CHECKING:
    from lambdas.hub import Hub

__all__ = ["RunRequest", "check_request", "create_run", "deploy_run", "start_execution"]

KEY_LIFE = dt.timedelta(days=7)
"""How long an Idempotency-Key is remembered; the run id that it gave is for ever."""
_EARLIER_RUN = re.compile(r"run:(?P<run>[a-z0-9-]+)/(?P<stage>[a-z0-9-]+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run file and the text of the files that it names."""

    document: Any
    """Plain data, or YAML text."""
    files: Mapping[str, str] = field(default_factory=dict)
    source: str = "api"
    """`api`, or the S3 object that asks for the run."""

    @property
    def sha256(self) -> str:
        text = json.dumps([self.document, dict(self.files)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def check_request(request: RunRequest) -> RunSpec:
    """The run file, valid in itself, with its files, and free of what only the client can resolve.

    Raises:
        InvalidInputError: with all problems of the first of these three that has some.
    """
    document = request.document
    if isinstance(document, str):
        document = load_run_yaml(document)
    spec = parse_run_spec(document)
    problems = [*check_named_files(spec, request.files), *_local_paths(spec)]
    if problems:
        raise InvalidInputError(problems)
    return spec


def create_run(
    hub: Hub, request: RunRequest, *, key: str | None, state_machine_arn: str
) -> RunFolder:
    """Freeze the run file and its files, write the rows, start the execution.

    ``key`` (an Idempotency-Key, or an object version) makes a repetition find the same run: every
    step below is either conditional or overwrites with the same content.

    Raises:
        InvalidInputError: the run file is wrong.
        ConflictError: the key was used with another request.
    """
    spec = check_request(request)
    now = _now()
    run_id = new_run_id(spec.name, now=now, token=secrets.token_hex(4))
    if key is not None:
        run_id, body = hub.table.claim_key(key, run_id, request.sha256, now + KEY_LIFE)
        if body != request.sha256:
            raise ConflictError("this Idempotency-Key was used with another request")
    bind(run_id)
    layout = RunLayout(run_id)
    frozen = canonical_json(spec)
    run = RunRecord(
        run_id=run_id,
        name=spec.name,
        state=RunState.PENDING,
        created_at=now,
        updated_at=now,
        spec_sha256=hashlib.sha256(frozen.encode()).hexdigest(),
        source=request.source,
        model_uri=_model_uri(hub, spec),
        execution_arn=execution_arn(state_machine_arn, execution_name(run_id, 0)),
    )
    hub.bucket.write(layout.spec, frozen)
    for name, text in request.files.items():
        hub.bucket.write(layout.code(name), text)
    if hub.table.create_run(run, _stages(run_id, spec)):
        count("RunsCreated")
        note(hub, run_id, "run.created", f"created by {request.source}", time=now)
    folder = load_folder(hub, run_id)
    if folder.run.state is RunState.PENDING:
        start_execution(hub, folder.run, state_machine_arn)
    return folder


def start_execution(hub: Hub, run: RunRecord, state_machine_arn: str) -> None:
    """Start the run's present execution; starting it again is harmless, as its name is the
    run's."""
    name = execution_name(run.run_id, run.executions)
    hub.executions.start(state_machine_arn, name, {"run_id": run.run_id})


def deploy_run(
    hub: Hub, run_id: str, section: dict[str, Any] | None, state_machine_arn: str
) -> RunFolder:
    """Deploy the run's published model, with its run file's deploy section or ``section``.

    Raises:
        InvalidInputError: the section is wrong, or there is none.
        ConflictError: the run is under way or has no model.
    """
    folder = load_folder(hub, run_id)
    run = folder.run
    if run.state not in (RunState.SUCCEEDED, RunState.ENDPOINT_FAILED) or run.published is None:
        raise ConflictError(f"run {run_id} is {run.state.value}; only a run with a published model "
                            "that is not under way can be deployed")  # fmt: skip
    deploy = _deploy_section(load_spec(hub, run), section)
    later = run.executions + 1
    changed = hub.table.update_run(
        run,
        RunState.DEPLOYING,
        executions=later,
        execution_arn=execution_arn(state_machine_arn, execution_name(run_id, later)),
        deploy_override=deploy.model_dump_json(),
        redrives=0,
        error=None,
        cause=None,
        reason=None,
    )
    if not changed:
        raise ConflictError(f"run {run_id} changed meanwhile")
    note(hub, run_id, "run.deploying", "deployment asked for", time=_now())
    start_execution(hub, dataclasses.replace(run, executions=later), state_machine_arn)
    return load_folder(hub, run_id)


def _deploy_section(spec: RunSpec, section: dict[str, Any] | None) -> DeploySpec:
    """The section, checked as a part of the whole run file so that its problems read the same."""
    document = spec.model_dump(mode="json")
    if section is not None:
        document["deploy"] = section
    checked = parse_run_spec(document)
    if checked.deploy is None:
        raise InvalidInputError(
            [Problem("deploy", None, "is required", "Say at least `instance_type`.")]
        )
    return checked.deploy


def _stages(run_id: str, spec: RunSpec) -> tuple[StageRecord, ...]:
    return tuple(
        StageRecord(
            run_id=run_id,
            index=index,
            name=stage.name,
            method=stage.method,
            state=StageState.PENDING,
            max_steps=stage.max_steps,
        )
        for index, stage in enumerate(spec.stages)
    )


def _model_uri(hub: Hub, spec: RunSpec) -> str | None:
    """S3 prefix of the base model, always with its last slash; None for a hub id.

    Raises:
        InvalidInputError: an earlier run or stage that does not exist or has no model.
    """
    source = spec.model.source
    if source.startswith("s3://"):
        return source if source.endswith("/") else f"{source}/"
    earlier = _EARLIER_RUN.fullmatch(source)
    if earlier is None:
        return None
    folder = hub.table.load(earlier["run"])
    stages = folder.stages if folder else ()
    stage = next((s for s in stages if s.name == earlier["stage"]), None)
    if stage is None or stage.state is not StageState.SUCCEEDED:
        reason = "that stage has not succeeded" if stage else "there is no such run and stage"
        problem = Problem("model.source", source, reason, "Name a run and a stage with a model.")
        raise InvalidInputError([problem])
    return join_uri(hub.bucket.name, stage.layout.model_prefix)


def _local_paths(spec: RunSpec) -> list[Problem]:
    """Addresses that only the client's machine can resolve."""
    problems = []
    fix = "Upload it and give its s3:// address (the command line does this by itself)."
    for index, stage in enumerate(spec.stages):
        for name in ("train", "validation"):
            value = getattr(stage.data, name)
            if value is not None and not re.fullmatch(r"s3://[^/]+/.+", value):
                path = f"stages[{index}].data.{name}"
                problems.append(Problem(path, value, "is not an s3:// address", fix))
    source = spec.model.source
    known = re.fullmatch(r"s3://[^/]+/.+", source) or _EARLIER_RUN.fullmatch(source)
    if not known and not _HUB_ID.fullmatch(source):
        reason = "is no s3:// address, hub id or `run:<run id>/<stage>`"
        problems.append(Problem("model.source", source, reason, fix))
    return problems


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
