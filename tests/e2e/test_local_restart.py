"""What a new process finds of an earlier one's work: objects, items, jobs, logs, endpoints; and
what it cannot.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from moto.stepfunctions.parser.utils import TMP_THREADS

from contracts.events import parse_event
from local_aws.lambdas import _Worker
from local_aws.running import NotRunningError, Running
from local_aws.server import LocalCloud, PortTakenError
from local_aws.state import LOST
from tests.e2e import test_local_endpoints as endpoints
from tests.e2e import test_local_training as training
from tests.e2e.small_cloud import IMAGES, until, write_assembly
from tests.processes import alive, signal_side_thread

# Events after which an execution of these tests waits: for time, for its next try, for a token.
WAITING = {"WaitStateEntered", "TaskFailed", "TaskSubmitted"}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """The small assembly."""
    return write_assembly(tmp_path_factory.mktemp("assembly"))


def test_a_restart_finds_finished_work_and_says_what_is_lost(assembly, tmp_path):
    before = set(psutil.Process().children(recursive=True))  # a synth earlier in this process
    with LocalCloud(assembly, tmp_path, speed=60) as cloud:
        bucket = cloud.outputs["BucketName"]
        s3, sfn = cloud.client("s3"), cloud.client("stepfunctions")
        s3.put_object(
            Bucket=bucket,
            Key="model/weights",
            Body=b"\x00\xff",
            ContentType="application/x-weights",
            Metadata={"step": "20"},
        )
        s3.put_object(Bucket=bucket, Key="model", Body=b"an object beside a folder of its name")
        s3.put_object(Bucket=bucket, Key="runs/../odd//key ", Body=b"odd")
        s3.put_object(Bucket=bucket, Key="deleted", Body=b"x")
        s3.delete_object(Bucket=bucket, Key="deleted")
        etag = s3.head_object(Bucket=bucket, Key="model/weights")["ETag"]
        item = {"pk": {"S": "run"}, "sk": {"S": "r1"}, "blob": {"B": b"\x01"}, "n": {"N": "1.5"}}
        cloud.client("dynamodb").put_item(TableName=cloud.resources["Table"], Item=item)
        training.create(cloud, "finished", loss="0.5")
        training.ended(cloud, "finished")
        training.create(cloud, "in-flight", seconds=600)
        training.training(cloud, "in-flight")
        endpoints.deploy(cloud, "lives", VERSION="7")
        with cloud.logs.file("/aws/sagemaker/TrainingJobs", "finished/algo-1").open("a") as log:
            log.write("2026-11-")  # as a process leaves it that is killed while it writes
        machine = cloud.outputs["MachineArn"]
        arn = sfn.start_execution(stateMachineArn=machine, name="run-1", input="{}")["executionArn"]
        children = set(psutil.Process().children(recursive=True)) - before

    assert children
    until(lambda: not alive(children))

    said = []
    with LocalCloud(assembly, tmp_path, speed=60, report=said.append) as cloud:
        s3, sagemaker = cloud.client("s3"), cloud.client("sagemaker")
        found = s3.get_object(Bucket=bucket, Key="model/weights")
        assert found["Body"].read() == b"\x00\xff"
        assert found["ETag"] == etag
        assert found["ContentType"] == "application/x-weights"
        assert found["Metadata"] == {"step": "20"}
        assert s3.get_object(Bucket=bucket, Key="model")["Body"].read().startswith(b"an object")
        assert s3.get_object(Bucket=bucket, Key="runs/../odd//key ")["Body"].read() == b"odd"
        keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]]
        assert "deleted" not in keys
        key = {"pk": item["pk"], "sk": item["sk"]}
        table = cloud.resources["Table"]
        assert cloud.client("dynamodb").get_item(TableName=table, Key=key)["Item"] == item
        assert training.describe(cloud, "finished")["TrainingJobStatus"] == "Completed"
        assert training.lines(cloud, "finished", "loss=") == ["loss=0.5;"]
        bar = ["loading: 0%\rloading: 100%"]
        assert training.lines(cloud, "finished", "loading") == bar
        assert endpoints.settled(cloud, "lives")["EndpointStatus"] == "InService"
        assert endpoints.ask(cloud, "lives")["version"] == "7"

        lost = training.describe(cloud, "in-flight")
        assert lost["TrainingJobStatus"] == "Failed"
        assert lost["FailureReason"].startswith("InternalServerError")
        aborted = cloud.client("stepfunctions").describe_execution(executionArn=arn)
        assert aborted["status"] == "ABORTED"
        assert aborted["error"] == LOST
        assert "not kept: training job in-flight was running and is now Failed" in said
        assert "not kept: execution run-1 was running and is now ABORTED" in said
        # The control plane hears of it as of any abort, and ends the run itself.
        kind = "Step Functions Execution Status Change"
        [event] = [e for e in cloud.bus.recent if e["detail-type"] == kind]
        assert parse_event(event).detail.execution_arn == arn
        # A second run of that name stays impossible, as on AWS.
        with pytest.raises(sagemaker.exceptions.ClientError, match="ExecutionAlreadyExists"):
            cloud.client("stepfunctions").start_execution(
                stateMachineArn=machine, name="run-1", input='{"again": true}'
            )


def test_no_execution_outlives_its_cloud(assembly, tmp_path):
    """It would go on with its retries, and call whatever this process starts next."""
    again = {"ErrorEquals": ["States.ALL"], "IntervalSeconds": 3600, "MaxAttempts": 1}
    machines = {
        "pauses": {"Type": "Wait", "Seconds": 3600},
        "retries": {
            "Type": "Task",
            "Resource": "arn:aws:states:::lambda:invoke",
            "Parameters": {"FunctionName": "nobody"},
            "Retry": [again],
        },
    }
    with LocalCloud(assembly, tmp_path, speed=1) as cloud:
        states = cloud.client("stepfunctions")
        arns = [cloud.outputs["MachineArn"]]
        for name, state in machines.items():
            definition = json.dumps({"StartAt": "A", "States": {"A": {**state, "End": True}}})
            machine = states.create_state_machine(
                name=name, definition=definition, roleArn="arn:aws:iam::123456789012:role/states"
            )
            arns.append(machine["stateMachineArn"])
        started = [
            states.start_execution(stateMachineArn=arn, name="e", input="{}") for arn in arns
        ]
        for execution in started:
            arn = execution["executionArn"]
            until(lambda arn=arn: WAITING & events_of(states, arn))
        states.start_execution(stateMachineArn=arns[1], name="starting", input="{}")
        threads = list(TMP_THREADS)
        assert sum(thread.is_alive() for thread in threads) > len(started)
    assert not [thread for thread in threads if thread.is_alive()]


def test_a_worker_that_starts_as_the_cloud_stops_does_not_outlive_it(
    assembly, tmp_path, monkeypatch
):
    begun, go, started = threading.Event(), threading.Event(), []
    start = _Worker._start

    def late(worker):
        begun.set()
        go.wait(30)
        start(worker)
        started.append(worker._process)

    monkeypatch.setattr(_Worker, "_start", late)
    cloud = LocalCloud(assembly, tmp_path)
    cloud.start()
    asking = threading.Thread(target=cloud.lambdas.invoke, args=(cloud.resources["Slow"], b"{}"))
    asking.start()
    assert begun.wait(30)
    stopping = threading.Thread(target=cloud.stop)
    stopping.start()
    stopping.join(2)  # long enough to kill the workers that there are
    go.set()
    asking.join(30)
    stopping.join(30)
    [process] = started
    try:
        assert process.wait(1) == -signal.SIGKILL
    finally:
        process.kill()


def events_of(states, arn: str) -> set[str]:
    """The kinds of event in an execution's history."""
    return {event["type"] for event in states.get_execution_history(executionArn=arn)["events"]}


