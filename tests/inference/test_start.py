"""What must hold before an engine starts: settings, the model's files, the engine's command."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from contracts.compute import EngineSpec
from inference_container import engines
from inference_container.engines import Resolved, choose_engine, gpu_count, tensor_parallel_size
from inference_container.fetch import fetch_adapters, fetch_chat_template
from inference_container.settings import Settings, StartError
from inference_container.verify import verify_model
from tests.inference.container import started
from tests.inference.tiny_model import write_adapter, write_manifest


@pytest.fixture
def base(tmp_path: Path, model_base: Path) -> Path:
    """A copy of the model that a test may spoil."""
    shutil.copytree(model_base / "model", tmp_path / "model")
    return tmp_path


def settings_of(base: Path, deploy: dict[str, Any] | None = None, **variables: str) -> Settings:
    return Settings.from_environment(
        {"SAGEMAKER_BASE_DIR": str(base), "GRPOHUB_DEPLOY": json.dumps(deploy or {}), **variables}
    )


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_altered_weights_are_a_start_failure_that_names_the_file(base: Path) -> None:
    alter(base / "model/model.safetensors")
    with started(base) as container:
        code = container.process.wait(60)
    assert code == 3
    last = container.log().strip().splitlines()[-1]
    assert last.startswith("grpohub: start failed: model.safetensors was altered")


def test_a_setting_that_no_engine_knows_is_a_start_failure(base: Path) -> None:
    with started(base, {"max_model_length": 5}) as container:
        code = container.process.wait(60)
    assert code == 3
    assert "start failed: GRPOHUB_DEPLOY: deploy.engine.max_model_length" in container.log()


def test_the_exported_model_is_verified(base: Path) -> None:
    manifest = verify_model(base / "model")
    assert verify_model(base / "model", version=manifest.version) == manifest


def test_a_missing_file_is_named(base: Path) -> None:
    (base / "model/tokenizer.json").unlink()
    with pytest.raises(StartError, match=r"tokenizer\.json is missing"):
        verify_model(base / "model")


def test_a_shortened_file_is_named(base: Path) -> None:
    path = base / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StartError, match=r"model.safetensors has \d+ bytes, exported were \d+"):
        verify_model(base / "model")


def test_a_model_without_a_manifest_is_refused(base: Path) -> None:
    (base / "model/model.json").unlink()
    with pytest.raises(StartError, match=r"model\.json is missing"):
        verify_model(base / "model")


def test_a_manifest_that_fits_other_files_is_refused(base: Path) -> None:
    """Weights and manifest replaced together: only the published version tells."""
    version = verify_model(base / "model").version
    alter(base / "model/model.safetensors")
    write_manifest(base / "model")
    with pytest.raises(StartError, match="published was"):
        verify_model(base / "model", version=version)


def test_a_manifest_cannot_lead_out_of_the_folder(base: Path) -> None:
    path = base / "model/model.json"
    document = json.loads(path.read_text())
    document["files"][0]["path"] = "../outside"
    path.write_text(json.dumps(document))
    with pytest.raises(StartError, match="leads out"):
        verify_model(base / "model")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapters/tuned/extra.json", "added_tokens.json"]
)
def test_a_file_that_was_not_exported_is_refused_by_name(base: Path, name: str) -> None:
    (base / "model" / name).write_bytes(b"{}")
    with pytest.raises(StartError, match=f"{name} was not exported"):
        verify_model(base / "model")


def test_what_stands_for_a_folder_in_s3_is_no_file_of_the_model(base: Path) -> None:
    for name in ("adapters_$folder$", "adapters/notes"):
        (base / "model" / name).touch()
    (base / "model/empty").mkdir()
    verify_model(base / "model")
    (base / "model/merges.txt").touch()  # even empty, an engine would read it
    with pytest.raises(StartError, match=r"merges\.txt was not exported"):
        verify_model(base / "model")


def test_a_port_that_is_none_is_named() -> None:
    with pytest.raises(StartError, match="SAGEMAKER_BIND_TO_PORT"):
        Settings.from_environment({"SAGEMAKER_BIND_TO_PORT": "http"})


def vllm_words(
    base: Path, deploy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, gpus: int, **more: Any
) -> list[str]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    resolved = Resolved(settings_of(base, deploy), ("run", "default"), **more)
    engine = choose_engine(resolved, gpus=gpus)
    assert engine.name == "vllm"
    return list(engine.command)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_vllm_gets_every_setting_under_its_own_name(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deploy = {
        "max_model_len": 128,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "gpu_memory_utilization": 0.8,
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "trust_remote_code": True,
        "lora_adapters": [{"name": "tuned", "source": "adapters/tuned"}],
    }
    adapter = write_adapter(tmp_path / "rank-20", rank=20)
    words = vllm_words(
        base,
        deploy,
        monkeypatch,
        gpus=4,
        adapters={"tuned": adapter},
        chat_template=Path("/chat.jinja"),
    )
    assert after(words, "--max-model-len") == "128"
    assert after(words, "--dtype") == "bfloat16"
    assert after(words, "--quantization") == "fp8"
    assert after(words, "--gpu-memory-utilization") == "0.8"
    assert after(words, "--reasoning-parser") == "qwen3"
    assert after(words, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in words
    assert "--trust-remote-code" in words
    assert after(words, "--chat-template") == "/chat.jinja"
    assert after(words, "--tensor-parallel-size") == "4"
    assert after(words, "--lora-modules") == f"tuned={adapter}"
    assert after(words, "--max-lora-rank") == "32"
    assert after(words, "--middleware") == "inference_container.middleware.EngineHeader"
    assert after(words, "--port") == "8080"
    assert int(after(words, "--shutdown-timeout")) < 30, "SageMaker kills after 30 s"
    known = {*EngineSpec.model_fields} - {"chat_template_file", "lora_adapters"}
    flags = {word.removeprefix("--").replace("-", "_") for word in words}
    assert known <= flags, "a setting of the run file has no effect"


def test_settings_that_only_vllm_has_are_refused_without_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    resolved = Resolved(settings_of(base, {"quantization": "fp8"}), ("run",), {}, None)
    with pytest.raises(StartError, match=r"deploy\.engine\.quantization needs vLLM"):
        choose_engine(resolved, gpus=0)


def test_a_vision_language_model_is_refused_where_images_could_not_be_served(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    path = base / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vision_config": {}}))
    with pytest.raises(StartError, match="vision-language model needs vLLM"):
        choose_engine(Resolved(settings_of(base), ("run",), {}, None), gpus=0)


@pytest.mark.parametrize(("gpus", "size"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_the_model_is_split_over_as_many_gpus_as_its_heads_allow(
    base: Path, gpus: int, size: int
) -> None:
    assert tensor_parallel_size(base / "model", None, gpus) == size


def shape(heads: int, kv_heads: int | None, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "gpus", "size"),
    [
        pytest.param(shape(28, 4, 18944), 8, 4, id="Qwen2.5-7B"),
        pytest.param(shape(14, 2, 4864), 8, 2, id="Qwen2.5-0.5B"),
        pytest.param(shape(12, 2, 8960), 8, 4, id="Qwen2.5-1.5B"),
        pytest.param(shape(40, 8, 13824), 8, 8, id="Qwen2.5-14B"),
        pytest.param(shape(32, 4, 6144, moe_intermediate_size=768), 8, 8, id="Qwen3-30B-A3B"),
        pytest.param(shape(16, 4, 1024, moe_intermediate_size=88), 16, 8, id="narrow experts"),
        pytest.param(shape(12, None, 768), 8, 6, id="no grouped heads"),
        pytest.param(shape(8, 1, 1000), 8, 8, id="one KV head"),
        pytest.param(shape(8, 8, 1020), 8, 4, id="narrow MLP"),
        pytest.param({"text_config": shape(28, 4, 18944)}, 8, 4, id="nested"),
    ],
)
def test_the_model_is_split_only_where_every_part_gets_the_same(
    tmp_path: Path, config: dict[str, Any], gpus: int, size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tensor_parallel_size(tmp_path, None, gpus) == size
    assert tensor_parallel_size(tmp_path, size, gpus) == size


@pytest.mark.parametrize(
    ("config", "wanted", "gpus", "words"),
    [
        (shape(4, 2, 256), 4, 2, "is 4; the instance has 2 GPUs"),
        (shape(4, 2, 256), 3, 4, "3 does not divide num_attention_heads 4"),
        (shape(28, 4, 18944), 7, 8, "7 neither divides num_key_value_heads 4 nor is a multiple"),
        (shape(12, 2, 8960), 6, 8, "6 does not divide intermediate_size 8960"),
        (shape(8, 8, 64, moe_intermediate_size=12), 8, 8, "8 does not divide moe_intermediate_si"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], wanted: int, gpus: int, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=words):
        tensor_parallel_size(tmp_path, wanted, gpus)


def test_gpus_are_those_the_container_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "glob", lambda _: ["/dev/nvidia0", "/dev/nvidia1"])
    assert gpu_count({}) == 2
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert gpu_count({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="runs")
        yield client


def test_adapters_come_from_s3_by_their_prefix(base: Path, bucket: Any, tmp_path: Path) -> None:
    for file in write_adapter(tmp_path / "source").iterdir():
        bucket.upload_file(str(file), "runs", f"runs/other/adapter/{file.name}")
    bucket.put_object(Bucket="runs", Key="runs/other/adapter/", Body=b"")  # the console's mark
    deploy = {"lora_adapters": [{"name": "tuned", "source": "s3://runs/runs/other/adapter/"}]}
    folder = fetch_adapters(settings_of(base, deploy))["tuned"]
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    missing = {"lora_adapters": [{"name": "tuned", "source": "s3://runs/nothing/"}]}
    with pytest.raises(StartError, match="adapter tuned: s3://runs/nothing/ holds no"):
        fetch_adapters(settings_of(tmp_path / "fresh", missing))
    unreachable = {"lora_adapters": [{"name": "tuned", "source": "s3://nobody/x/"}]}
    with pytest.raises(StartError, match="NoSuchBucket"):
        fetch_adapters(settings_of(base, unreachable))


def test_the_chat_template_of_the_run_is_used(base: Path, bucket: Any) -> None:
    bucket.put_object(Bucket="runs", Key="runs/r/code/prompts/chat.jinja", Body=b"template")
    deploy = {"chat_template_file": "prompts/chat.jinja"}
    path = fetch_chat_template(settings_of(base, deploy, GRPOHUB_CODE_URI="s3://runs/runs/r/code/"))
    assert path is not None
    assert path.read_text() == "template"
    with pytest.raises(StartError, match="neither in the model nor in the run's files"):
        fetch_chat_template(settings_of(base / "fresh", {"chat_template_file": "other.jinja"}))
