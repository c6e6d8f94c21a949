"""Where the hub is, and with whose credentials: AWS as usual, or the embedded mode here."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import boto3
import httpx
from botocore.config import Config

__all__ = ["ConfigurationError", "Settings", "is_loopback", "load_settings"]

LOCAL_FILE = Path(".grpohub/local.json")
_EXECUTE_API = re.compile(r"https://[a-z0-9]+\.execute-api\.(?P<region>[a-z0-9-]+)\.")
_LAST_PORT = 65535


class ConfigurationError(RuntimeError):
    """Nothing says where the hub is, or what does is wrong."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Address of the HTTP API, and a boto3 session with the AWS endpoint that belongs to it.

    Attributes:
        api_url: without `/v1` and without a slash at the end.
        endpoint_url: AWS endpoint other than Amazon's own (the embedded mode), or None.
    """

    api_url: str
    region: str
    session: boto3.Session
    endpoint_url: str | None = None

    def aws(self, service: str) -> object:
        """A boto3 client for ``service`` where the hub's stack lives."""
        here = self.endpoint_url is not None and is_loopback(self.endpoint_url)
        retries = {"mode": "standard", "max_attempts": 5}
        return self.session.client(
            service,
            region_name=self.region,
            endpoint_url=self.endpoint_url,
            config=Config(retries=retries, proxies={} if here else None),
        )


def load_settings(api_url: str | None = None, *, folder: Path | None = None) -> Settings:
    """Settings from ``api_url``, else `GRPOHUB_API_URL`, else what `grpohub local up` wrote.

    The embedded mode's file is found in ``folder`` (default: the working directory) or above it.

    Raises:
        ConfigurationError: naming what to set when nothing is found, what is no address, or what
            has stopped.
    """
    given = api_url or os.environ.get("GRPOHUB_API_URL")
    if not given:
        return _local(folder or Path.cwd())
    _check_address("--api-url" if api_url else "GRPOHUB_API_URL", given)
    session = boto3.Session()
    match = _EXECUTE_API.match(given)
    region = match["region"] if match else session.region_name or "us-east-1"
    endpoint_url = os.environ.get("AWS_ENDPOINT_URL")
    if endpoint_url:
        _check_address("AWS_ENDPOINT_URL", endpoint_url)
    return Settings(_trimmed(given), region, session, endpoint_url)


def _local(folder: Path) -> Settings:
    found = [place / LOCAL_FILE for place in (folder, *folder.parents)]
    file = next((path for path in found if path.is_file()), None)
    if file is None:
        raise ConfigurationError(
            "no hub is known here: pass --api-url or set GRPOHUB_API_URL to the stack's ApiUrl "
            "output, or start the embedded mode with `grpohub local up`"
        )
    try:
        state = json.loads(file.read_text())
        url, api_url, pid = str(state["url"]), str(state["api_url"]), int(state["pid"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{file} is damaged; run `grpohub local up` again") from error
    if not _alive(pid):
        raise ConfigurationError(
            "the embedded mode has stopped: start it with `grpohub local up`, or pass --api-url"
        )
    region = str(state.get("region", "us-east-1"))
    # The embedded mode checks no signature, but requests must carry one.
    session = boto3.Session(
        aws_access_key_id="local", aws_secret_access_key="local", region_name=region
    )
    return Settings(_trimmed(api_url), region, session, url)


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own, which no proxy reaches."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _check_address(name: str, text: str) -> None:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{name} {text!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > _LAST_PORT:
        raise ConfigurationError(
            f"{name} {text!r} is no address: write it as https://HOST or http://HOST:PORT"
        )


def _trimmed(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
