"""Make the data and the untrained base model of the TV navigation example.

The screen of a television is a grid of named buttons. The model is told the screen and asked how to
move from one button to another; it answers with its reasoning and the keys to press:

    <think>Music row 0 column 1, Help row 2 column 0, so DOWN 2 LEFT 1</think>
    <answer>[{'action': ['DOWN', 'DOWN', 'LEFT']}]</answer>

One in five of the 240 ordered pairs of buttons is held out for validation. The model is a Qwen3 of
about one million parameters with its own tokenizer, initialised at random: it knows nothing before
the SFT stage.

    python -m examples.tv_navigation.make_data --out examples/tv_navigation/build
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Screen", "main", "make"]

BUTTONS = """
Home Search Apps Live Guide Movies Series Kids
Music News Sports Games Store Library Settings Help
""".split()  # noqa: SIM905
SIDE = 4
HELD_OUT_SHARE = 0.2
PIECES = (
    "<think>",
    "</think>",
    " <answer>[{'action': ['",
    "', '",
    "']}]</answer>",
    " row ",
    " column ",
)
"""Parts of every answer that are one token each, as chat models have for their tags."""
END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Screen:
    """A square grid of named buttons; cells are (row, column), row 0 on top."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.cell = {name: divmod(index, SIDE) for index, name in enumerate(names)}

    def __str__(self) -> str:
        rows = (self.names[row * SIDE : (row + 1) * SIDE] for row in range(SIDE))
        return "\n".join(" ".join(row) for row in rows)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every ordered pair of different buttons."""
        return ((a, b) for a in self.names for b in self.names if a != b)

    def moves(self, start: str, goal: str) -> list[tuple[str, int]]:
        """(key, times) of the way that goes up or down first."""
        (row, column), (goal_row, goal_column) = self.cell[start], self.cell[goal]
        down, right = goal_row - row, goal_column - column
        way = [
            ("DOWN" if down > 0 else "UP", abs(down)),
            ("RIGHT" if right > 0 else "LEFT", abs(right)),
        ]
        return [(key, times) for key, times in way if times]

    def demonstration(self, start: str, goal: str) -> str:
        """A worked answer for supervised fine-tuning."""
        places = ", ".join(
            f"{name} row {self.cell[name][0]} column {self.cell[name][1]}" for name in (start, goal)
        )
        way = self.moves(start, goal)
        counts = " ".join(f"{key} {times}" for key, times in way)
        keys = [key for key, times in way for _ in range(times)]
        return f"<think>{places}, so {counts}</think> <answer>[{{'action': {keys}}}]</answer>"

    def row(self, start: str, goal: str) -> dict[str, str]:
        """One row of the data set."""
        truth = {"start": self.cell[start], "goal": self.cell[goal], "rows": SIDE, "cols": SIDE}
        return {
            "screen": str(self),
            "problem": f"How to move from '{start}' to '{goal}'?",
            "demonstration": self.demonstration(start, goal),
            "ground_truth": json.dumps(truth),
        }


def make(out: Path, *, seed: int = 0) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `model/` under ``out``; same seed, same bytes."""
    rng = random.Random(seed)
    names = list(BUTTONS)
    rng.shuffle(names)
    screen = Screen(names)
    rows = [screen.row(start, goal) for start, goal in screen.pairs()]
    rng.shuffle(rows)
    held_out = int(len(rows) * HELD_OUT_SHARE)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "validation.jsonl", rows[:held_out])
    _write(out / "train.jsonl", rows[held_out:])
    _make_model(out / "model", rows, seed=seed)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _make_model(folder: Path, rows: list[dict[str, str]], *, seed: int) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["\n".join([*row.values(), "user", "assistant"]) for row in rows]
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=512,
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.out, seed=arguments.seed)
    print(f"wrote train.jsonl, validation.jsonl and model/ under {arguments.out}")


if __name__ == "__main__":
    main()
