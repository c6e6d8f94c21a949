"""A model in S3: its manifest last, and nothing beside what that lists."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.failures import ExitCode
from contracts.model_manifest import ManifestFile, ModelManifest
from tests.training.checkpoint_files import LAYOUT, put_control
from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.store import Store
from training_container.failure import StageError
from training_container.publish import publish_model


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        put_control(running)
        yield running


def exported(folder: Path, **bodies: bytes) -> ModelManifest:
    """A folder as the trainer leaves it."""
    folder.mkdir()
    files = []
    for name, body in bodies.items():
        (folder / name).write_bytes(body)
        digest = hashlib.sha256(body).hexdigest()
        files.append(ManifestFile(path=name, size=len(body), sha256=digest))
    manifest = ModelManifest(
        run_id=LAYOUT.run.run_id, stage=LAYOUT.name, step=1, architecture="Tiny", parameters=1,
        dtype="float32", base_model="base", files=tuple(files),
    )  # fmt: skip
    (folder / "model.json").write_text(manifest.model_dump_json())
    return manifest


def test_what_an_earlier_attempt_left_is_gone(tmp_path: Path, server: S3Server) -> None:
    store = Store(BUCKET, server.client(), part_mib=5)
    exported(tmp_path / "old", first=b"old", second=b"old")
    publish_model(store, LAYOUT, tmp_path / "old", 1)
    manifest = exported(tmp_path / "new", first=b"newer")
    assert publish_model(store, LAYOUT, tmp_path / "new", 1) == manifest
    prefix = LAYOUT.model_prefix
    assert server.keys(prefix).keys() == {f"{prefix}first", LAYOUT.model_manifest}
    assert server.keys(prefix)[f"{prefix}first"] == 5


def test_a_fenced_attempt_leaves_the_model_of_its_successor_alone(
    tmp_path: Path, server: S3Server
) -> None:
    store = Store(BUCKET, server.client(), part_mib=5)
    exported(tmp_path / "new", first=b"newer")
    publish_model(store, LAYOUT, tmp_path / "new", 1)
    before = server.keys(LAYOUT.model_prefix)
    put_control(server, attempt=2)
    exported(tmp_path / "late", other=b"late")
    with pytest.raises(StageError) as caught:
        publish_model(store, LAYOUT, tmp_path / "late", 1)
    assert caught.value.code is ExitCode.FENCED
    assert server.keys(LAYOUT.model_prefix) == before
