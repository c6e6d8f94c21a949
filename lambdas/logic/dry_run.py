"""Run a user's reward function on samples: in a process of its own, with limits and an empty
environment.

The process has nothing to steal: the function it runs in holds no permission, and the credentials
of even that are not passed on.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.api import RewardTestView

__all__ = ["dry_run"]

_CHILD = Path(__file__).with_name("dry_run_child.py")
_MEMORY = 400 * 2**20
_OUTPUT = 2**20


def dry_run(request: Mapping[str, Any], *, seconds: float = 15.0) -> RewardTestView:
    """Scores of `request["function"]` of `request["file"]` on its `samples`, or why there are
    none."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(_CHILD)],
                input=json.dumps(dict(request)).encode(),
                capture_output=True,
                timeout=seconds,
                cwd=folder,
                env={},
                preexec_fn=_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _failed(f"did not finish within {seconds:g} s", begun)
    try:
        answer = json.loads(done.stdout[-_OUTPUT:].decode().splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        return _failed(f"the process ended with code {done.returncode}: {' '.join(words)}", begun)
    if "error" in answer:
        return _failed(answer["error"], begun)
    return RewardTestView(scores=answer["scores"], seconds=_since(begun))


def _failed(error: str, begun: float) -> RewardTestView:
    return RewardTestView(error=error[:2000], seconds=_since(begun))


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 3)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_OUTPUT, _OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
