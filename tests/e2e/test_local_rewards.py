"""The reward sandbox in the embedded cloud: the synthesised function's own zip, by the client."""

from pathlib import Path

import boto3
import pytest

from client.hub import Hub
from client.settings import Settings
from contracts.reward_trial import RewardTestRequest
from local_aws.server import LocalCloud
from local_aws.synth import REPOSITORY, current_assembly

# The synth of the whole stack: minutes on a busy machine.
pytestmark = pytest.mark.long

MINE = """
import os
def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
def steal(completions):
    seen = str(dict(os.environ))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            seen += open(f"/proc/{pid}/environ").read()
        except OSError:
            pass
    return [float("AWS_SECRET_ACCESS_KEY" in seen)] * len(completions)
"""


@pytest.fixture
def hub(tmp_path: Path):
    """The client of a hub that runs here."""
    with LocalCloud(current_assembly(REPOSITORY / "build" / "e2e-cdk"), tmp_path) as cloud:
        session = boto3.Session(
            aws_access_key_id="local", aws_secret_access_key="local", region_name="us-east-1"
        )
        yield Hub(settings=Settings(cloud.api_url, "us-east-1", session, cloud.url))


def test_functions_and_files_are_scored_and_judges_refused(hub):
    given = [
        {"name": "right", "weight": 1.0, "file": "mine.py", "function": "right"},
        {"name": "thief", "weight": 1.0, "file": "mine.py", "function": "steal"},
        {"name": "mathematics", "weight": 1.0, "function": "boxed_math"},
        {"name": "judge", "weight": 1.0, "judge": {"endpoint": {"url": "http://judge/v1"}}},
    ]
    columns = {"answer": "4"}
    samples = [{"completion": text, "ground_truth": "4", "columns": columns} for text in ("4", "5")]
    asked = {"rewards": given, "files": {"mine.py": MINE}, "samples": samples}
    view = hub.test_rewards(RewardTestRequest.model_validate(asked))
    right, thief, mathematics, judge = view.sources
    assert right.scores == [1.0, 0.0]
    assert thief.scores == [0.0, 0.0]
    assert right.contained["credentials"].endswith("out of reach")
    assert (mathematics.state, judge.state) == ("scored", "refused")
    broken = RewardTestRequest.model_validate({**asked, "files": {"mine.py": "def right(:"}})
    assert "syntax error" in hub.test_rewards(broken).problems[0].reason
