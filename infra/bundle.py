"""What goes into the Lambda functions: one folder of our code, and one layer of their libraries.

Built without Docker: pip fetches ready-made wheels for Lambda's machine, whatever this one is. Both
folders are named by the hash of what they are made from and kept in `build/`, so the second synth
runs no pip and needs no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "BUILD",
    "LAYER_SERVICES",
    "REPOSITORY",
    "BundleError",
    "code_folder",
    "layer_folder",
    "reward_code_folder",
    "reward_layer_folder",
    "staged_folder",
]

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "staged"
PYTHON_VERSION = "3.13"
PLATFORM = "manylinux2014_aarch64"
CODE_PACKAGES = ("contracts", "lambdas")
REWARD_CODE = ("contracts", "training_container/__init__.py", "training_container/rewards")
REWARD_LIBRARIES = ("jsonschema", "math-verify")
"""What the built-in rewards import, out of the trainer's requirements."""

LAYER_SERVICES = (
    "application-autoscaling",
    "cloudwatch",
    "dynamodb",
    "events",
    "lambda",
    "logs",
    "s3",
    "sagemaker",
    "sagemaker-runtime",
    "secretsmanager",
    "service-quotas",
    "sqs",
    "stepfunctions",
    "sts",
)
"""API models the layer keeps. botocore carries those of 400 services, 25 MB of them unused; and the
copy in the Lambda runtime is months old: it refuses SageMaker parameters it does not know yet."""


class BundleError(RuntimeError):
    """The libraries could not be fetched."""


def code_folder() -> Path:
    """A folder with exactly the Python code that the functions run."""
    return staged_folder("code", CODE_PACKAGES)


def reward_code_folder() -> Path:
    """A folder with the trainer's reward plane, for the function that tries rewards out."""
    return staged_folder("reward-code", REWARD_CODE)


def staged_folder(name: str, sources: Iterable[str]) -> Path:
    """A copy of some of the repository's files and folders, and nothing else, without caches."""
    files = []
    for source in sources:
        path = REPOSITORY / source
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    files = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes() + b"\0")

    def build(into: Path) -> None:
        for path in files:
            target = into / path.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    return _build_once(BUILD / f"{name}-{digest.hexdigest()[:16]}", build)


def layer_folder() -> Path:
    """A folder with the functions' libraries under `python/`, for Lambda's arm64 machines.

    Raises:
        BundleError: with pip's words, when a library is not in the cache and cannot be fetched.
    """
    project = _project()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["lambdas"]]
    return _libraries("layer", wanted)


def reward_layer_folder() -> Path:
    """The same with what reward code needs. Raises BundleError."""
    project = _project()
    wanted = [
        line
        for line in project["optional-dependencies"]["train"]
        if re.match(r"[\w-]+", line)[0] in REWARD_LIBRARIES  # type: ignore[index]
    ]
    return _libraries("reward-layer", [*project["dependencies"], *wanted])


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


def _libraries(name: str, wanted: list[str]) -> Path:
    wanted = sorted(wanted)
    constraints = REPOSITORY / "constraints.txt"
    digest = hashlib.sha256(constraints.read_bytes())
    digest.update(repr((wanted, LAYER_SERVICES, PLATFORM, PYTHON_VERSION)).encode())
    folder = BUILD / f"{name}-{digest.hexdigest()[:16]}"

    def build(into: Path) -> None:
        _install(wanted, constraints, into / "python")
        _strip(into / "python")

    return _build_once(folder, build)


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build beside `folder` and rename: a synth that dies never leaves half a folder."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(half)
        half.chmod(0o755)
        try:
            half.rename(folder)
        except OSError:
            if not folder.is_dir():  # another synth was first when it is there
                raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return folder


def _install(wanted: list[str], constraints: Path, target: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"),
        *("--disable-pip-version-check", "--only-binary=:all:", "--platform", PLATFORM),
        *("--implementation", "cp", "--python-version", PYTHON_VERSION),
        *("--target", str(target), "--constraint", str(constraints), *wanted),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise BundleError(f"pip could not fetch the Lambda libraries for {PLATFORM}:\n{last}")


def _strip(packages: Path) -> None:
    """Remove what no function imports. The metadata folders stay: importlib.metadata reads them."""
    for folder in (packages / "botocore" / "data").glob("*"):
        if folder.is_dir() and folder.name not in LAYER_SERVICES:
            shutil.rmtree(folder)
    unused = [
        *packages.glob("*-stubs"),
        *packages.rglob("__pycache__"),
        *packages.glob("*/**/tests"),
    ]
    for folder in [*unused, packages / "bin", packages / "share"]:
        shutil.rmtree(folder, ignore_errors=True)
    for file in packages.rglob("*.pyi"):
        os.remove(file)
