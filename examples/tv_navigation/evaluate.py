"""Held-out accuracy of a model folder, apart from the trainer: one greedy answer per question.

python -m examples.tv_navigation.evaluate MODEL_FOLDER [--data build/validation.jsonl]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

__all__ = ["accuracy", "reaches_goal"]

_ANSWER = re.compile(r"<think>.*</think>\s*<answer>(\[.*\])</answer>", re.DOTALL)
_STEPS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}


def reaches_goal(answer: str, ground_truth: str) -> bool:
    """Whether the keys in ``answer`` lead from start to goal without leaving the screen."""
    match = _ANSWER.fullmatch(answer.strip())
    if match is None:
        return False
    try:
        keys = ast.literal_eval(match[1])[0]["action"]
    except (ValueError, SyntaxError, IndexError, KeyError, TypeError):
        return False
    truth = json.loads(ground_truth)
    row, column = truth["start"]
    for key in keys:
        if key not in _STEPS:
            return False
        row, column = row + _STEPS[key][0], column + _STEPS[key][1]
        if not (0 <= row < truth["rows"] and 0 <= column < truth["cols"]):
            return False
    return [row, column] == truth["goal"]


def accuracy(model_folder: Path, data: Path, template: Path) -> float:
    """Share of the held-out questions whose greedy answer reaches the goal, from 0 to 1."""
    import torch
    from jinja2.sandbox import SandboxedEnvironment
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    render = SandboxedEnvironment().from_string(template.read_text()).render
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": render(content=row["problem"], **row)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for row in rows
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=80,
            do_sample=False,
        )
    answers = tokenizer.batch_decode(
        tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = [
        reaches_goal(answer, row["ground_truth"]) for answer, row in zip(answers, rows, strict=True)
    ]
    return sum(right) / len(right)


def main() -> None:
    """Command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=here / "build" / "validation.jsonl")
    parser.add_argument("--template", type=Path, default=here / "prompt.jinja")
    arguments = parser.parse_args()
    print(f"{accuracy(arguments.model, arguments.data, arguments.template):.3f}")


if __name__ == "__main__":
    main()
