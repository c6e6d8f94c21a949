"""The container up to the start of its ranks: exit codes and the failure file SageMaker reads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from contracts.attempt import CheckpointRef
from contracts.failures import EXIT_MEANINGS, ExitCode, parse_failure
from contracts.problems import InvalidInputError, Problem
from contracts.states import Outcome
from tests.reliability.job import REAL, Job, toy_job
from tests.training.s3 import BUCKET, S3Server, s3_server
from tests.training.tiny import run_document, save_model, sft_stage
from training_container.entrypoint import main
from training_container.instance_id import read_instance_id
from training_container.rank import named_failure
from training_container.sagemaker_env import read_sagemaker_env


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def job(server: S3Server, tmp_path: Path) -> Job:
    server.clear()
    return toy_job(server, tmp_path, module=REAL)


def expect(job: Job, code: ExitCode, *words: str) -> None:
    """Exit code, machine-readable first line and cause."""
    assert job.run() == code, job.log
    failure = parse_failure(job.failure)
    assert failure is not None
    assert failure.code is code
    assert job.failure.startswith(f"outcome={failure.outcome.value} retryable=")
    assert len(job.failure) <= 1024
    for word in words:
        assert word in job.failure


def test_a_changed_run_file_is_refused(job: Job) -> None:
    client = job.server.client()
    client.put_object(Bucket=BUCKET, Key=job.layout.run.spec, Body=b"{}")
    expect(job, ExitCode.BAD_INPUT, "sha256")


def test_an_invalid_run_file_names_its_problem(job: Job) -> None:
    import hashlib

    body = json.dumps({**job.document, "colour": "red"}).encode()
    job.server.client().put_object(Bucket=BUCKET, Key=job.layout.run.spec, Body=body)
    values = json.loads((job.base / "input/config/hyperparameters.json").read_text())
    values["spec_sha256"] = json.dumps(hashlib.sha256(body).hexdigest())
    job.write_config("hyperparameters", values)
    expect(job, ExitCode.BAD_INPUT, "colour")


def test_missing_hyperparameters_are_named(job: Job) -> None:
    job.write_config("hyperparameters", {"run_id": '"x"'})
    expect(job, ExitCode.BAD_INPUT, "spec_sha256", "bucket")


def test_missing_configuration_files_are_named(job: Job) -> None:
    (job.base / "input/config/resourceconfig.json").unlink()
    expect(job, ExitCode.BAD_INPUT, "resourceconfig.json")


def test_missing_data_is_a_data_failure(job: Job) -> None:
    (job.base / "input/data/train/rows.jsonl").unlink()
    expect(job, ExitCode.DATA, "train")


@pytest.mark.parametrize("pattern", ["list-type.*checkpoints", "spec.json", "control.json"])
def test_access_denied_is_fatal_and_never_a_fresh_start(job: Job, pattern: str) -> None:
    """aws/sagemaker-python-sdk#1040 and the first design's silent restart from step 0."""
    job.server.fail("GET", pattern, "AccessDenied")
    expect(job, ExitCode.STORAGE, "AccessDenied")


def test_a_floor_that_is_not_there_is_a_checkpoint_failure(job: Job) -> None:
    job.floor = CheckpointRef(step=20, generation="20260101T000000.000000Z-aaaaaaaa")
    job.prepare()
    expect(job, ExitCode.CHECKPOINT, "step 20")


def test_an_older_attempt_leaves_at_once(job: Job) -> None:
    job.put_control(attempt=2)
    expect(job, ExitCode.FENCED, "attempt 2")


def test_a_stage_without_its_control_object_does_not_start(job: Job) -> None:
    job.server.client().delete_object(Bucket=BUCKET, Key=job.layout.control)
    expect(job, ExitCode.STORAGE, "control.json")


def test_a_stop_request_during_the_download_ends_it_there(job: Job) -> None:
    reached = threading.Event()

    def hold(_method: str, target: str) -> None:
        if "list-type" in target and "checkpoints" in target:
            reached.set()
            time.sleep(60)

    job.server.hooks.append(hold)
    container = job.start()
    assert reached.wait(60)
    container.sigterm()
    assert container.wait(20) == ExitCode.STOPPED
    assert parse_failure(job.failure).outcome is Outcome.INTERRUPTED


