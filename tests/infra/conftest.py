"""The synthesised stack, made once for all tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.app import REPOSITORY, synthesise
from infra.bundle import layer_folder, reward_layer_folder

GUARDED = {
    "stack_name": "Second",
    "vpc": json.dumps({"subnet_ids": ["subnet-1"], "security_group_ids": ["sg-1"]}),
    "readable_buckets": ["team-data"],
    "removal": "destroy",
    "alarm_email": "ops@example.com",
    "encrypt_traffic_between_hosts": True,
}
"""Every option that adds something to the stack."""


@dataclass(frozen=True)
class Assembly:
    """A cloud assembly: its folder, the stack's template and the assets."""

    folder: Path
    template: dict[str, Any]
    assets: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, stack: str = "GrpoHub") -> Assembly:
        return cls(
            folder,
            json.loads((folder / f"{stack}.template.json").read_text()),
            json.loads((folder / f"{stack}.assets.json").read_text()),
        )

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """Properties of every resource of a type, by logical id."""
        return {
            name: resource.get("Properties", {})
            for name, resource in self.template["Resources"].items()
            if resource["Type"] == kind
        }

    def statements(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(logical id, statement) of every identity policy."""
        for name, policy in self.of_type("AWS::IAM::Policy").items():
            for statement in policy["PolicyDocument"]["Statement"]:
                yield name, statement


@pytest.fixture(scope="session")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """The stack as deployed: `cdk.json`'s options, judged by cdk-nag on the way.

    Made as the CDK's CLI would make it, by running the file; and without a network, once the Lambda
    libraries are there.
    """
    layer_folder()
    reward_layer_folder()
    folder = tmp_path_factory.mktemp("assembly")
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "CDK_OUTDIR": str(folder),
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "infra/app.py"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "end-of-life" not in done.stderr, "the banner of a system Node.js"
    return Assembly.load(folder)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """The stack with every option that adds something."""
    return Assembly.load(synthesise(tmp_path_factory.mktemp("guarded"), GUARDED), "Second")
