"""The EC2 instance id, when the metadata service answers, so that a Spot warning finds its
stage.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping

from contracts.layout import StageLayout
from training_container.checkpoints.store import Store, StoreError

__all__ = ["read_instance_id", "report_host"]

log = logging.getLogger("grpohub")

_TIMEOUT_SECONDS = 1.0


def read_instance_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Instance id by IMDSv2, or None: SageMaker does not promise that the service is reachable."""
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    base = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    # A link-local address: never by way of a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        asked = urllib.request.Request(f"{base}/latest/api/token", headers=lifetime, method="PUT")
        with opener.open(asked, timeout=_TIMEOUT_SECONDS) as answer:
            token = answer.read().decode()
        asked = urllib.request.Request(
            f"{base}/latest/meta-data/instance-id", headers={"X-aws-ec2-metadata-token": token}
        )
        with opener.open(asked, timeout=_TIMEOUT_SECONDS) as answer:
            return answer.read().decode().strip() or None
    except (OSError, urllib.error.URLError):
        return None


def report_host(
    store: Store, layout: StageLayout, *, attempt: int, host_rank: int, host: str, generation: str
) -> None:
    """Write which instance this host is. A head start for Spot warnings, so a failure is only
    logged.
    """
    instance = read_instance_id()
    body = {"instance_id": instance, "host": host, "generation": generation}
    try:
        store.put(layout.host(attempt, host_rank), json.dumps(body).encode())
    except StoreError as error:
        log.warning("the host report was not written: %s", error)