def spoil(state: Path, bucket: str, table: str) -> None:
    """Leave the state folder as a crash of the machine may: every kind of file cut off."""
    for name in ("s3/journal.jsonl", "executions.jsonl"):
        with (state / name).open("a") as lines:
            lines.write('{"bucket": "b", "ke')
    (state / "s3" / "%part").write_bytes(b"half")
    (state / "s3" / bucket / "newer").write_bytes(b"newer than the journal")
    tables = state / "dynamodb" / f"{table}.json"
    tables.write_bytes(tables.read_bytes()[:-5])
    (tables.parent / f"{table}.part").write_text("[{")
    for kind in ("training-jobs", "model", "endpoint-config", "endpoint"):
        folder = state / "sagemaker" / kind
        folder.mkdir(exist_ok=True)
        (folder / "empty.json").write_text("")
        (folder / "torn.json").write_text('{"TrainingJobName": "to')
        (folder / "torn.part").write_text("{")
    (state / "sagemaker" / "endpoint-config" / "orphaned.json").unlink()
    [log] = (state / "logs/aws/sagemaker/TrainingJobs").glob("finished_*.log")
    with log.open("ab") as lines:
        lines.write(b"2026-11-30T12:00:00.000+00:00 caf\xc3")
    (state / "jobs" / "torn" / "1" / "algo-1").mkdir(parents=True)
    (state / "local.json").write_text('{"url": "http')
    (state / "images.json").write_text('{"ttt')


