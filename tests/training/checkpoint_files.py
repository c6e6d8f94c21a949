"""Checkpoints of plain bytes in S3, complete by default, for tests of the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from contracts.checkpoints import Flag, FlagFile, write_flag
from contracts.control import Control
from contracts.layout import RunLayout
from tests.training.s3 import BUCKET, S3Server

LAYOUT = RunLayout("tiny-20260101-abc").stage(0, "strict")
OLD = "20260101T000000.000000Z-aaaaaaaa"
NEW = "20260102T000000.000000Z-bbbbbbbb"


def put_control(server: S3Server, **fields: object) -> None:
    body = Control(**{"attempt": 1, **fields}).model_dump_json()
    server.client().put_object(Bucket=BUCKET, Key=LAYOUT.control, Body=body.encode())


def put_checkpoint(
    server: S3Server,
    step: int,
    generation: str = OLD,
    *,
    hosts: int = 1,
    ranks_per_host: int = 1,
    attempt: int = 1,
    metrics: Mapping[str, float] | None = None,
    without_flag_of: int | None = None,
) -> None:
    """Shards `sharded/__<rank>_0.distcp`, the index on host 0, and `shared/` on each host."""
    client = server.client()
    for host in range(hosts):
        names = [
            f"sharded/__{host * ranks_per_host + rank}_0.distcp" for rank in range(ranks_per_host)
        ]
        names += ["shared/__0_0.distcp", "shared/.metadata"]
        names += ["sharded/.metadata"] if host == 0 else []
        files = []
        for name in names:
            body = f"{name} of host {host}, step {step}, {generation}".encode() * 50
            key = LAYOUT.host_prefix(step, generation, host) + name
            client.put_object(Bucket=BUCKET, Key=key, Body=body)
            digest = hashlib.sha256(body).hexdigest()
            files.append(FlagFile(key=key, size=len(body), sha256=digest))
        flag = Flag(
            run_id=LAYOUT.run.run_id, stage=LAYOUT.name, step=step, attempt=attempt,
            generation=generation, host_rank=host, num_hosts=hosts,
            world_size=hosts * ranks_per_host, files=tuple(files), metrics=metrics or {},
        )  # fmt: skip
        if host != without_flag_of:
            key = LAYOUT.flag(step, generation, host)
            client.put_object(Bucket=BUCKET, Key=key, Body=write_flag(flag))


def damage(server: S3Server, step: int, generation: str = OLD, name: str = "") -> str:
    """Flip a byte of one file, its size unchanged; its key."""
    key = LAYOUT.host_prefix(step, generation, 0) + (name or "sharded/__0_0.distcp")
    client = server.client()
    body = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    body[3] ^= 255
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))
    return key
