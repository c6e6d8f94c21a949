"""The cloud assembly of this checkout, synthesised when its sources have changed.

`python -m local_aws.synth FOLDER` writes one. It runs in a process of its own, since the CDK brings
Node.js along.
"""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class SynthesisError(Exception):
    """The CDK app failed; the text is the end of what it printed."""


def current_assembly(folder: Path) -> Path:
    """An up-to-date assembly in `folder`.

    Raises:
        SynthesisError: the CDK app failed.
    """
    command = [sys.executable, "-m", "local_aws.synth", str(folder.resolve())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SynthesisError("\n".join(done.stderr.strip().splitlines()[-15:]))
    return folder


if __name__ == "__main__":
    from infra.app import synthesise

    # The checks of cdk-nag are the gate's business; here they would triple the time.
    synthesise(Path(sys.argv[1]), {"nag": False})
