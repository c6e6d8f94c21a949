"""What the settings name and the model's folder lacks, from S3: adapters, a chat template."""

from __future__ import annotations

from pathlib import Path

from contracts.layout import parse_s3_uri
from inference_container.settings import Settings, StartError

__all__ = ["fetch_adapters", "fetch_chat_template"]


def fetch_adapters(settings: Settings) -> dict[str, Path]:
    """Adapter name to its local folder. A source without `s3://` is a folder inside the model.

    Raises:
        StartError: naming the adapter that cannot be had.
    """
    folders = {}
    for adapter in settings.engine.lora_adapters:
        if adapter.source.startswith("s3://"):
            folder = settings.base / "adapters" / adapter.name
            _download(adapter.source, folder)
        else:
            folder = settings.model / adapter.source
        if not (folder / "adapter_config.json").is_file():
            raise StartError(
                f"adapter {adapter.name}: {adapter.source} holds no adapter_config.json"
            )
        folders[adapter.name] = folder
    return folders


def fetch_chat_template(settings: Settings) -> Path | None:
    """The run's own chat template, when it names one; the exported tokenizer's serves otherwise.

    Raises:
        StartError: when it is not there.
    """
    name = settings.engine.chat_template_file
    if name is None:
        return None
    path = settings.model / name
    if not path.is_file() and settings.code_uri:
        folder = settings.base / "code"
        _download(settings.code_uri.rstrip("/") + "/" + name, folder)
        path = folder / Path(name).name
    if not path.is_file():
        raise StartError(f"chat template {name} is neither in the model nor in the run's files")
    return path


def _download(uri: str, folder: Path) -> None:
    """Every object below a prefix (or the one object with that key) into `folder`."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, prefix = parse_s3_uri(uri)
    client = boto3.client("s3")
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                if item["Key"].endswith("/"):
                    continue  # a console's folder mark
                relative = item["Key"][len(prefix) :].lstrip("/") or Path(prefix).name
                target = folder / relative
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise StartError(f"{item['Key']} leads out of its folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(bucket, item["Key"], str(target))
    except (BotoCoreError, ClientError) as error:
        raise StartError(f"{uri}: {error}") from error
