"""Every S3 key and every AWS name of the hub. No other module builds one.

A key built twice is a key built differently once; a double slash makes a complete checkpoint
invisible.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass

__all__ = [
    "DATA_SUFFIXES",
    "MAX_STEP",
    "UPLOADED_RUN_FILES",
    "RunLayout",
    "StageLayout",
    "attempt_of_job",
    "endpoint_config_name",
    "job_name",
    "join_uri",
    "model_name",
    "new_run_id",
    "parse_flag_key",
    "parse_host_key",
    "parse_job_name",
    "parse_s3_uri",
    "recipe_file_key",
    "recipe_files_prefix",
    "recipe_key",
    "upload_error_key",
]

MAX_STEP = 99_999_999
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Of files that hold rows."""
UPLOADED_RUN_FILES = ("run.yaml", "run.yml")
"""Names of files in the inbox that start a run by themselves."""
_RUN_ID = re.compile(r"(?=.{1,46}\Z)[a-z0-9](-*[a-z0-9])*")
_JOB = re.compile(r"(?P<run>[a-z0-9-]{1,46})-(?P<stage>\d)-a(?P<attempt>\d{3,4})")
_FLAG = re.compile(
    r"runs/(?P<run>[^/]+)/stages/(?P<index>\d)-(?P<stage>[^/]+)/checkpoints/"
    r"step-(?P<step>\d{8})/(?P<generation>[^/]+)/sync_completed_(?P<host>\d+)\.flag"
)
_HOST = re.compile(
    r"runs/(?P<run>[^/]+)/stages/(?P<index>\d)-(?P<stage>[^/]+)/hosts/"
    r"(?P<attempt>\d+)/(?P<host>\d+)\.json"
)


def new_run_id(name: str, *, now: dt.datetime, token: str) -> str:
    """`<name>-<yyyymmdd>-<token>`, at most 46 characters: sorts by day and reads well."""
    run_id = f"{name}-{now:%Y%m%d}-{token}"
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run id {run_id!r} is not 1 to 46 of a-z, 0-9 and inner hyphens")
    return run_id


def job_name(run_id: str, stage_index: int, attempt: int) -> str:
    """Training job name of an attempt (AWS: to 63 characters, unique in account and region)."""
    if not 0 <= stage_index <= 9 or not 1 <= attempt <= 9999:
        raise ValueError(f"stage index {stage_index} or attempt {attempt} is out of range")
    return f"{run_id}-{stage_index}-a{attempt:03d}"


def parse_job_name(name: str) -> tuple[str, int, int] | None:
    """(run id, stage index, attempt) of one of our job names; None for anybody else's."""
    match = _JOB.fullmatch(name)
    return (match["run"], int(match["stage"]), int(match["attempt"])) if match else None


def attempt_of_job(name: str) -> int:
    """Attempt number in one of our job names."""
    parsed = parse_job_name(name)
    if parsed is None:
        raise ValueError(f"{name!r} is not a job name of this hub")
    return parsed[2]


def model_name(run_id: str, version: str, revision: str) -> str:
    """SageMaker model name: the run, its manifest's sha256 and the engine settings (immutable in
    AWS)."""
    return f"{run_id}-{version[:8]}-{revision[:7]}"


def endpoint_config_name(endpoint: str, version: str, revision: str) -> str:
    """Endpoint configuration name, one per model version and deploy settings (immutable in AWS)."""
    return f"{endpoint[:44].rstrip('-')}-{version[:8]}-{revision[:8]}"


def endpoint_alarm_name(stack: str, endpoint: str) -> str:
    """Name of the CloudWatch alarm on an endpoint's own errors (AWS: to 255 characters)."""
    return f"{stack}-endpoint-{endpoint}-errors"


def wake_alarm_name(component: str) -> str:
    """Name of the CloudWatch alarm on requests that found no copy of an inference component."""
    return f"grpohub-wake-{component}"


def recipe_key(name: str) -> str:
    """Key of a registered recipe."""
    return f"recipes/{name}.yaml"


def recipe_file_key(name: str, relative_path: str) -> str:
    """Key of a file that a registered recipe names."""
    _check_plain(relative_path)
    return f"recipes/{name}/{relative_path}"


def recipe_files_prefix(name: str) -> str:
    """Prefix of the files that a registered recipe names."""
    return f"recipes/{name}/"


def upload_error_key(key: str) -> str:
    """Where the report about a refused upload lies: beside it."""
    return f"{key}.error.json"


def parse_s3_uri(uri: str) -> tuple[str, str]:
    """(bucket, key) of `s3://bucket/key`; the key may be empty or end with a slash."""
    match = re.fullmatch(r"s3://([^/]+)(?:/(.*))?", uri, flags=re.DOTALL)
    if not match:
        raise ValueError(f"{uri!r} is not an s3:// address")
    return match[1], match[2] or ""


