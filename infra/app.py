"""The CDK app. `python infra/app.py` and `python -m infra.app` synthesise offline, without the CLI.

The options are those of `infra.options.StackOptions`, from `cdk.json` or `cdk -c name=value`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:  # run as a file, Python puts infra/ on the path, not its parent
    sys.path.insert(0, str(REPOSITORY))

__all__ = ["synthesise"]

SOURCES = (
    "cdk.json",
    "constraints.txt",
    "pyproject.toml",
    "contracts",
    "infra",
    "inference_container",
    "lambdas",
    "state_machines",
    "training_container",
)


def synthesise(outdir: Path, context: Mapping[str, Any] | None = None) -> Path:
    """Write the cloud assembly to `outdir`, unless it was made from these sources and options.

    Args:
        outdir: the assembly's folder; what it held is replaced.
        context: options over those of `cdk.json`.

    Raises:
        pydantic.ValidationError: naming a wrong option.
        BundleError: when a Lambda library is neither cached nor to be had.
        RuntimeError: jsii's; with cdk-nag's report when a finding is unexplained.
    """
    fingerprint = outdir / ".fingerprint"
    current = _fingerprint(context or {})
    if fingerprint.is_file() and fingerprint.read_text() == current:
        return outdir
    if (outdir / "cdk.out").is_file():  # the marker of an assembly: nothing else is ever deleted
        shutil.rmtree(outdir)
    _synthesise(outdir, context or {})
    fingerprint.write_text(current)
    return outdir


def _synthesise(outdir: Path | None, context: Mapping[str, Any]) -> Path:
    from infra.node import prepare_node

    prepare_node()

    import aws_cdk as cdk

    from infra.options import StackOptions
    from infra.stack import HubStack

    settings = {**json.loads((REPOSITORY / "cdk.json").read_text())["context"], **context}
    app = cdk.App(
        outdir=str(outdir) if outdir else None, context=settings, analytics_reporting=False
    )
    # Asked of the node, because the CDK's CLI puts its -c values over those of cdk.json.
    names = {*settings, *StackOptions.model_fields}
    options = StackOptions.from_context({name: app.node.try_get_context(name) for name in names})
    # The CDK remembers, in the process, what it staged into an assembly that may be gone.
    cdk.AssetStaging.clear_asset_hash_cache()
    HubStack(app, options)
    if options.nag:
        from cdk_nag import AwsSolutionsChecks

        cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    return Path(app.synth().directory)


def _fingerprint(context: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    digest.update(
        repr([os.environ.get(name) for name in ("CDK_DEFAULT_REGION", "AWS_REGION")]).encode()
    )
    for source in SOURCES:
        path = REPOSITORY / source
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    # The CDK's CLI says where it wants the assembly; without it, it goes to the same place.
    print(
        _synthesise(None, {}) if "CDK_OUTDIR" in os.environ else synthesise(REPOSITORY / "cdk.out")
    )
