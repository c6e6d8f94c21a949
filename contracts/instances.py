"""SageMaker instance types this hub knows, with what planning and memory estimates need.

Sources: the public EC2 instance type pages and SageMaker's ML instance list; for GPU memory what
`nvidia-smi` reports of each GPU, which is less than its name says (an L40S of "48 GB" has 46,068
MiB). A type that is not here is refused with the nearest known name, because a typo is otherwise
found only after the queue for capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INSTANCES", "Instance", "instance"]


@dataclass(frozen=True, slots=True)
class Instance:
    """Shape of one host: accelerators, memory of each in GiB, host memory in GiB, vCPUs."""

    name: str
    gpus: int
    gpu_memory_gib: float
    memory_gib: float
    vcpus: int

    @property
    def ranks(self) -> int:
        """Training processes on one host: one per GPU, one on a CPU host."""
        return max(1, self.gpus)


_ROWS: tuple[tuple[str, int, float, float, int], ...] = (
    ("ml.m5.large", 0, 0, 8, 2),
    ("ml.m5.xlarge", 0, 0, 16, 4),
    ("ml.m5.2xlarge", 0, 0, 32, 8),
    ("ml.m5.4xlarge", 0, 0, 64, 16),
    ("ml.m5.12xlarge", 0, 0, 192, 48),
    ("ml.m5.24xlarge", 0, 0, 384, 96),
    ("ml.c5.xlarge", 0, 0, 8, 4),
    ("ml.c5.2xlarge", 0, 0, 16, 8),
    ("ml.c5.4xlarge", 0, 0, 32, 16),
    ("ml.c5.9xlarge", 0, 0, 72, 36),
    ("ml.g5.xlarge", 1, 22.5, 16, 4),
    ("ml.g5.2xlarge", 1, 22.5, 32, 8),
    ("ml.g5.4xlarge", 1, 22.5, 64, 16),
    ("ml.g5.8xlarge", 1, 22.5, 128, 32),
    ("ml.g5.12xlarge", 4, 22.5, 192, 48),
    ("ml.g5.16xlarge", 1, 22.5, 256, 64),
    ("ml.g5.24xlarge", 4, 22.5, 384, 96),
    ("ml.g5.48xlarge", 8, 22.5, 768, 192),
    ("ml.g6.xlarge", 1, 22.5, 16, 4),
    ("ml.g6.2xlarge", 1, 22.5, 32, 8),
    ("ml.g6.4xlarge", 1, 22.5, 64, 16),
    ("ml.g6.8xlarge", 1, 22.5, 128, 32),
    ("ml.g6.12xlarge", 4, 22.5, 192, 48),
    ("ml.g6.16xlarge", 1, 22.5, 256, 64),
    ("ml.g6.24xlarge", 4, 22.5, 384, 96),
    ("ml.g6.48xlarge", 8, 22.5, 768, 192),
    ("ml.g6e.xlarge", 1, 45, 32, 4),
    ("ml.g6e.2xlarge", 1, 45, 64, 8),
    ("ml.g6e.4xlarge", 1, 45, 128, 16),
    ("ml.g6e.8xlarge", 1, 45, 256, 32),
    ("ml.g6e.12xlarge", 4, 45, 384, 48),
    ("ml.g6e.16xlarge", 1, 45, 512, 64),
    ("ml.g6e.24xlarge", 4, 45, 768, 96),
    ("ml.g6e.48xlarge", 8, 45, 1536, 192),
    ("ml.p4d.24xlarge", 8, 40, 1152, 96),
    ("ml.p4de.24xlarge", 8, 80, 1152, 96),
    ("ml.p5.4xlarge", 1, 79.6, 256, 16),
    ("ml.p5.48xlarge", 8, 79.6, 2048, 192),
    ("ml.p5e.48xlarge", 8, 140, 2048, 192),
    ("ml.p5en.48xlarge", 8, 140, 2048, 192),
    ("ml.p6-b200.48xlarge", 8, 179, 2048, 192),
)

INSTANCES: dict[str, Instance] = {row[0]: Instance(*row) for row in _ROWS}


def instance(name: str) -> Instance:
    """The instance called ``name``.

    Raises:
        KeyError: when the hub does not know the type.
    """
    return INSTANCES[name]
