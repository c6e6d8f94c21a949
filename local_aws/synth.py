"""The cloud assembly of this checkout: synthesised when its sources have changed, reused when not.

`python -m local_aws.synth FOLDER` writes one. It runs in a process of its own, since the CDK brings
Node.js along.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = (
    "infra",
    "lambdas",
    "contracts",
    "state_machines",
    "training_container",
    "inference_container",
    "cdk.json",
    "pyproject.toml",
    "constraints.txt",
)


class SynthesisError(Exception):
    """The CDK app failed; the text is the end of what it printed."""


def current_assembly(folder: Path) -> Path:
    """An up-to-date assembly in `folder`.

    Raises:
        SynthesisError: the CDK app failed.
    """
    stamp = folder / ".sources"
    fingerprint = _fingerprint()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == fingerprint:
        return folder
    command = [sys.executable, "-m", "local_aws.synth", str(folder.resolve())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SynthesisError("\n".join(done.stderr.strip().splitlines()[-15:]))
    stamp.write_text(fingerprint, encoding="utf-8")
    return folder


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for file in _source_files():
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _source_files() -> Iterator[Path]:
    for name in SOURCES:
        path = REPOSITORY / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (f for f in files if f.is_file() and "__pycache__" not in f.parts)


if __name__ == "__main__":
    from infra.app import synthesise

    # The checks of cdk-nag are the gate's business; here they would triple the time.
    synthesise(Path(sys.argv[1]), {"nag": False})
