"""Where the hub is: an option, the environment, or the embedded mode of the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.settings import ConfigurationError, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPOHUB_API_URL", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")


def local_file(folder: Path, pid: int) -> None:
    (folder / ".grpohub").mkdir()
    state = {"url": "http://127.0.0.1:1", "api_url": "http://127.0.0.1:1/api/", "pid": pid}
    (folder / ".grpohub/local.json").write_text(json.dumps({**state, "bucket": "b"}))


@pytest.mark.parametrize(
    ("url", "region"),
    [
        ("https://abc123.execute-api.ap-south-1.amazonaws.com", "ap-south-1"),
        ("https://abc123.execute-api.ap-south-1.amazonaws.com/v1/", "ap-south-1"),
        ("https://hub.example.com", "eu-north-1"),
    ],
)
def test_the_region_is_the_apis_own_where_its_address_says_it(url: str, region: str) -> None:
    settings = load_settings(url)
    assert settings.region == region
    assert not settings.api_url.endswith(("/", "/v1"))
    assert settings.endpoint_url is None


def test_the_option_comes_before_the_environment_and_both_before_the_embedded_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_file(tmp_path, os.getpid())
    below = tmp_path / "a/b"
    below.mkdir(parents=True)

    assert load_settings(folder=below).api_url == "http://127.0.0.1:1/api"
    monkeypatch.setenv("GRPOHUB_API_URL", "https://env.example.com")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert load_settings(folder=below).api_url == "https://env.example.com"
    assert load_settings(folder=below).endpoint_url == "http://127.0.0.1:2"
    assert load_settings("https://option.example.com", folder=below).api_url == (
        "https://option.example.com"
    )


def test_the_embedded_mode_needs_no_credentials_and_has_its_own_endpoint(tmp_path: Path) -> None:
    local_file(tmp_path, os.getpid())
    settings = load_settings(folder=tmp_path)
    assert settings.endpoint_url == "http://127.0.0.1:1"
    assert settings.session.get_credentials() is not None
    assert settings.aws("s3").meta.endpoint_url == "http://127.0.0.1:1"


def test_an_embedded_mode_that_has_stopped_is_said_to_have_stopped(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    local_file(tmp_path, process.pid)
    with pytest.raises(ConfigurationError, match="has stopped"):
        load_settings(folder=tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": "x", "api_url": "y", "pid": "z"}'])
def test_a_damaged_note_of_the_embedded_mode_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / ".grpohub").mkdir()
    (tmp_path / ".grpohub/local.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"local\.json is damaged"):
        load_settings(folder=tmp_path)


def test_without_any_hub_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="grpohub local up"):
        load_settings(folder=tmp_path)
