"""The hub's sandbox function and the try-out command are the trainer's reward plane."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.reward_trial import RewardSourceView, RewardTestRequest, RewardTestView
from infra.bundle import reward_code_folder
from tests.training.refusals import LANDLOCK, UNSHARE, refusing
from training_container.engine.advantages import fuse_rewards
from training_container.rewards.interface import RewardRequest
from training_container.rewards.plane import RewardPlane
from training_container.rewards.sources import SourceContext
from training_container.rewards.trial import columns_of, samples_of, try_out

SAMPLES = [
    {"completion": text, "ground_truth": "4", "columns": {"answer": "4", "colour": colour}}
    for text, colour in (("4", "red"), ("5", "blue"))
]
FORBIDDEN = {"torch", "transformers", "ray", "boto3", "lambdas", "client"}

_AS_LAMBDA = """
import json, sys
from training_container.rewards.reward_dry_run import handler
answer = handler(json.load(sys.stdin), None)
loaded = {name.partition(".")[0] for name in sys.modules}
import training_container
print(json.dumps([answer, sorted(loaded), training_container.__file__]))
"""


def in_lambda(
    request: dict[str, Any], code: Path, host: str = ""
) -> tuple[RewardTestView, set[str]]:
    """The function's answer from its own zip, in a process with nothing of ours beside it."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(code),
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1769",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    done = subprocess.run(
        [sys.executable, "-c", host + _AS_LAMBDA],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        cwd=code,
        check=True,
    )
    answer, loaded, where = json.loads(done.stdout)
    assert Path(where).is_relative_to(code)
    return RewardTestView.model_validate(answer), set(loaded)


@pytest.fixture(scope="module")
def code() -> Path:
    return reward_code_folder()


FILES = {
    "columns": (
        "def f(completions, ground_truth, colour, messages):\n"
        "    rows = zip(completions, ground_truth, colour, messages)\n"
        "    return [(c == t) + (k == 'red') + len(m) - 1 for c, t, k, m in rows]"
    ),
    "any": "def f(completions, **columns): return [len(columns['colour'][0])] * len(completions)",
    "plain": "def f(predict, ground_truth): return float(predict == ground_truth)",
    "easyr1": "def f(reward_inputs):\n"
    "    return [{'overall': i['response'] == '4', 'size': 2} for i in reward_inputs]",
    "sequential": "REWARD_TYPE = 'sequential'\ndef f(x): return {'overall': x['response'] == '4'}",
    "async": "async def f(completions): return [c == '4' for c in completions]",
    "class": "class f:\n"
    "    def __call__(self, inputs): return [r['colour'] == 'red' for r in inputs]",
    "plugin": "def f(inputs): return [r['messages'][-1]['content'] == '4' for r in inputs]",
    "environment": "class f:\n    def reset(self, row): self.row = row\n"
    "    def step(self, text): return None, float(text == self.row['ground_truth']), True",
    "helper": "from beside import g\ndef f(completions): return [g(c) for c in completions]",
    "raises": "def f(completions):\n    return [1 / 0]",
    "one_raises": "def f(predict, ground_truth): return 1 / (5 - int(predict))",
    "short": "def f(completions): return [1]",
    "inf": "def f(completions): return [float('inf'), float('nan')]",
    "exits": "import sys\ndef f(completions): sys.exit(3)",
    "dies": "import os\ndef f(completions): os._exit(7)",
    "no_reward": "def f(a, b, c): return 1",
    "hungry": "def f(completions): return ['x' * 10**11]",
    "chat": "def f(completions, messages): return [len(chat) for chat in messages]",
    "prints": "def f(completions):\n    print('[9, 9]')\n    return [0.5, None]",
}

BESIDE = "def g(text): return len(text)"


