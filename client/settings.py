"""Where the hub is, and with whose credentials: AWS as usual, or the embedded mode here."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config

__all__ = ["ConfigurationError", "Settings", "load_settings"]

LOCAL_FILE = Path(".grpohub/local.json")
_EXECUTE_API = re.compile(r"https://[a-z0-9]+\.execute-api\.(?P<region>[a-z0-9-]+)\.")


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
        return self.session.client(
            service,
            region_name=self.region,
            endpoint_url=self.endpoint_url,
            config=Config(retries={"mode": "standard", "max_attempts": 5}),
        )


def load_settings(api_url: str | None = None, *, folder: Path | None = None) -> Settings:
    """Settings from ``api_url``, else `GRPOHUB_API_URL`, else what `grpohub local up` wrote.

    The embedded mode's file is found in ``folder`` (default: the working directory) or above it.

    Raises:
        ConfigurationError: naming what to set when nothing is found, or what has stopped.
    """
    given = api_url or os.environ.get("GRPOHUB_API_URL")
    if not given:
        return _local(folder or Path.cwd())
    session = boto3.Session()
    match = _EXECUTE_API.match(given)
    region = match["region"] if match else session.region_name or "us-east-1"
    return Settings(_trimmed(given), region, session, os.environ.get("AWS_ENDPOINT_URL"))


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