def join_uri(bucket: str, key: str) -> str:
    """`s3://bucket/key`."""
    return f"s3://{bucket}/{key}"


def _check_plain(relative_path: str) -> None:
    parts = relative_path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in relative_path:
        raise ValueError(f"{relative_path!r} is not a plain relative path")


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Keys of one run."""

    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError(f"{self.run_id!r} is not a run id")

    @property
    def prefix(self) -> str:
        return f"runs/{self.run_id}/"

    @property
    def spec(self) -> str:
        return f"{self.prefix}spec.json"

    @property
    def code_prefix(self) -> str:
        return f"{self.prefix}code/"

    def code(self, relative_path: str) -> str:
        """Key of a frozen user file; `..`, absolute paths and empty parts are refused."""
        _check_plain(relative_path)
        return f"{self.code_prefix}{relative_path}"

    @property
    def smoke_test(self) -> str:
        return f"{self.prefix}smoke_test.json"

    def stage(self, index: int, name: str) -> StageLayout:
        return StageLayout(run=self, index=index, name=name)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Keys of one stage of a run."""

    run: RunLayout
    index: int
    name: str

    @property
    def prefix(self) -> str:
        return f"{self.run.prefix}stages/{self.index}-{self.name}/"

    @property
    def checkpoints_prefix(self) -> str:
        return f"{self.prefix}checkpoints/"

    def checkpoint_prefix(self, step: int, generation: str) -> str:
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"step {step} is not within 0..{MAX_STEP}")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", generation):
            raise ValueError(f"{generation!r} is not a generation")
        return f"{self.checkpoints_prefix}step-{step:08d}/{generation}/"

    def host_prefix(self, step: int, generation: str, host_rank: int) -> str:
        return f"{self.checkpoint_prefix(step, generation)}host-{host_rank}/"

    def flag(self, step: int, generation: str, host_rank: int) -> str:
        return f"{self.checkpoint_prefix(step, generation)}sync_completed_{host_rank}.flag"

    @property
    def control(self) -> str:
        return f"{self.prefix}control.json"

    @property
    def metrics_prefix(self) -> str:
        return f"{self.prefix}metrics/"

    def metrics(self, attempt: int, generation: str) -> str:
        return f"{self.metrics_prefix}{attempt:03d}-{generation}.jsonl"

    @property
    def rollouts_prefix(self) -> str:
        return f"{self.prefix}rollouts/"

    def rollouts(self, step: int) -> str:
        return f"{self.rollouts_prefix}step-{step:08d}.parquet"

    @property
    def tensorboard_prefix(self) -> str:
        return f"{self.prefix}tensorboard/"

    @property
    def hosts_prefix(self) -> str:
        return f"{self.prefix}hosts/"

    def host(self, attempt: int, host_rank: int) -> str:
        """Where a host reports its EC2 instance id, so that a Spot warning finds its stage."""
        return f"{self.hosts_prefix}{attempt:03d}/{host_rank}.json"

    def cluster(self, attempt: int) -> str:
        """How the hosts of the attempt's newest incarnation find their leader."""
        return f"{self.prefix}cluster/{attempt:03d}.json"

    @property
    def sample_prompt(self) -> str:
        """`{"messages": [...]}` of the first validation (else training) row, for the smoke test."""
        return f"{self.prefix}sample_prompt.json"

    @property
    def model_prefix(self) -> str:
        return f"{self.prefix}model/"

    @property
    def model_manifest(self) -> str:
        return f"{self.model_prefix}model.json"


@dataclass(frozen=True, slots=True)
class FlagKey:
    """What a flag's key says."""

    run_id: str
    stage_index: int
    stage: str
    step: int
    generation: str
    host_rank: int


def parse_flag_key(key: str) -> FlagKey | None:
    """What the key of a flag says; None when it is no flag."""
    match = _FLAG.fullmatch(key)
    if not match:
        return None
    return FlagKey(
        run_id=match["run"],
        stage_index=int(match["index"]),
        stage=match["stage"],
        step=int(match["step"]),
        generation=match["generation"],
        host_rank=int(match["host"]),
    )


@dataclass(frozen=True, slots=True)
class HostKey:
    """What the key of a host report says."""

    run_id: str
    stage_index: int
    stage: str
    attempt: int
    host_rank: int


def parse_host_key(key: str) -> HostKey | None:
    """What the key of a host report says; None when it is none."""
    match = _HOST.fullmatch(key)
    if not match:
        return None
    return HostKey(
        run_id=match["run"],
        stage_index=int(match["index"]),
        stage=match["stage"],
        attempt=int(match["attempt"]),
        host_rank=int(match["host"]),
    )
