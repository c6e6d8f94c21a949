"""Uploads: addressed by content, so that the same content is sent once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from client.run_files import LocalSource
from client.upload import Uploader, content_sha256


def source(path: Path) -> LocalSource:
    return LocalSource(("model", "source"), str(path), path)


def keys(s3: Any) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket="hub-bucket").get("Contents", [])]


def test_a_file_is_addressed_by_its_sha256_under_its_name(tmp_path: Path, s3: Any) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"rows" * 1000)
    told: list[tuple[str, int, int]] = []
    uri = Uploader(s3, "hub-bucket", lambda *what: told.append(what)).upload(source(file))
    sha = hashlib.sha256(b"rows" * 1000).hexdigest()
    assert uri == f"s3://hub-bucket/inputs/{sha}/train.jsonl"
    body = s3.get_object(Bucket="hub-bucket", Key=f"inputs/{sha}/train.jsonl")["Body"].read()
    assert body == b"rows" * 1000
    assert told[-1] == ("train.jsonl", 4000, 4000)


def test_a_folder_is_a_prefix_that_ends_with_a_slash_and_hidden_files_stay_here(
    tmp_path: Path, s3: Any
) -> None:
    (tmp_path / "m/sub").mkdir(parents=True)
    (tmp_path / "m/.git").mkdir()
    for name in ("config.json", "sub/a.bin", ".git/x", ".cache"):
        (tmp_path / "m" / name).write_text(name)
    uri = Uploader(s3, "hub-bucket").upload(source(tmp_path / "m"))
    assert uri.endswith("/m/")
    prefix = uri.removeprefix("s3://hub-bucket/")
    assert keys(s3) == [f"{prefix}config.json", f"{prefix}sub/a.bin"]


def test_what_is_there_already_is_not_sent_again_and_what_was_cut_off_is(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_text(name * 10)
    Uploader(s3, "hub-bucket").upload(source(tmp_path / "m"))
    s3.put_object(Bucket="hub-bucket", Key=keys(s3)[0], Body=b"cut")
    sent: list[str] = []
    send = s3.upload_file

    def counted(file: str, *where: Any, **how: Any) -> None:
        sent.append(Path(file).name)
        send(file, *where, **how)

    monkeypatch.setattr(s3, "upload_file", counted)
    uploader = Uploader(s3, "hub-bucket")
    uploader.upload(source(tmp_path / "m"))
    uploader.upload(source(tmp_path / "m"))
    assert sent == ["a"]


def test_content_and_not_place_decides(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f").write_text("same")
    assert content_sha256(tmp_path / "one") == content_sha256(tmp_path / "two")
    (tmp_path / "two/f").rename(tmp_path / "two/g")
    assert content_sha256(tmp_path / "one") != content_sha256(tmp_path / "two")
    (tmp_path / "two/g").write_text("else")
    assert content_sha256(tmp_path / "one/f") != content_sha256(tmp_path / "two/g")


def test_a_refused_look_is_an_error_and_not_an_absence(tmp_path: Path, s3: Any) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(ClientError):
        Uploader(s3, "no-such-bucket").upload(source(tmp_path / "f"))
