"""What a container comes to when a rank, an upload or the publication fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.failures import ExitCode, parse_failure
from tests.reliability.job import Job, toy_job
from tests.training.s3 import S3Server, s3_server

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def failing_job(server: S3Server, folder: Path, trouble: str, **options) -> Job:
    server.clear()
    return toy_job(server, folder, steps=6, tags={"trouble": trouble, "pause": "0"}, **options)


@pytest.mark.parametrize(
    ("trouble", "ranks", "expected"),
    [
        ("oom@3", 1, (ExitCode.OUT_OF_MEMORY, "rank 0: OutOfMemoryError")),
        ("kill@3@1", 2, (ExitCode.CLUSTER, "")),
        pytest.param("nan@3", 1, (ExitCode.NON_FINITE, "loss is nan"), marks=pytest.mark.long),
        pytest.param("nan@3@1", 2, (ExitCode.NON_FINITE, "rank 1"), marks=pytest.mark.long),
        pytest.param("reward@2", 1, (ExitCode.REWARD, "source grid"), marks=pytest.mark.long),
        pytest.param("data@1", 1, (ExitCode.DATA, "no row"), marks=pytest.mark.long),
        pytest.param("export@0", 1, (ExitCode.EXPORT, "logits differ"), marks=pytest.mark.long),
        pytest.param("bug@2", 1, (ExitCode.INTERNAL, "nobody foresaw"), marks=pytest.mark.long),
        pytest.param("exit@3@1", 2, (ExitCode.CLUSTER, ""), marks=pytest.mark.long),
    ],
)
def test_a_failed_rank_ends_the_job_with_its_own_code(
    server, tmp_path, trouble: str, ranks: int, expected: tuple[ExitCode, str]
) -> None:
    code, words = expected
    job = failing_job(server, tmp_path, trouble, ranks=ranks)
    assert job.run() == code, job.log
    failure = parse_failure(job.failure)
    assert failure.code is code
    assert words in failure.cause
    assert job.layout.model_manifest not in server.keys(job.layout.model_prefix)


def test_a_model_that_cannot_be_uploaded_fails_the_attempt(server, tmp_path) -> None:
    """The first design's failed merge was a warning with exit code 0 and no model."""
    job = failing_job(server, tmp_path, "")
    server.fail("PUT", r"model\.safetensors", "AccessDenied")
    assert job.run() == ExitCode.EXPORT, job.log
    assert "AccessDenied" in job.failure
    assert job.layout.model_manifest not in server.keys(job.layout.model_prefix)


@pytest.mark.long
def test_uploads_that_always_fail_never_stop_training(server, tmp_path) -> None:
    """marin-community/marin#9213: no flag, no checkpoint, but a trained and published model."""
    job = failing_job(server, tmp_path, "")
    server.fail("PUT", r"host-0/.*distcp", "AccessDenied")
    assert job.run() == 0, job.log
    assert job.complete() == []
    assert len(job.model()) > 0


@pytest.mark.long
def test_a_takeover_during_training_ends_the_older_attempt(server, tmp_path) -> None:
    job = failing_job(server, tmp_path, "")
    job.document["tags"]["pause"] = "0.5"
    job.prepare()
    container = job.start()
    container.wait_for(job.complete)
    job.attempt = 2
    job.put_control()
    assert container.wait() == ExitCode.FENCED, job.log
    assert "attempt 2" in job.failure
