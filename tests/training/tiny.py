"""A task, a tokenizer and models small enough to train for real in a test.

The task: name the moves that lead from one cell of a 5x5 grid to another. A 0.44M model learns it
by SFT to about 0.4 and by GRPO to 0.8 and more within minutes on one CPU core.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from contracts.run_spec import parse_run_spec
from training_container.engine.distributed import single_process
from training_container.engine.state import Best, Decision, PolicyWeights, TrainState
from training_container.failure import write_atomically
from training_container.trainer import StageInputs, run_stage

Cell = tuple[int, int]
Pair = tuple[Cell, Cell]

ROWS = COLS = 5
EOS_ID, PAD_ID = 2, 0
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(start: Cell, goal: Cell) -> str:
    """The problem text; cells are (row, column)."""
    return f"How to move from ({start[0]},{start[1]}) to ({goal[0]},{goal[1]})?"


def moves(start: Cell, goal: Cell, rng: random.Random) -> list[str]:
    """A shortest way, its moves in random order."""
    down, right = goal[0] - start[0], goal[1] - start[1]
    way = ["DOWN" if down > 0 else "UP"] * abs(down)
    way += ["RIGHT" if right > 0 else "LEFT"] * abs(right)
    rng.shuffle(way)
    return way


def answer(start: Cell, goal: Cell, rng: random.Random) -> str:
    """A correct answer in the form that the built-in grid reward reads."""
    down, right = goal[0] - start[0], goal[1] - start[1]
    actions = json.dumps(moves(start, goal, rng)).replace('"', "'")
    return f"<think>down={down} right={right}</think><answer>[{{'action': {actions}}}]</answer>"


def ground_truth(start: Cell, goal: Cell) -> str:
    """What the built-in reward `grid_navigation` wants to know."""
    return json.dumps(
        {"start": list(start), "goal": list(goal), "rows": ROWS, "cols": COLS, "blocked": []}
    )


def all_pairs() -> list[Pair]:
    """The 600 ordered pairs of different cells."""
    cells = [(row, col) for row in range(ROWS) for col in range(COLS)]
    return [(start, goal) for start in cells for goal in cells if start != goal]


def split_pairs(seed: int = 0, held_out: int = 120) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs)."""
    pairs = all_pairs()
    random.Random(seed).shuffle(pairs)
    return pairs[held_out:], pairs[:held_out]


def grpo_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Dataset rows of a GRPO stage: `problem` and `answer`."""
    return [{"problem": question(*pair), "answer": ground_truth(*pair)} for pair in pairs]


def sft_rows(pairs: Sequence[Pair], *, copies: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Dataset rows of an SFT stage; `copies` differing demonstrations of each pair."""
    rng = random.Random(seed)
    return [
        {"problem": question(*pair), "answer": answer(*pair, rng)}
        for _ in range(copies)
        for pair in pairs
    ]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows as a `.jsonl` file; its path. Whole at any time: ranks write the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 330 tokens, trained on the task's own text."""
    rng = random.Random(0)
    corpus = [f"user\n{question(*p)}assistant\n{answer(*p, rng)}" for p in all_pairs()]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=512,
    )


