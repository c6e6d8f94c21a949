"""Our GRPO step against TRL's GRPOTrainer: same model, prompts, group size, lengths, machine, run.

    python -m bench.learner [--steps 12] [--warmup 2]

Both train a 0.44M model on the grid task's questions on one CPU thread, from the same weights, 8
prompts x 8 answers a step, no KL, float32. The reward is the answer's length: the same function in
both, and a signal in every group, because we leave groups without one out of the backward pass and
TRL does not. They take turns, so that a busy machine slows both alike. Reported
are seconds per step, for the whole step and for the update alone (forward, backward, optimizer),
and the ratio TRL / ours of their medians: above 1 we are faster. Process time (CPU seconds) is
reported beside wall time: it is what survives a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from contracts.run_spec import parse_run_spec
from tests.training import tiny
from training_container.engine.distributed import single_process
from training_container.rewards.builtin.lengths import Length, length
from training_container.rewards.interface import Sample
from training_container.trainer import run_stage

PROMPTS, GROUP, TOKENS, RATE = 8, 8, 72, 2e-4
REWARD = {"maximum": 1, "slack": TOKENS}


class Times:
    """CPU and wall seconds per step and per update."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.updates: list[tuple[float, float]] = []

    @contextmanager
    def measure(self, into: list[tuple[float, float]]) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        into.append((time.process_time() - cpu, time.perf_counter() - wall))

    def medians(self, warmup: int) -> dict[str, float]:
        found = {}
        for name, values in (("step", self.steps), ("update", self.updates)):
            for place, kind in enumerate(("cpu", "wall")):
                measured = [value[place] for value in values[warmup:]]
                found[f"{name}_{kind}_seconds"] = statistics.median(measured)
        return found


def ours(base: Path, root: Path, steps: int) -> Times:
    """`run_stage` as the container calls it, checkpoints excepted."""
    from training_container.engine.grpo import Grpo

    times = Times()
    step, train = Grpo.step, Grpo._train

    def timed_step(self: Grpo, *arguments: Any) -> Any:
        with times.measure(times.steps):
            return step(self, *arguments)

    def timed_train(self: Grpo, *arguments: Any) -> Any:
        with times.measure(times.updates):
            return train(self, *arguments)

    stage = tiny.grpo_stage(
        max_steps=steps,
        micro_batch_tokens=2048,
        rewards=[{"name": "short", "function": "length", "weight": 1.0, "parameters": REWARD}],
        grpo={"group_size": GROUP, "prompts_per_step": PROMPTS, "kl": None},
        rollout={"max_response_length": TOKENS, "log_samples": 0},
        optimizer={"learning_rate": RATE, "weight_decay": 0.0},
    )
    pairs, _ = tiny.split_pairs()
    with _patched(Grpo, step=timed_step, _train=timed_train):
        run_stage(
            parse_run_spec(tiny.run_document(stage)),
            0,
            tiny.inputs(root, tiny.grpo_rows(pairs), base=base),
            world=single_process(),
            checkpointer=tiny.FolderCheckpointer(),
            run_id="bench",
            attempt=1,
            generation="g1",
        )
    return times


def theirs(base: Path, root: Path, steps: int) -> Times:
    """TRL's trainer with its defaults, but for what makes the work equal."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    times = Times()

    class Timed(GRPOTrainer):
        """One `training_step` is sampling, scoring, forward and backward."""

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            self._began = time.process_time(), time.perf_counter()
            return super().training_step(*arguments, **named)

        def _prepare_inputs(self, inputs: Any) -> Any:
            prepared = super()._prepare_inputs(inputs)
            self._update_began = time.process_time(), time.perf_counter()
            return prepared

    class Stop(_callback()):  # type: ignore[misc]
        """A step ends after the optimizer, which `training_step` does not contain."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.process_time(), time.perf_counter()
            for began, into in (
                (trainer._began, times.steps),
                (trainer._update_began, times.updates),
            ):
                into.append((now[0] - began[0], now[1] - began[1]))

    pairs, _ = tiny.split_pairs()
    rows = [
        {"prompt": [{"role": "user", "content": row["problem"]}]} for row in tiny.grpo_rows(pairs)
    ]

    def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            length(Sample(completion="", response_length=len(ids)), Length(**REWARD))
            for ids in completion_ids
        ]

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=[short],
        args=GRPOConfig(
            output_dir=str(root / "trl"),
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=steps,
            logging_steps=steps,
            save_strategy="no",
            beta=0.0,
            temperature=1.0,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[Stop()],
    )
    trainer.train()
    return times


def _callback() -> type:
    from transformers import TrainerCallback

    return TrainerCallback


@contextmanager
def _patched(target: type, **methods: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(target, name) for name in methods}
    for name, method in methods.items():
        setattr(target, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(target, name, method)


def main() -> None:
    """Run both, twice in turn, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        base = tiny.warm_model(root / "warm", hidden=128, steps=120)
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
        for turn in range(2):
            mine = ours(base, root / f"ours-{turn}", options.steps)
            runs["ours"].append(mine.medians(options.warmup))
            peer = theirs(base, root / f"trl-{turn}", options.steps)
            runs["trl"].append(peer.medians(options.warmup))
    best = {
        who: {key: min(run[key] for run in found) for key in found[0]}
        for who, found in runs.items()
    }
    ratios = {key: best["trl"][key] / best["ours"][key] for key in best["ours"]}
    print(json.dumps({"ours": best["ours"], "trl": best["trl"], "trl_over_ours": ratios}, indent=1))


if __name__ == "__main__":
    main()