def test_a_state_folder_with_files_cut_off_starts_and_says_what_is_gone(assembly, tmp_path):
    with LocalCloud(assembly, tmp_path, speed=60) as cloud:
        bucket, table = cloud.outputs["BucketName"], cloud.resources["Table"]
        s3 = cloud.client("s3")
        for key in ("kept", "kept.part", "newer", "model/config.json"):
            s3.put_object(Bucket=bucket, Key=key, Body=key.encode(), ChecksumAlgorithm="SHA256")
        item = {"pk": {"S": "run"}, "sk": {"S": "r1"}}
        cloud.client("dynamodb").put_item(TableName=table, Item=item)
        training.create(cloud, "finished", loss="0.5")
        training.ended(cloud, "finished")
        assert endpoints.deploy(cloud, "orphaned")["EndpointStatus"] == "InService"
        machine = cloud.outputs["MachineArn"]
        sfn = cloud.client("stepfunctions")
        sfn.start_execution(stateMachineArn=machine, name="run-1", input="{}")
    spoil(tmp_path, bucket, table)

    said = []
    for _ in range(2):  # what was cut off does not come back with the restart after
        with LocalCloud(assembly, tmp_path, speed=60, report=said.append) as cloud:
            s3 = cloud.client("s3")
            for key, body in (
                ("kept", b"kept"),
                ("kept.part", b"kept.part"),
                ("newer", b"newer than the journal"),
            ):
                assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == body
            assert training.describe(cloud, "finished")["TrainingJobStatus"] == "Completed"
            assert training.lines(cloud, "finished", "loss=") == ["loss=0.5;"]
            orphaned = endpoints.settled(cloud, "orphaned")
            assert orphaned["EndpointStatus"] == "Failed"
            assert "Could not find endpoint configuration" in orphaned["FailureReason"]
            arn = machine.replace(":stateMachine:", ":execution:") + ":run-1"
            sfn = cloud.client("stepfunctions")
            assert sfn.describe_execution(executionArn=arn)["status"] == "ABORTED"
    gone = [line for line in said if "was cut off" in line]
    assert len(gone) == 9  # the table, and two records of each kind
    assert (tmp_path / "dynamodb" / f"{table}.json.damaged").is_file()


def test_a_note_whose_process_number_has_passed_to_another_is_stale(tmp_path):
    here = Running.here("http://127.0.0.1:1", "http://127.0.0.1:1/_http", "us-east-1", {})
    here.write(tmp_path)
    assert Running.find(tmp_path) == here
    dataclasses.replace(here, started=here.started - 3600).write(tmp_path)
    with pytest.raises(NotRunningError, match="has ended"):
        Running.find(tmp_path)
    (tmp_path / "local.json").write_text('{"url": "http')
    with pytest.raises(NotRunningError, match="damaged"):
        Running.find(tmp_path)


def test_an_endpoint_outlives_the_sources_of_its_image(assembly, tmp_path):
    with LocalCloud(assembly, tmp_path / "state", speed=60) as cloud:
        for key in ("model/config.json", "model/model.safetensors"):
            cloud.client("s3").put_object(Bucket=cloud.outputs["BucketName"], Key=key, Body=b"{}")
        assert endpoints.deploy(cloud, "older", VERSION="7")["EndpointStatus"] == "InService"
    changed = tmp_path / "cdk.out"
    shutil.copytree(assembly, changed)
    assets = changed / "Small.assets.json"
    assets.write_text(assets.read_text().replace(IMAGES["server"], "n" * 16))
    said = []
    with LocalCloud(changed, tmp_path / "state", speed=60, report=said.append) as cloud:
        assert endpoints.settled(cloud, "older")["EndpointStatus"] == "InService"
        assert endpoints.ask(cloud, "older")["version"] == "7"
    assert [line for line in said if line.startswith("endpoint older: the image it names")]


