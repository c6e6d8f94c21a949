"""What training jobs and endpoints need from the rest of the cloud, and the records they keep."""

import datetime
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_aws.events import EventBus
from local_aws.images import Images
from local_aws.logs import LogShipper
from local_aws.sagemaker.capacity import Capacity, SpotMarket
from local_aws.sagemaker.hosts import Addresses
from local_aws.site import Report, Site
from local_aws.state import read_json

Record = dict[str, Any]


@dataclass
class Engine:
    """The cloud as SageMaker sees it."""

    site: Site
    logs: LogShipper
    bus: EventBus
    images: Images
    capacity: Capacity = field(default_factory=Capacity)
    market: SpotMarket | None = None

    def __post_init__(self) -> None:
        self.addresses = Addresses(self.site.port)
        self.lock = threading.RLock()

    @property
    def s3(self) -> Any:
        """An S3 client."""
        return self.site.client("s3")

    def grace(self, seconds: float) -> float:
        """Wall-clock seconds of one of AWS's grace periods."""
        return seconds / self.site.speed


class RecordStore:
    """Records by name, each a JSON file that outlives the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def load(self, report: Report) -> dict[str, Record]:
        """What an earlier process kept."""
        files = sorted(self._folder.glob("*.json"))
        read = {file.stem: read_json(file, report) for file in files}
        return {name: record for name, record in read.items() if record is not None}

    def save(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record, whole or not at all."""
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f"{name}.part"
            part.write_text(json.dumps(record), encoding="utf-8")
            part.replace(self._folder / f"{name}.json")

    def delete(self, name: str) -> None:
        """Forget a record."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)


def with_datetimes(value: Any) -> Any:
    """A record's times (epoch seconds) as datetimes, at any depth: the form that boto3 answers
    in.
    """
    if isinstance(value, dict):
        return {
            key: datetime.datetime.fromtimestamp(item, datetime.UTC)
            if key.endswith("Time") and isinstance(item, int | float)
            else with_datetimes(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [with_datetimes(item) for item in value]
    return value


def tag_map(record: Mapping[str, Any]) -> dict[str, str]:
    """Tags as events carry them: a map, not the API's list of pairs."""
    return {tag["Key"]: tag["Value"] for tag in record.get("Tags", ())}