def model(
    *, hidden: int = 128, layers: int = 2, family: str = "qwen2", tied: bool = True, seed: int = 0
) -> PreTrainedModel:
    """A random float32 model of Qwen's shape; 0.44M weights by default."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer()),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if family == "qwen3":
        built = Qwen3ForCausalLM(Qwen3Config(head_dim=hidden // 4, **shape))
    else:
        built = Qwen2ForCausalLM(Qwen2Config(**shape))
    built.generation_config.eos_token_id = EOS_ID
    built.generation_config.pad_token_id = PAD_ID
    return built.float().eval()


def save_model(folder: Path, built: PreTrainedModel | None = None, **shape: Any) -> Path:
    """A model folder as the `model` channel delivers it; its path."""
    (built or model(**shape)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def run_document(*stages: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """A complete run file around ``stages``, as plain data for `parse_run_spec`."""
    return {
        "name": "tiny",
        "model": {"source": "s3://bucket/base/"},
        "stages": list(stages),
        "compute": {
            "ladder": [{"instance_type": "ml.m5.xlarge", "spot": False}],
            "max_runtime_hours": 1.0,
        },
        **extra,
    }


def sft_stage(**changes: Any) -> dict[str, Any]:
    """An SFT stage on the grid task."""
    stage: dict[str, Any] = {
        "name": "warmup",
        "method": "sft",
        "data": {"train": "s3://bucket/train.jsonl"},
        "sft": {"batch_size": 32, "max_length": 192},
        "optimizer": {
            "learning_rate": 2e-3,
            "betas": [0.9, 0.95],
            "lr_scheduler": "cosine",
            "warmup_steps": 50,
            "min_lr_ratio": 0.1,
        },
        "max_steps": 200,
    }
    return {**stage, **changes}


def grpo_stage(**changes: Any) -> dict[str, Any]:
    """A GRPO stage on the grid task: strict grid reward, dyadic weights, no KL."""
    stage: dict[str, Any] = {
        "name": "strict",
        "method": "grpo",
        "data": {"train": "s3://bucket/train.jsonl"},
        "prompt": {"max_prompt_length": 64},
        "rewards": [
            {"name": "format", "function": "think_answer_format", "weight": 0.25},
            {
                "name": "grid",
                "function": "grid_navigation",
                "weight": 1.0,
                "parameters": {"mode": "strict"},
            },
        ],
        "grpo": {"group_size": 8, "prompts_per_step": 8, "kl": None},
        "rollout": {"max_response_length": 72, "log_samples": 4},
        "optimizer": {"learning_rate": 2e-4},
        "max_steps": 300,
    }
    return {**stage, **changes}


class FolderCheckpointer:
    """Checkpoints in a folder by torch.distributed.checkpoint, one every `every` steps.

    `stop_after`: answer STOP after that step. `weights`: a checkpoint folder to continue from.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        every: int = 1,
        stop_after: int | None = None,
        weights: Path | None = None,
    ) -> None:
        self.folder = folder
        self.every = every
        self.stop_after = stop_after
        self.weights = weights
        self.rows: dict[int, dict[str, Any]] = {}
        self.best: Best | None = None

    def load_weights(self, weights: PolicyWeights) -> bool:
        if self.weights is None:
            return False
        dcp.load({"app": weights}, checkpoint_id=self.weights)
        return True

    def restore(self, state: TrainState) -> bool:
        steps = sorted(self.folder.glob("step-*")) if self.folder else []
        if not steps:
            return False
        dcp.load({"app": state}, checkpoint_id=steps[-1])
        return True

    def after_step(
        self,
        state: TrainState,
        step: int,
        metrics: Mapping[str, Any],
        *,
        last: bool,
        step_seconds: float,  # noqa: ARG002 - `Checkpointer`
    ) -> Decision:
        self.rows[step] = dict(metrics)
        self.best = state.progress.best
        stop = step == self.stop_after
        if self.folder is not None and (last or stop or step % self.every == 0):
            dcp.save({"app": state}, checkpoint_id=self.folder / f"step-{step:04d}")
        return Decision.STOP if stop else Decision.CONTINUE

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to release."""


def inputs(
    root: Path,
    rows: Sequence[dict[str, Any]],
    validation: Sequence[dict[str, Any]] = (),
    *,
    base: Path,
) -> StageInputs:
    """Data files and folders of a stage under ``root``; ``base`` is the model folder."""
    held_out = write_jsonl(root / "validation/validation.jsonl", validation).parent
    code = root / "code"
    code.mkdir(parents=True, exist_ok=True)
    return StageInputs(
        train=write_jsonl(root / "train/train.jsonl", rows).parent,
        validation=held_out if validation else None,
        model=base,
        code=code,
        output=root / "output",
        export=root / "model",
    )


def comparable(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows without what measures time."""
    return {
        step: {
            name: value
            for name, value in row.items()
            if "seconds" not in name and "per_second" not in name
        }
        for step, row in rows.items()
    }


def warm_model(folder: Path, *, steps: int = 60, **shape: Any) -> Path:
    """A model folder after a short SFT: its answers have the right look, end by themselves, and
    differ from each other."""
    base = save_model(folder / "random", **{"hidden": 32, **shape})
    stage = sft_stage(
        max_steps=steps,
        optimizer={"learning_rate": 1e-2, "betas": [0.9, 0.95], "warmup_steps": 5},
    )
    run_stage(
        parse_run_spec(run_document(stage)),
        0,
        inputs(folder, sft_rows(all_pairs()), base=base),
        world=single_process(),
        checkpointer=FolderCheckpointer(),
        run_id="warm",
        attempt=1,
        generation="g1",
    )
    return folder / "model"