def test_large_versions_that_are_no_longer_current_are_forgotten(assembly, tmp_path):
    with LocalCloud(assembly, tmp_path) as cloud:
        s3, bucket = cloud.client("s3"), cloud.outputs["BucketName"]
        for size in (2 << 20, 2 << 20, 10, 20):
            s3.put_object(Bucket=bucket, Key="shard", Body=bytes(size))

        def sizes():
            return [v["Size"] for v in s3.list_object_versions(Bucket=bucket)["Versions"]]

        until(lambda: sizes() == [20, 10])
        assert s3.head_object(Bucket=bucket, Key="shard")["ContentLength"] == 20


def test_a_busy_port_is_named(tmp_path):
    with LocalCloud(None, tmp_path / "one") as cloud:
        command = [sys.executable, "-m", "local_aws", "up", "--port", str(cloud.site.port)]
        command += ["--state-dir", str(tmp_path / "two"), "--assembly", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"port {cloud.site.port} of 127.0.0.1 is in use" in done.stdout


def test_only_one_cloud_runs_in_a_process(tmp_path):
    second = LocalCloud(None, tmp_path / "two")
    with LocalCloud(None, tmp_path / "one"), pytest.raises(RuntimeError, match="already running"):
        second.start()
    with LocalCloud(None, tmp_path / "two"):
        pass


def test_a_port_that_is_taken_leaves_nothing_locked(tmp_path):
    with LocalCloud(None, tmp_path / "one") as cloud:
        port = cloud.site.port
        LocalCloud._running.release()  # as if the other cloud were another process
        with pytest.raises(PortTakenError):
            LocalCloud(None, tmp_path / "two", port=port).start()
        LocalCloud._running.acquire()


@pytest.mark.parametrize("end", ["down", "Ctrl-C", "a signal that a side thread gets"])
def test_up_serves_until_told_to_stop_and_leaves_no_child(assembly, tmp_path, end):
    command = [sys.executable, "-m", "local_aws", "up", "--port", "0"]
    command += ["--state-dir", str(tmp_path), "--assembly", str(assembly)]
    # Asked by SIGABRT, it says where every thread stands.
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        running = until(lambda: (tmp_path / "local.json").is_file() and Running.find(tmp_path))
        assert running.pid == process.pid
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert "already runs here" in again.stdout
        start_job_and_function(running, "worked")
        until(lambda: running.ask("status")["jobs"] == {"worked": "InProgress/Training"})
        interrupted = grpohub(tmp_path, "interrupt", "worked", "--no-notice", "--hold", "0.1")
        assert interrupted.returncode == 0, interrupted.stdout
        until(lambda: running.ask("status")["jobs"] == {"worked": "InProgress/Training"})
        children = until(lambda: psutil.Process(process.pid).children(recursive=True))
        if end == "down":
            assert grpohub(tmp_path, "down").returncode == 0
        elif end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            signal_side_thread(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    finally:
        process.send_signal(signal.SIGABRT)
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    assert f"{running.api_url}" in output
    until(lambda: not alive(children))
    assert not (tmp_path / "local.json").exists()
    down = grpohub(tmp_path, "down")
    assert down.returncode == 1
    assert "no embedded cloud runs here" in down.stdout


def grpohub(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `grpohub local …` on a state folder."""
    command = [sys.executable, "-m", "local_aws", *arguments, "--state-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def start_job_and_function(running: Running, name: str) -> None:
    """Give a cloud in another process a training job and a warm function."""

    class Remote:
        outputs = running.outputs

        @staticmethod
        def client(service: str):
            import boto3

            return boto3.client(
                service,
                endpoint_url=running.url,
                region_name=running.region,
                aws_access_key_id="local",
                aws_secret_access_key="local",
            )

    training.create(Remote, name, spot=True, seconds=600, daemon=1)
    answer = Remote.client("lambda").invoke(FunctionName="Small-Slow", Payload=b"{}")
    assert json.loads(answer["Payload"].read())


def test_children_that_outlive_a_killed_process_are_ended_by_the_next(assembly, tmp_path):
    command = [sys.executable, "-m", "local_aws", "up", "--port", "0"]
    command += ["--state-dir", str(tmp_path), "--assembly", str(assembly)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = until(lambda: (tmp_path / "local.json").is_file() and Running.find(tmp_path))
    start_job_and_function(running, "orphan")
    until(lambda: running.ask("status")["jobs"] == {"orphan": "InProgress/Training"})
    children = until(lambda: psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.wait()
    with LocalCloud(assembly, tmp_path, speed=60) as cloud:
        assert training.describe(cloud, "orphan")["TrainingJobStatus"] == "Failed"
        until(lambda: not alive(children))
