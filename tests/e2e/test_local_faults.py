"""`grpohub local …` on a running cloud: each fault switched on and off, and what a mistake says."""

import json

import pytest
from typer.testing import CliRunner

from local_aws.cli import app
from local_aws.running import Running
from local_aws.server import LocalCloud
from local_aws.site import REGION
from tests.e2e import test_local_training as training
from tests.e2e.small_cloud import until, write_assembly


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The small cloud, with the note that `up` leaves."""
    folder = tmp_path_factory.mktemp("faults")
    # What the cloud reports from its threads must not get into a command's captured output.
    quiet, assembly = [].append, write_assembly(folder / "cdk.out")
    with LocalCloud(assembly, folder / "state", speed=60, report=quiet) as running:
        note = Running.here(running.url, running.api_url, REGION, running.outputs)
        note.write(running.site.state_dir)
        yield running


@pytest.fixture
def local(cloud):
    """`grpohub local`, on this cloud."""

    def run(*arguments):
        words = [*arguments, "--state-dir", str(cloud.site.state_dir)]
        return CliRunner().invoke(app, words)

    return run


def faults(local):
    """The faults as `status` shows them to a program."""
    return json.loads(local("status", "--json").stdout)["faults"]


def test_a_type_is_without_capacity_until_it_is_back(cloud, local):
    said = local("fail-capacity", "ml.g5.xlarge").stdout
    assert said == "ml.g5.xlarge is unavailable (capacity)\n"
    assert faults(local)["capacity"] == {"ml.g5.xlarge": ["capacity", None]}
    training.create(cloud, "nowhere")
    assert training.ended(cloud, "nowhere")["FailureReason"].startswith("CapacityError")
    assert local("fail-capacity", "ml.g5.xlarge", "--off").exit_code == 0
    assert faults(local)["capacity"] == {}
    training.create(cloud, "somewhere")
    assert training.ended(cloud, "somewhere")["TrainingJobStatus"] == "Completed"


def test_an_unknown_kind_of_shortage_names_the_known_ones(local):
    refused = local("fail-capacity", "ml.g5.xlarge", "--kind", "rain")
    assert refused.exit_code != 0
    assert "capacity" in refused.output
    assert "quota" in refused.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fail-capacity", "ml.bogus"), "ml.bogus"),
        (("fail-capacity", "ml.g5.xlarge", "--kind", "wait", "--count", "1"), "takes no count"),
        (("spot-market", "foo"), "write key=value"),
        (("spot-market", "seed=7,mean-minutes=0"), "give more than 0"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_and_changes_nothing(local, arguments, words):
    before = faults(local)
    refused = local(*arguments)
    assert refused.exit_code == 1
    assert words in " ".join(refused.stdout.split())
    assert faults(local) == before


@pytest.mark.parametrize("name", ["drop", "duplicate", "reorder"])
def test_events_go_wrong_until_they_go_right_again(cloud, local, name):
    assert local(f"{name}-events", "on").exit_code == 0
    assert faults(local)[f"{name}_events"] is True
    assert getattr(cloud.bus.faults, name) is True
    assert local(f"{name}-events", "off").exit_code == 0
    assert faults(local)[f"{name}_events"] is False
    assert local(f"{name}-events", "perhaps").exit_code == 2


def test_a_spot_market_takes_instances_until_it_closes(cloud, local):
    opened = local("spot-market", "seed=7,mean-minutes=0.001,notice=0,hold=0.1")
    assert opened.exit_code == 0, opened.output
    training.create(cloud, "traded", spot=True, seconds=600)

    def interruptions():
        transitions = training.describe(cloud, "traded")["SecondaryStatusTransitions"]
        return [t for t in transitions if t["Status"] == "Interrupted"]

    until(lambda: len(interruptions()) >= 2)
    assert "seed=7" in faults(local)["spot_market"]
    assert local("spot-market", "").exit_code == 0
    assert faults(local)["spot_market"] == "None"
    refused = local("spot-market", "seed=7,mean=2")
    assert refused.exit_code == 1
    assert "mean-minutes" in refused.stdout


def test_what_does_not_train_on_spot_cannot_be_interrupted(cloud, local):
    training.create(cloud, "on-demand", seconds=600)
    training.training(cloud, "on-demand")
    refused = local("interrupt", "on-demand")
    assert refused.exit_code == 1
    assert "No job of on-demand is training on Spot capacity" in refused.stdout
    assert local("crash-host", "on-demand").exit_code == 0
    assert "exit code: 137" in training.ended(cloud, "on-demand")["FailureReason"]


def test_status_shows_a_person_what_runs(cloud, local):
    shown = local("status").stdout
    assert cloud.api_url in shown
    assert "BucketName" in shown
    assert "drop_events False" in shown
