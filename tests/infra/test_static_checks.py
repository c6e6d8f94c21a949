"""cfn-lint on the template, hadolint on the Dockerfiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.conftest import Assembly

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_the_template_is_clean_to_cfn_lint(assembly: Assembly) -> None:
    template = assembly.folder / "GrpoHub.template.json"
    # W3005 is about DependsOn that a GetAtt implies too; the CDK writes both.
    command = [str(BIN / "cfn-lint"), "--ignore-checks", "W3005", "--template", str(template)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", ["training_container", "inference_container"])
def test_dockerfiles_are_clean_to_hadolint(package: str) -> None:
    dockerfile = REPOSITORY / package / "Dockerfile"
    done = subprocess.run(
        [str(BIN / "hadolint"), str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert 'ENTRYPOINT ["' in dockerfile.read_text(), "a shell as PID 1 never passes on SIGTERM"
