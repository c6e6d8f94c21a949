"""What a checkpoint costs: the stall of a save as a share of a step, and the rate of the upload.

    python -m bench.checkpoint [--hidden 512] [--layers 6] [--steps 12] [--s5cmd PATH]

A causal language model trains on CPU or GPU; every second step is saved through the container's own
checkpointer. The files are then uploaded by the container's own store to an S3 API on this machine
and, in turn, by `s5cmd` where it is given or on the PATH, else by boto3's `upload_file`, one file
after another, as a script would. The server (moto) is the same Python process for both and is
itself the limit on a small machine, so only the ratio says anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import boto3
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.training.s3 import BUCKET, S3Server, s3_server
from training_container.checkpoints.checkpointer import CheckpointRules, SpoolCheckpointer
from training_container.checkpoints.spool import Spool
from training_container.checkpoints.store import Store
from training_container.engine.distributed import single_process
from training_container.engine.state import Progress, TrainState

BATCH, TOKENS = 8, 256


class Policy:
    """A model and its optimizer, as a checkpoint sees them."""

    def __init__(self, hidden: int, layers: int, device: torch.device) -> None:
        config = Qwen2Config(
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        self.module = Qwen2ForCausalLM(config).to(device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

    def step(self) -> None:
        device = next(self.module.parameters()).device
        ids = torch.randint(0, 8192, (BATCH, TOKENS), device=device)
        self.optimizer.zero_grad()
        self.module(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def measure_stall(policy: Policy, spool: Spool, steps: int) -> dict[str, float]:
    """Seconds of a step without a save, of the stall, and of a step while a save is written."""
    rules = CheckpointRules(interval_seconds=1e9, pinned_steps=frozenset(range(2, steps + 1, 2)))
    keeper = SpoolCheckpointer(single_process(), spool, rules)
    state = TrainState(policy, Progress("", ""))
    policy.step()
    plain, stalls, beside = [], [], []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        policy.step()
        seconds = time.perf_counter() - started
        (beside if step % 2 and step > 1 else plain).append(seconds)
        started = time.perf_counter()
        keeper.after_step(state, step, {}, last=False, step_seconds=seconds)
        if step % 2 == 0:
            stalls.append(time.perf_counter() - started)
        else:
            keeper.close()
            for old in spool.ready()[:-1]:
                spool.remove(old.step)
    keeper.close()
    step_seconds = statistics.median(plain)
    return {
        "step_seconds": step_seconds,
        "stall_seconds": statistics.median(stalls),
        "stall_share_of_a_step": statistics.median(stalls) / step_seconds,
        "step_beside_a_write_ratio": statistics.median(beside) / step_seconds,
    }


def measure_upload(server: S3Server, folder: Path, s5cmd: str | None) -> dict[str, float | str]:
    """MB/s of our store and of the other, alternating, best of three each."""
    os.environ.update(server.environ())
    files = {path: path.relative_to(folder).as_posix() for path in _files(folder)}
    size = sum(path.stat().st_size for path in files) / 1e6
    store, client = Store(BUCKET), boto3.client("s3")

    def ours() -> None:
        store.upload({path: f"ours/{name}" for path, name in files.items()})

    def by_boto3() -> None:
        for path, name in files.items():
            client.upload_file(str(path), BUCKET, f"theirs/{name}")

    def by_s5cmd() -> None:
        command = [str(s5cmd), "--endpoint-url", server.endpoint, "cp", "--concurrency", "8",
                   "--part-size", "16", f"{folder}/", f"s3://{BUCKET}/theirs/"]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def rate(upload: Callable[[], None]) -> float:
        started = time.perf_counter()
        upload()
        return size / (time.perf_counter() - started)

    rates = [(rate(ours), rate(by_s5cmd if s5cmd else by_boto3)) for _ in range(3)]
    own, other = (max(found) for found in zip(*rates, strict=True))
    return {
        "megabytes": size,
        "upload_mb_per_second": own,
        "other": "s5cmd" if s5cmd else "boto3 upload_file",
        "other_mb_per_second": other,
        "upload_ratio_to_other": own / other,
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--s5cmd", default=shutil.which("s5cmd"))
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy(options.hidden, options.layers, device)
    weights = sum(parameter.numel() for parameter in policy.module.parameters())
    with tempfile.TemporaryDirectory() as folder, s3_server() as server:
        spool = Spool(Path(folder), 1)
        result: dict[str, float | str] = {"device": device.type, "weights": weights}
        result |= measure_stall(policy, spool, options.steps)
        result |= measure_upload(server, spool.ready()[-1].folder, options.s5cmd)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
