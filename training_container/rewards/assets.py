"""Fetching what reward models need: weights from S3, keys from Secrets Manager."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from training_container.failure import StageError
from training_container.inputs import read_secret
from training_container.rewards.interface import RewardConfigError

__all__ = ["fetch_folder", "fetch_weights", "resolve_secret"]

_S3 = "s3://"


def fetch_weights(source: str) -> str:
    """What `from_pretrained` takes: an S3 prefix is copied to this host once, a hub id passes.

    Raises RewardConfigError when the prefix cannot be read or copied, or holds nothing.
    """
    if not source.startswith(_S3):
        return source
    bucket, _, prefix = source.removeprefix(_S3).partition("/")
    prefix = f"{prefix.rstrip('/')}/"
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"grpohub-reward-model-{os.getpid()}-{name}"
    if folder.exists():
        return str(folder)
    partial = Path(tempfile.mkdtemp(prefix="grpohub-reward-model-"))
    client = boto3.client("s3")
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        # A console's "folder" is an empty object whose key ends in a slash.
        keys = [key for key in keys if not key.endswith("/")]
        for key in keys:
            path = partial / key.removeprefix(prefix)
            if not path.resolve().is_relative_to(partial.resolve()):
                raise RewardConfigError(f"reward model {source}: {key} leads out of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, key, str(path))
    except (ClientError, BotoCoreError, Boto3Error, OSError) as error:
        raise RewardConfigError(f"reward model {source}: {error}") from error
    if not keys:
        raise RewardConfigError(f"reward model {source}: nothing is stored there")
    partial.rename(folder)
    return str(folder)


def fetch_folder(source: str) -> str:
    """A folder with the weights, those of a hub id too. Raises RewardConfigError."""
    found = fetch_weights(source)
    if Path(found).is_dir():
        return found
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return str(snapshot_download(found))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise RewardConfigError(f"reward model {source}: {error}") from error


def resolve_secret(secret_id: str | None) -> str | None:
    """A key named in the run file. Raises RewardConfigError."""
    if secret_id is None:
        return None
    try:
        return read_secret(secret_id)
    except StageError as error:
        raise RewardConfigError(str(error)) from error
