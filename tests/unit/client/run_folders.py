"""A run file with everything it names, in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

REWARD = """\
import helper

def score(completions, answer, **columns):
    return helper.all(completions)
"""


def run_folder(folder: Path, **changes: Any) -> Path:
    """Write a run of one stage with local data, model, template and reward; its run file's path.

    ``changes`` replaces keys of the only stage.
    """
    (folder / "data").mkdir(parents=True)
    (folder / "model").mkdir()
    rows = [{"problem": f"{n}+1", "answer": str(n + 1), "screen": "x"} for n in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data/train.jsonl").write_text(lines)
    (folder / "model/config.json").write_text("{}")
    (folder / "model/.cache").write_text("not a part of the model")
    (folder / "prompt.jinja").write_text("{{ screen }}\n{{ content | trim }}")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "helper.py").write_text("import json\n\ndef all(c):\n    return [1.0 for _ in c]\n")
    stage = {
        "name": "only",
        "method": "grpo",
        "data": {"train": "data/train.jsonl"},
        "prompt": {"template_file": "prompt.jinja"},
        "rewards": [{"name": "mine", "file": "rewards.py", "function": "score", "weight": 1.0}],
        "max_steps": 3,
        **changes,
    }
    document = {
        "name": "sums",
        "model": {"source": "./model"},
        "stages": [stage],
        "compute": {"ladder": [{"instance_type": "ml.m5.xlarge"}]},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
