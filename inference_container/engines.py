"""The two engines as commands: vLLM where it is installed, our small server elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from inference_container.settings import Settings, StartError
from inference_container.vllm_server import PORT_VARIABLE

DRAIN_SECONDS = 25
"""How long a stopped engine may go on answering; SageMaker kills it 30 s after SIGTERM."""

__all__ = [
    "DRAIN_SECONDS",
    "Engine",
    "Resolved",
    "choose_engine",
    "gpu_count",
    "tensor_parallel_size",
]

_MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Resolved:
    """Everything an engine needs, already on this machine."""

    settings: Settings
    names: tuple[str, ...]
    """Names that requests may call the model by; the first is the one in answers."""
    adapters: Mapping[str, Path]
    chat_template: Path | None


@dataclass(frozen=True)
class Engine:
    """A command that serves on the port."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def choose_engine(resolved: Resolved, *, gpus: int) -> Engine:
    """vLLM where it is importable, transformers elsewhere.

    Raises:
        StartError: when a setting does not fit the machine or the engine.
    """
    if importlib.util.find_spec("vllm") is not None:
        return _vllm(resolved, gpus)
    return _transformers(resolved)


def _vllm(resolved: Resolved, gpus: int) -> Engine:
    """vLLM's own command line refuses what the installed version does not know, before it loads."""
    settings, engine = resolved.settings, resolved.settings.engine
    parallel = tensor_parallel_size(settings.model, engine.tensor_parallel_size, gpus)
    arguments = {
        "--host": "0.0.0.0",
        "--port": str(settings.port),
        "--dtype": engine.dtype,
        "--tensor-parallel-size": str(parallel),
        "--max-model-len": engine.max_model_len,
        "--quantization": engine.quantization,
        "--reasoning-parser": engine.reasoning_parser,
        "--tool-call-parser": engine.tool_call_parser,
        "--chat-template": resolved.chat_template,
        "--gpu-memory-utilization": engine.gpu_memory_utilization if gpus else None,
        # By default vLLM aborts what it is answering when SIGTERM comes.
        "--shutdown-timeout": DRAIN_SECONDS,
    }
    words = [
        str(w) for flag, value in arguments.items() if value is not None for w in (flag, value)
    ]
    for middleware in ("EngineHeader", "ModelOfBody", "PortHandover"):
        words += ["--middleware", f"inference_container.middleware.{middleware}"]
    words += ["--served-model-name", *resolved.names]
    if engine.tool_call_parser:
        words.append("--enable-auto-tool-choice")
    if engine.trust_remote_code:
        words.append("--trust-remote-code")
    if resolved.adapters:
        ranks = [_rank(folder) for folder in resolved.adapters.values()]
        words += ["--enable-lora", "--max-lora-rank", str(_lora_rank_limit(max(ranks)))]
        words += ["--lora-modules"]
        words += [f"{name}={folder}" for name, folder in resolved.adapters.items()]
        if not gpus:
            # vLLM's CPU kernels look up "no adapter" at index -1, which is the last adapter's:
            # in one batch with an adapter, the base model would answer with it. No batches, then.
            words += ["--max-num-seqs", "1"]
    environment = {PORT_VARIABLE: str(settings.port)}
    if not gpus:
        words.append("--enforce-eager")
        # Without it vLLM wants 92 % of the memory that it sees, and refuses to start.
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    server = (sys.executable, "-m", "inference_container.vllm_server")
    return Engine("vllm", (*server, "serve", str(settings.model), *words), environment)


def _transformers(resolved: Resolved) -> Engine:
    settings, engine = resolved.settings, resolved.settings.engine
    for name in ("quantization", "reasoning_parser", "tool_call_parser"):
        if getattr(engine, name) is not None:
            raise StartError(f"deploy.engine.{name} needs vLLM, which this image does not have")
    if "vision_config" in _config(settings.model):
        raise StartError("a vision-language model needs vLLM, which this image does not have")
    document: dict[str, Any] = {
        "model": str(settings.model),
        "port": settings.port,
        "names": resolved.names,
        "dtype": engine.dtype,
        "trust_remote_code": engine.trust_remote_code,
        "max_model_len": engine.max_model_len,
        "chat_template": str(resolved.chat_template) if resolved.chat_template else None,
        "adapters": {name: str(folder) for name, folder in resolved.adapters.items()},
    }
    command = (sys.executable, "-m", "inference_container.small", json.dumps(document))
    return Engine("transformers", command)


def gpu_count(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that the container was given, without importing torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(glob("/dev/nvidia[0-9]*"))


def tensor_parallel_size(model: Path, wanted: int | None, gpus: int) -> int:
    """GPUs to split the model over: all, or as many as vLLM can split its layers into.

    Raises:
        StartError: when the run file wants more than there are, or a number that does not fit.
    """
    config = _config(model)
    config = config.get("text_config", config)
    if wanted is not None:
        if gpus and wanted > gpus:
            raise StartError(
                f"deploy.engine.tensor_parallel_size is {wanted}; the instance has {gpus} GPUs"
            )
        if misfit := _misfit(config, wanted):
            raise StartError(f"deploy.engine.tensor_parallel_size {wanted} {misfit}")
        return wanted
    return max(size for size in range(1, max(gpus, 1) + 1) if not _misfit(config, size))


def _misfit(config: Mapping[str, Any], size: int) -> str | None:
    """Why vLLM cannot split a model of text into `size` parts; None when it can."""
    heads = int(config.get("num_attention_heads") or 1)
    if heads % size:
        return f"does not divide num_attention_heads {heads}"
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if kv_heads % size and size % kv_heads:
        return f"neither divides num_key_value_heads {kv_heads} nor is a multiple of it"
    for name in _MLP_WIDTHS:
        width = config.get(name)
        if isinstance(width, int) and width % size:
            return f"does not divide {name} {width}"
    return None


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _rank(adapter: Path) -> int:
    return int(json.loads((adapter / "adapter_config.json").read_text()).get("r", 8))


def _lora_rank_limit(rank: int) -> int:
    """The smallest limit that vLLM accepts and that holds `rank`."""
    for limit in (8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= limit:
            return limit
    raise StartError(f"an adapter has rank {rank}; vLLM serves at most 512")
