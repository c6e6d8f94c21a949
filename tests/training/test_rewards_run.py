"""Every kind of reward source at once in a real GRPO run on CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.failures import ExitCode
from contracts.rewards import RewardSpec
from contracts.run_spec import parse_run_spec
from tests.training import tiny
from tests.training.reward_models import save_classifier, save_judge
from tests.training.test_rewards_judge import Service, ok
from training_container.engine.distributed import single_process
from training_container.failure import StageError
from training_container.rewards.interface import (
    FailureKind,
    RewardConfigError,
    RewardRequest,
    Sample,
)
from training_container.rewards.sources import SourceContext, build_source
from training_container.trainer import run_stage

torch.set_num_threads(1)


class Classifier:
    """vLLM's `/v1/models` and `/classify`: the logit is the length of the last message."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.broken = False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                self.answer(200 if known else 404, {"data": [{"id": "rm"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.requests.append({**body, "path": self.path})
                logit = len(body["messages"][-1]["content"])
                data = [] if service.broken else [{"index": 0, "probs": [logit, 0]}]
                self.answer(200 if self.path == "/classify" else 404, {"data": data})

            def answer(self, status: int, content: Any) -> None:
                raw = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def served() -> Iterator[Classifier]:
    made = Classifier()
    yield made
    made.server.shutdown()
    made.server.server_close()


def served_source(url: str) -> RewardSpec:
    document = {"name": "served", "weight": 1, "model": {"endpoint": {"url": url}}}
    return RewardSpec.model_validate_json(json.dumps(document))


def test_a_classifier_behind_vllm_gives_its_logit(served: Classifier) -> None:
    """modelscope/ms-swift#10058: a reward model served apart from the trainer."""
    source = build_source(served_source(served.url), SourceContext())
    source.prepare()
    prompt = ({"role": "user", "content": "hi"},)
    samples = (Sample("four", prompt=prompt), Sample("sixsix", prompt=prompt))
    assert source.score(RewardRequest(samples)).values == [4.0, 6.0]
    request = served.requests[0]
    assert request["path"] == "/classify"
    assert request["use_activation"] is False
    assert request["model"] == "rm"
    assert request["messages"][0] == {"role": "user", "content": "hi"}
    served.broken = True
    lost = source.score(RewardRequest(samples))
    assert lost.values == [None, None]
    assert lost.failures[0].kind is FailureKind.UNPARSABLE
    served.server.shutdown()
    served.server.server_close()
    with pytest.raises(RewardConfigError, match="--runner pooling"):
        build_source(served_source(served.url), SourceContext()).prepare()


def test_function_file_two_models_and_a_judge_train_together(
    served: Classifier, tmp_path: Path
) -> None:
    policy = tiny.save_model(tmp_path / "policy", hidden=32)
    classifier = save_classifier(tmp_path / "classifier")
    judge = {
        "source": str(save_judge(tmp_path / "judge")),
        "query_template": "{{ 'RIGHT' if completion | length > 9 else 'LEFT' }}",
        "temperature": 0,
        "max_tokens": 16,
        "cache": False,
    }
    rewards = [
        {"name": "format", "function": "think_answer_format", "weight": 0.5},
        {"name": "mine", "file": "mine.py", "function": "reward", "weight": 0.25},
        {"name": "rm", "model": {"source": str(classifier), "device": "cpu"}, "weight": 0.125},
        {"name": "served", "model": {"endpoint": {"url": served.url}}, "weight": 0.125},
        {"name": "judge", "judge": judge, "weight": 0.25},
    ]
    stage = tiny.grpo_stage(
        rewards=rewards,
        grpo={"group_size": 4, "prompts_per_step": 2, "kl": None},
        rollout={"max_response_length": 8, "log_samples": 0},
        max_steps=2,
    )
    inputs = tiny.inputs(tmp_path, tiny.grpo_rows(tiny.all_pairs()[:8]), base=policy)
    (inputs.code / "mine.py").write_text(
        "def reward(completions, problem, ground_truth):\n"
        "    assert all('How to move' in p for p in problem)\n"
        "    return [len(set(text)) / 10 for text in completions]\n"
    )
    checkpointer = tiny.FolderCheckpointer()
    run_stage(
        parse_run_spec(tiny.run_document(stage)),
        0,
        inputs,
        world=single_process(),
        checkpointer=checkpointer,
        run_id="mixed",
        generation="g1",
        attempt=1,
    )
    row = checkpointer.rows[2]
    for source in rewards:
        assert row[f"reward/{source['name']}/failure_rate"] == 0
    assert row["reward/judge/asked"] == 8
    assert row["reward/judge"] in [pytest.approx(0.1 + 0.1 * right) for right in range(9)]
    weighted = sum(source["weight"] * row[f"reward/{source['name']}"] for source in rewards)
    assert row["reward"] == pytest.approx(weighted, abs=1e-5)
    assert len(served.requests) >= 16


def test_a_judge_that_dies_in_mid_run_ends_the_run_with_the_reason_and_one_that_is_down_at_once(
    tmp_path: Path,
) -> None:
    """The steps before it died are kept; nothing is loaded for a run whose judge is down."""
    policy = tiny.save_model(tmp_path / "policy", hidden=32)
    service = Service()
    dry_run = 4  # rows that are judged before anything loads
    service.reply = lambda _: (
        ok("Reward: 0.5") if len(service.requests) <= dry_run + 8 else (503, "overloaded", {})
    )
    address = {"url": service.url, "max_retries": 0}
    judge = {"endpoint": address, "cache": False}
    stage = tiny.grpo_stage(
        rewards=[{"name": "judge", "judge": judge, "weight": 1.0}],
        grpo={"group_size": 4, "prompts_per_step": 2, "kl": None},
        rollout={"max_response_length": 8, "log_samples": 0},
        max_steps=3,
    )
    stage["data"] = {**stage["data"], "validation": None}
    inputs = tiny.inputs(tmp_path, tiny.grpo_rows(tiny.all_pairs()[:8]), base=policy)
    checkpointer = tiny.FolderCheckpointer()

    def train() -> None:
        run_stage(
            parse_run_spec(tiny.run_document(stage)), 0, inputs, world=single_process(),
            checkpointer=checkpointer, run_id="dying", generation="g1", attempt=1,
        )  # fmt: skip

    with pytest.raises(StageError, match=r"'judge' failed on 8 of 8.*max_failure_rate") as died:
        train()
    assert died.value.code is ExitCode.REWARD
    assert sorted(checkpointer.rows) == [1]
    service.stop()
    (inputs.model / "model.safetensors").unlink()
    with pytest.raises(StageError, match="vllm serve MODEL") as down:
        train()
    assert down.value.code is ExitCode.REWARD