def test_the_function_scores_and_fails_exactly_as_the_trainer_does(
    code: Path, tmp_path: Path
) -> None:
    """Every interface and every way to fail, in the zip and by the trainer's own plane."""
    policies = ("none", "zero", "raise")
    rewards = [
        {"name": name, "weight": 1.0, "file": f"{name}.py", "function": "f", "memory_mb": 1024,
         "on_error": policies[number % 3], "max_failure_rate": 1.0}
        for number, name in enumerate(FILES)
    ]  # fmt: skip
    files = {f"{name}.py": text for name, text in FILES.items()}
    files["beside.py"] = BESIDE
    for start in range(0, len(rewards), 10):
        part = rewards[start : start + 10]
        request = {"rewards": part, "files": files, "samples": SAMPLES}
        view, loaded = in_lambda(request, code)
        assert not loaded & FORBIDDEN
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        asked = RewardTestRequest.model_validate(request)
        context = SourceContext(tmp_path, columns_of(asked), workers=1)
        here = try_out(asked, context)
        assert list(map(essence, view.sources)) == list(map(essence, here.sources))
        assert view.rewards == here.rewards


def essence(source: RewardSourceView) -> dict[str, Any]:
    """Without times and the folder's name in tracebacks."""
    plain = source.model_dump(exclude={"seconds", "metrics"})
    for failure in plain["failures"]:
        failure["detail"] = failure["detail"].splitlines()[-1]
    plain["reason"] = plain["reason"] and plain["reason"].splitlines()[-1]
    return plain


WANTED = {
    "columns": [2.0, 0.0], "any": [3.0, 3.0], "plain": [1.0, 0.0], "easyr1": [1.0, 0.0],
    "sequential": [1.0, 0.0], "async": [1.0, 0.0], "class": [1.0, 0.0], "plugin": [1.0, 0.0],
    "environment": [1.0, 0.0], "helper": [1.0, 1.0], "inf": [None, None], "prints": [0.5, None],
    "chat": [1.0, 1.0], "raises": [None, None], "one_raises": [1.0, None], "dies": [None, None],
}  # fmt: skip


def test_each_file_gets_the_scores_its_platform_gives_it(tmp_path: Path) -> None:
    """The table behind the comparison: two sides that agree could both be wrong."""
    for name in (*WANTED, "no_reward"):
        (tmp_path / f"{name}.py").write_text(FILES[name])
    (tmp_path / "beside.py").write_text(BESIDE)
    rewards = [
        {"name": name, "weight": 1.0, "file": f"{name}.py", "function": "f",
         "max_failure_rate": 1.0}
        for name in (*WANTED, "no_reward")
    ]  # fmt: skip
    request = RewardTestRequest.model_validate({"rewards": rewards, "samples": SAMPLES})
    view = try_out(request, SourceContext(tmp_path, columns_of(request), workers=1))
    found = {source.name: source for source in view.sources}
    assert {name: found[name].scores for name in WANTED} == WANTED
    assert found["no_reward"].state == "failed"
    assert "is no reward signature" in str(found["no_reward"].reason)


