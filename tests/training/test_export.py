"""The exported model: loadable, verified, listed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from contracts.model_manifest import ModelManifest
from contracts.stages import GrpoStage
from tests.training import tiny
from training_container import export
from training_container.engine.batches import TokenSequence
from training_container.engine.distributed import single_process
from training_container.engine.errors import ExportError
from training_container.engine.loading import load_model
from training_container.engine.policy import Policy
from training_container.export import ModelOrigin, export_model

ORIGIN = ModelOrigin("run-1", "strict", 7, "s3://bucket/base/", {"reward": 0.5})
PROBE = TokenSequence.of([5, 6, 7], [8, 9, 10, 11])


def trained(*, tied: bool = True, lora: bool = False, **shape: str) -> Policy:
    """A policy a few steps away from where it started."""
    torch.set_num_threads(1)
    document = tiny.grpo_stage()
    if lora:
        document["lora"] = {"rank": 4, "alpha": 8, "export_adapter": True}
    stage = GrpoStage.model_validate(document, strict=False)
    policy = Policy(tiny.model(hidden=32, tied=tied, **shape), stage, single_process())
    for _ in range(3):
        policy.backward([PROBE], lambda _micro, logp, _entropy: -logp.sum())
        policy.update(1e-2, 1.0)
    return policy


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model.eval()(input_ids=PROBE.ids[None]).logits[0, 2:-1]
    return logits.log_softmax(-1).gather(1, PROBE.ids[3:, None]).squeeze(1)


@pytest.mark.parametrize(("tied", "family"), [(True, "qwen2"), (False, "qwen2"), (True, "qwen3")])
def test_the_folder_is_a_hugging_face_model_that_computes_the_same(
    tmp_path: Path, tied: bool, family: str
) -> None:
    policy = trained(tied=tied, family=family)
    manifest = export_model(policy, tiny.tokenizer(), tmp_path / "model", ORIGIN)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(log_probs(model), policy.log_probs([PROBE])[0], atol=1e-5, rtol=0)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tiny.EOS_ID
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert manifest.parameters == model.num_parameters()


def test_the_manifest_lists_every_file_with_its_sha256(tmp_path: Path) -> None:
    written = export_model(trained(), tiny.tokenizer(), tmp_path, ORIGIN)
    manifest = ModelManifest.model_validate_json((tmp_path / "model.json").read_text())
    assert manifest == written
    assert (manifest.run_id, manifest.step, manifest.metrics) == ("run-1", 7, {"reward": 0.5})
    on_disk = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert {file.path for file in manifest.files} == on_disk - {"model.json"}
    for file in manifest.files:
        body = (tmp_path / file.path).read_bytes()
        assert (file.size, file.sha256) == (len(body), hashlib.sha256(body).hexdigest())


def test_an_adapter_is_merged_and_exported_beside_the_model(tmp_path: Path) -> None:
    policy = trained(lora=True)
    expected = policy.log_probs([PROBE])[0]
    manifest = export_model(policy, tiny.tokenizer(), tmp_path, ORIGIN)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(log_probs(merged), expected, atol=1e-5, rtol=0)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert manifest.adapter == "adapter"
    assert manifest.parameters == merged.num_parameters()
    with_adapter = PeftModel.from_pretrained(tiny.model(hidden=32), tmp_path / "adapter")
    torch.testing.assert_close(log_probs(with_adapter), expected, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "s3://bucket/base/"


MODEL_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class MineConfig(Qwen2Config):
    model_type = "mine"

class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""


def test_a_model_with_code_of_its_own_is_exported_with_it(tmp_path: Path) -> None:
    base = tiny.save_model(tmp_path / "base", hidden=32)
    (base / "modeling_mine.py").write_text(MODEL_CODE)
    config = json.loads((base / "config.json").read_text()) | {
        "model_type": "mine",
        "architectures": ["MineForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    }
    (base / "config.json").write_text(json.dumps(config))
    model = load_model(base, trust_remote_code=True)
    policy = Policy(
        model, GrpoStage.model_validate(tiny.grpo_stage(), strict=False), single_process()
    )
    origin = dataclasses.replace(ORIGIN, trust_remote_code=True)
    manifest = export_model(policy, tiny.tokenizer(), tmp_path / "model", origin)
    assert manifest.architecture == "MineForCausalLM"
    assert "modeling_mine.py" in {file.path for file in manifest.files}
    again = load_model(tmp_path / "model", trust_remote_code=True)
    torch.testing.assert_close(log_probs(again), policy.log_probs([PROBE])[0], atol=1e-5, rtol=0)


def test_a_model_that_computes_something_else_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed merge was once a warning with exit code 0."""
    policy = trained()
    honest = policy.full_weights

    def wrong() -> object:
        return ((n, w * (1.02 if "down_proj" in n else 1.0)) for n, w in honest())

    monkeypatch.setattr(policy, "full_weights", wrong)
    with pytest.raises(ExportError, match="differ by"):
        export_model(policy, tiny.tokenizer(), tmp_path, ORIGIN)
    assert not (tmp_path / export.MANIFEST).exists()


def test_a_lost_chat_template_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny.tokenizer()
    saved = tokenizer.save_pretrained

    def without(folder: Path) -> None:
        saved(folder)
        (folder / "chat_template.jinja").unlink()

    monkeypatch.setattr(tokenizer, "save_pretrained", without)
    with pytest.raises(ExportError, match="chat template"):
        export_model(trained(), tokenizer, tmp_path, ORIGIN)
