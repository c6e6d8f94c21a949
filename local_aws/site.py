"""What every part of the embedded cloud shares: its address, its folder, its clock, and the
background threads.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCOUNT = "123456789012"
REGION = "us-east-1"
Report = Callable[[str], None]


@dataclass
class Site:
    """One running cloud. `speed` divides what AWS makes one wait for: schedules, grace periods,
    Wait states.
    """

    port: int
    state_dir: Path
    speed: float = 1.0
    report: Report = print
    stopping: threading.Event = field(default_factory=threading.Event)
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(64, thread_name_prefix="local-aws")
    )

    def __post_init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._building = threading.Lock()

    @property
    def url(self) -> str:
        """The one endpoint of every service."""
        return f"http://127.0.0.1:{self.port}"

    def arn(self, service: str, resource: str) -> str:
        """An ARN in the one account and region there is."""
        return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"

    def queue_url(self, arn: str) -> str:
        """The address of an SQS queue named by its ARN."""
        return f"{self.url}/{ACCOUNT}/{arn.rsplit(':', 1)[-1]}"

    def client(self, service: str) -> Any:
        """A boto3 client of this cloud; one per service, as clients are thread-safe and slow to
        build.
        """
        with self._building:
            if service not in self._clients:
                self._clients[service] = boto3.client(
                    service,
                    region_name=REGION,
                    endpoint_url=self.url,
                    aws_access_key_id="local",
                    aws_secret_access_key="local",
                    config=Config(max_pool_connections=32, retries={"max_attempts": 2}),
                )
            return self._clients[service]

    def credentials(self) -> Mapping[str, str]:
        """The variables by which any AWS SDK finds this cloud."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }

    def sleep(self, seconds: float) -> bool:
        """Wait `seconds` of AWS time; True when the cloud began to stop meanwhile."""
        return self.stopping.wait(seconds / self.speed)

    def every(self, seconds: float, action: Callable[[], None], name: str) -> None:
        """Call `action` every `seconds` of wall-clock time until the cloud stops.

        One failure is reported and the next turn comes all the same.
        """

        def loop() -> None:
            while not self.stopping.wait(seconds):
                try:
                    action()
                except (ClientError, BotoCoreError, OSError) as error:
                    if not self.stopping.is_set():
                        self.report(f"{name}: {error}")

        threading.Thread(target=loop, name=name, daemon=True).start()


def now_ms() -> int:
    """The present as epoch milliseconds."""
    return int(time.time() * 1000)