def test_the_trial_s_scores_are_those_of_a_training_step(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(FILES["one_raises"])
    rewards = [
        {"name": "mine", "weight": 0.7, "file": "r.py", "function": "f", "on_error": "zero"},
        {"name": "exact", "weight": 0.3, "function": "exact_match"},
        {"name": "some", "weight": 2.0, "function": "regex", "parameters": {"pattern": "4"}},
    ]
    request = RewardTestRequest.model_validate({"rewards": rewards, "samples": SAMPLES})
    context = SourceContext(tmp_path, ("colour",), workers=1)
    view = try_out(request, context)
    with RewardPlane(request.rewards, context) as plane:
        plane.prepare()
        result = plane.score(RewardRequest(tuple(samples_of(request))))
    assert [source.scores for source in view.sources] == [s.scores for s in result.sources]
    weights = torch.tensor(result.weights, dtype=torch.float64)
    scores = torch.tensor(result.scores_B_K, dtype=torch.float64)
    fused = fuse_rewards(scores, weights, mode="sum_then_normalize", group_size=2)
    assert view.rewards == pytest.approx(fused.tolist())


def test_a_column_wins_over_what_the_trainer_provides_here_too(tmp_path: Path) -> None:
    """Data with a chat has `messages` of its own, the reference answer among them."""
    (tmp_path / "r.py").write_text(FILES["chat"])
    mine = {"name": "mine", "weight": 1.0, "file": "r.py", "function": "f"}
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    sample = {"completion": "4", "prompt": chat[:2], "columns": {"messages": chat[:1]}}
    request = RewardTestRequest.model_validate({"rewards": [mine], "samples": [sample]})
    context = SourceContext(tmp_path, columns_of(request), workers=1)
    assert try_out(request, context).sources[0].scores == [1.0]
    bare = request.model_copy(update={"samples": [request.samples[0].model_copy(update={
        "columns": {}})]})  # fmt: skip
    assert try_out(bare, SourceContext(tmp_path, workers=1)).sources[0].scores == [3.0]


def test_what_the_function_cannot_run_is_refused_in_words(code: Path) -> None:
    rewards = [
        {"name": "judge", "weight": 1.0, "judge": {"endpoint": {"url": "http://judge/v1"}}},
        {"name": "model", "weight": 1.0, "model": {"source": "s3://bucket/rm/"}},
        {"name": "online", "weight": 1.0, "file": "r.py", "function": "f", "network": True},
        {"name": "plugin", "weight": 1.0, "file": "r.py", "function": "f",
         "parameters": {"model": {"weights": "hub/id"}}},
        {"name": "mathematics", "weight": 2.0, "function": "open_math"},
    ]  # fmt: skip
    request = {"rewards": rewards, "files": {"r.py": FILES["async"]}, "samples": SAMPLES}
    view, loaded = in_lambda(request, code)
    assert [source.state for source in view.sources] == [*["refused"] * 4, "scored"]
    assert all("grpohub rewards test" in str(source.reason) for source in view.sources[:4])
    assert view.rewards == [2.0, 0.0]
    assert not loaded & FORBIDDEN


_STEALS = """
import os, pathlib
def f(predict, ground_truth):
    seen = b"".join(map(str.encode, os.environ.values()))
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            seen += (folder / "environ").read_bytes()
        except OSError:
            pass
    return float(b"secret" in seen)
"""


def test_the_function_s_credentials_are_out_of_reach_where_the_host_contains_nothing(
    code: Path,
) -> None:
    """In Lambda there are no namespaces, and a worker has the function's user. What the host
    refuses is said in the answer."""
    mine = {"name": "mine", "weight": 1.0, "file": "r.py", "function": "f"}
    request = {"rewards": [mine], "files": {"r.py": _STEALS}, "samples": SAMPLES}
    host = refusing([(UNSHARE, errno.EPERM), (LANDLOCK, errno.ENOSYS)])
    [source] = in_lambda(request, code, host)[0].sources
    assert source.scores == [0.0, 0.0]
    assert source.contained == {
        "network": "none (seccomp; the host refuses user namespaces (Operation not permitted))",
        "files": "open (no Landlock here (Function not implemented))",
        "credentials": "variables removed; the process that holds them is out of reach",
        "processes": "own process group (the host refuses user namespaces"
        " (Operation not permitted))",
    }


def test_a_file_that_hangs_is_ended_within_the_function_s_time(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training_container.rewards import reward_dry_run

    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "1769")
    monkeypatch.setattr(reward_dry_run, "_BATCH_SECONDS", 1.0)
    monkeypatch.setattr(reward_dry_run, "_START_SECONDS", 2.0)
    monkeypatch.setattr(reward_dry_run, "_hide", lambda: None)
    sources = [
        {"name": name, "weight": 1.0, "file": f"{name}.py", "function": "f"}
        for name in ("batch", "start")
    ]
    files = {
        "batch.py": "def f(completions):\n    while True: pass",
        "start.py": "while True: pass\ndef f(completions): pass",
    }
    answer = reward_dry_run.handler({"rewards": sources, "files": files, "samples": SAMPLES}, None)
    batch, start = answer["sources"]
    assert [failure["kind"] for failure in batch["failures"]] == ["timeout", "timeout"]
    assert start["state"] == "failed"
    assert "did not start" in start["reason"]