def test_dry_run_prints_everything_and_starts_nothing(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    server.clear()
    later = sft_stage(name="later", start_from={"stage": "warmup", "step": 7})
    document = run_document(
        sft_stage(max_steps=9), later, compute={
            "ladder": [
                {"instance_type": "ml.g6e.48xlarge", "spot": False},
                {"instance_type": "ml.m5.xlarge", "spot": False},
            ],
            "max_runtime_hours": 1.0,
        },
    )  # fmt: skip
    model = save_model(tmp_path / "model")
    job = Job(server, tmp_path, document, channels={"model": model})
    job.prepare()
    for name, value in {**server.environ(), "SAGEMAKER_BASE_DIR": str(job.base)}.items():
        monkeypatch.setenv(name, value)
    before = len(server.requests)
    assert main(["train", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert '"pinned_steps": [\n      7\n    ]' in printed
    assert "0.44M weights" in printed
    assert "ml.g6e.48xlarge, 8 ranks" in printed
    assert "ml.m5.xlarge, 1 ranks" in printed
    assert all(r.method == "GET" for r in server.requests[before:])


def test_ranks_and_channels_come_from_sagemakers_files(job: Job) -> None:
    env = read_sagemaker_env({"SAGEMAKER_BASE_DIR": str(job.base), "GRPOHUB_RANKS_PER_HOST": "4"})
    assert (env.host_rank, env.num_hosts, env.world_size) == (0, 1, 4)
    assert env.channel("model") == job.base / "input/data/model"


def _known_failures() -> list[tuple[Exception, ExitCode]]:
    import torch

    from training_container.engine.errors import (
        DataChangedError,
        DataError,
        ExportError,
        NonFiniteError,
    )
    from training_container.failure import StageError
    from training_container.rewards.interface import RewardConfigError, RewardError

    problem = Problem("model", None, "is required", "Add it.")
    return [
        (InvalidInputError([problem]), ExitCode.BAD_INPUT),
        (DataError("no row"), ExitCode.DATA),
        (DataChangedError("other rows"), ExitCode.DATA),
        (RewardError("90% failed"), ExitCode.REWARD),
        (RewardConfigError("no such function"), ExitCode.REWARD),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.OUT_OF_MEMORY),
        (MemoryError(), ExitCode.OUT_OF_MEMORY),
        (NonFiniteError("loss is nan"), ExitCode.NON_FINITE),
        (ExportError("logits differ"), ExitCode.EXPORT),
        (torch.distributed.DistBackendError("NCCL timeout"), ExitCode.CLUSTER),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] closed by peer"), ExitCode.CLUSTER),
        (StageError(ExitCode.STORAGE, "AccessDenied"), ExitCode.STORAGE),
        (KeyError("a bug"), ExitCode.INTERNAL),
    ]


@pytest.mark.parametrize(
    ("error", "code"), _known_failures(), ids=lambda value: getattr(value, "name", type(value))
)
def test_every_known_exception_has_its_exit_code(error: Exception, code: ExitCode) -> None:
    assert named_failure(error).code is code


def test_the_instance_id_is_read_by_imds_version_2() -> None:
    seen: list[tuple[str, str, str | None]] = []

    class Imds(BaseHTTPRequestHandler):
        def _answer(self, body: bytes) -> None:
            seen.append((self.command, self.path, self.headers.get("X-aws-ec2-metadata-token")))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self._answer(b"secret-token")

        def do_GET(self) -> None:
            self._answer(b"i-0123456789abcdef0")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Imds) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{http.server_port}/"}
        assert read_instance_id(environ) == "i-0123456789abcdef0"
        http.shutdown()
    assert seen == [
        ("PUT", "/latest/api/token", None),
        ("GET", "/latest/meta-data/instance-id", "secret-token"),
    ]
    assert read_instance_id(environ) is None, "nobody listens any more"


def test_the_documented_exit_codes_are_the_real_ones() -> None:
    page = (Path(__file__).parents[2] / "docs/training-container.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.split("## Exit codes")[1].split("## What")[0].splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    documented = {
        (int(c), name, outcome, retried == "yes") for c, name, outcome, retried, _ in rows
    }
    assert documented == {
        (int(code), code.name.lower(), outcome.value, retryable)
        for code, (outcome, retryable, _) in EXIT_MEANINGS.items()
    }
