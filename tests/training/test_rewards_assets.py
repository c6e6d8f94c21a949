"""Weights from an S3 prefix, as people really store them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from contracts.layout import RunLayout
from tests.training.s3 import CREDENTIALS
from training_container.checkpoints.store import Store
from training_container.inputs import fetch_code
from training_container.rewards.assets import fetch_weights
from training_container.rewards.interface import RewardConfigError


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        yield


def store(*keys: str) -> None:
    for key in keys:
        boto3.client("s3").put_object(
            Bucket="bucket", Key=key, Body=b"" if key[-1] == "/" else b"x"
        )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_empty_objects_a_console_makes_for_folders_are_no_files() -> None:
    store("rm/", "rm/config.json", "rm/sub/", "rm/sub/model.safetensors", "rm2/other")
    for source in ("s3://bucket/rm", "s3://bucket/rm/"):
        assert files(Path(fetch_weights(source))) == {"config.json", "sub/model.safetensors"}


def test_they_are_no_files_of_the_run_s_code_either(tmp_path: Path) -> None:
    layout = RunLayout("run")
    store(layout.code_prefix, f"{layout.code_prefix}sub/", f"{layout.code_prefix}sub/a.py")
    fetch_code(Store("bucket"), layout, tmp_path / "code")
    assert files(tmp_path / "code") == {"sub/a.py"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rm/"], "nothing is stored there"),
        ([], "nothing is stored there"),
        (["rm/../../outside"], "rm/../../outside leads out of its folder"),
        (["rm//dev/null/outside"], "rm//dev/null/outside leads out of its folder"),
        (["rm/a", "rm/a/b"], "File exists|Not a directory"),
        ([f"rm/{'n' * 300}"], "File name too long"),
    ],
)
def test_what_cannot_be_copied_is_the_run_s_fault_and_named(keys: list[str], message: str) -> None:
    store(*keys)
    with pytest.raises(RewardConfigError, match=f"s3://bucket/rm: .*({message})"):
        fetch_weights("s3://bucket/rm")
