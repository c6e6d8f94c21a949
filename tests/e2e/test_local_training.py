"""Training jobs of the embedded SageMaker: containers as processes, statuses, faults, as SageMaker
has them.
"""

import json
import os

import psutil
import pytest

from contracts.events import TrainingJobEvent, parse_event
from local_aws.sagemaker.capacity import Capacity, Interruption, Shortage, SpotMarket
from local_aws.sagemaker.training import failure_reason
from local_aws.server import LocalCloud
from tests.e2e.small_cloud import image, until, write_assembly

ROLE = "arn:aws:iam::123456789012:role/training"
KIND = "SageMaker Training Job State Change"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The small cloud; SageMaker's grace of two minutes is two seconds here."""
    folder = tmp_path_factory.mktemp("training")
    with LocalCloud(write_assembly(folder / "cdk.out"), folder / "state", speed=60) as running:
        s3, bucket = running.client("s3"), running.outputs["BucketName"]
        for key in ("data/train.jsonl", "data/deep/more.jsonl", "single/one.parquet"):
            s3.put_object(Bucket=bucket, Key=key, Body=b"{}")
        yield running


@pytest.fixture(autouse=True)
def _fair_market(cloud):
    yield
    cloud.sagemaker.engine.capacity.shortages.clear()
    cloud.sagemaker.engine.market = None


def channel(cloud, name, prefix, **more):
    """A File channel on a prefix of the bucket."""
    uri = f"s3://{cloud.outputs['BucketName']}/{prefix}"
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, **more}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def create(cloud, name, *, hosts=1, spot=False, **settings):
    """CreateTrainingJob; settings that are no member of the request become hyperparameters."""
    request = {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": image("trainer"),
            "TrainingInputMode": "File",
            "MetricDefinitions": [{"Name": "train:loss", "Regex": r"loss=([0-9.]+);"}],
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{cloud.outputs['BucketName']}/out"},
        "ResourceConfig": {
            "InstanceType": "ml.g5.xlarge",
            "InstanceCount": hosts,
            "VolumeSizeInGB": 10,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        "EnableManagedSpotTraining": spot,
    }
    if spot:
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 900
    members = {k: settings.pop(k) for k in list(settings) if k[0].isupper()}
    request["HyperParameters"] = {name: str(value) for name, value in settings.items()}
    return cloud.client("sagemaker").create_training_job(**{**request, **members})


def describe(cloud, name):
    """DescribeTrainingJob."""
    return cloud.client("sagemaker").describe_training_job(TrainingJobName=name)


def ended(cloud, name):
    """The job's description once it is terminal."""
    terminal = ("Completed", "Failed", "Stopped")
    return until(lambda: (d := describe(cloud, name))["TrainingJobStatus"] in terminal and d)


def training(cloud, name, incarnations=1):
    """Wait until the containers of the n-th incarnation have said that they run."""
    until(lambda: len(lines(cloud, name, "incarnation ")) >= incarnations)


def statuses(description):
    """The secondary statuses that a job went through."""
    return [transition["Status"] for transition in description["SecondaryStatusTransitions"]]


def lines(cloud, name, prefix=""):
    """A job's log lines, from CloudWatch Logs."""
    logs, group = cloud.client("logs"), "/aws/sagemaker/TrainingJobs"
    if not logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"]:
        return []
    answer = logs.filter_log_events(logGroupName=group, logStreamNamePrefix=f"{name}/")
    messages = [event["message"] for event in answer["events"]]
    return [message for message in messages if message.startswith(prefix)]


def events(cloud, name):
    """The events that a job sent."""
    sent = [e for e in cloud.bus.recent if e["detail-type"] == KIND]
    return [e for e in sent if e["detail"]["TrainingJobName"] == name]


def processes_of(cloud, name):
    """Processes that belong to a job's containers."""
    found = []
    for process in psutil.process_iter():
        try:
            base = process.environ().get("SAGEMAKER_BASE_DIR", "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if base.startswith(str(cloud.site.state_dir / "jobs" / name) + os.sep):
            found.append(process.pid)
    return found


def refusal(cloud, name="refused", **settings):
    """The error of a CreateTrainingJob that SageMaker refuses."""
    client = cloud.client("sagemaker")
    with pytest.raises(client.exceptions.ClientError) as caught:
        create(cloud, name, **settings)
    return caught.value.response["Error"]


def test_a_job_runs_its_container_on_every_host_and_leaves_its_model(cloud):
    channels = [channel(cloud, "train", "data/"), channel(cloud, "model", "single/one.parquet")]
    tags = [{"Key": "run_id", "Value": "r1"}]
    create(cloud, "whole", hosts=2, InputDataConfig=channels, Tags=tags, loss="0.25")
    done = ended(cloud, "whole")
    assert done["TrainingJobStatus"] == "Completed", done.get("FailureReason")
    assert statuses(done) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert done["FinalMetricDataList"][0]["MetricName"] == "train:loss"
    assert done["FinalMetricDataList"][0]["Value"] == pytest.approx(0.25)
    uri = done["ModelArtifacts"]["S3ModelArtifacts"]
    assert uri.endswith("/out/whole/output/model.tar.gz")
    key = uri.split("/", 3)[3]
    cloud.client("s3").head_object(Bucket=cloud.outputs["BucketName"], Key=key)

    assert sorted(lines(cloud, "whole", "argv")) == [
        "argv train rank 0 job whole",
        "argv train rank 1 job whole",
    ]
    addresses = set(lines(cloud, "whole", "addresses"))
    assert len(addresses) == 1
    assert len(set(addresses.pop().split()[1:])) == 2
    assert len(set(lines(cloud, "whole", "instance i-"))) == 2
    expected = "channel train deep/more.jsonl train.jsonl"
    assert lines(cloud, "whole", "channel train") == [expected, expected]
    assert set(lines(cloud, "whole", "channel model")) == {"channel model one.parquet"}

    told = [parse_event(event) for event in events(cloud, "whole")]
    assert all(isinstance(event, TrainingJobEvent) for event in told)
    assert [event.detail.secondary_status for event in told] == statuses(done)
    assert told[-1].detail.tags == {"run_id": "r1"}
    assert isinstance(events(cloud, "whole")[-1]["detail"]["CreationTime"], int)
    arn = done["TrainingJobArn"]
    assert cloud.client("sagemaker").list_tags(ResourceArn=arn)["Tags"] == tags


def test_a_sharded_channel_gives_each_host_its_part(cloud):
    sharded = channel(cloud, "train", "data/", S3DataDistributionType="ShardedByS3Key")
    create(cloud, "sharded", hosts=2, InputDataConfig=[sharded])
    assert ended(cloud, "sharded")["TrainingJobStatus"] == "Completed"
    parts = sorted(lines(cloud, "sharded", "channel train"))
    assert parts == ["channel train deep/more.jsonl", "channel train train.jsonl"]


def test_one_failing_host_fails_the_job_with_its_own_words_and_stops_the_others(cloud):
    create(cloud, "broken", hosts=2, seconds=600, daemon=1, fail_rank=1, code=7, failure="no data")
    done = ended(cloud, "broken")
    assert done["TrainingJobStatus"] == "Failed"
    assert done["FailureReason"] == "AlgorithmError: no data, exit code: 7"
    assert lines(cloud, "broken", "SIGTERM") == ["SIGTERM"]
    assert processes_of(cloud, "broken") == []


def test_a_failure_reason_never_exceeds_what_sagemaker_keeps():
    reason = failure_reason("x" * 5000, 137)
    assert len(reason) == 1024
    assert reason.endswith(", exit code: 137")


def test_missing_input_fails_the_job_before_it_trains(cloud):
    create(cloud, "no-input", InputDataConfig=[channel(cloud, "train", "nothing/here/")])
    done = ended(cloud, "no-input")
    assert done["TrainingJobStatus"] == "Failed"
    assert done["FailureReason"].startswith("ClientError: Data download failed:No S3 objects found")
    assert "Training" not in statuses(done)


def test_stopping_sends_sigterm_keeps_the_model_and_is_refused_once_terminal(cloud):
    client = cloud.client("sagemaker")
    create(cloud, "stopped", seconds=600, daemon=1)
    training(cloud, "stopped")
    assert len(processes_of(cloud, "stopped")) == 2
    client.stop_training_job(TrainingJobName="stopped")
    client.stop_training_job(TrainingJobName="stopped")
    done = ended(cloud, "stopped")
    assert (done["TrainingJobStatus"], done["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert statuses(done)[-2:] == ["Stopping", "Stopped"]
    assert "ModelArtifacts" in done
    assert processes_of(cloud, "stopped") == []
    with pytest.raises(client.exceptions.ClientError, match=r"ValidationException.*is in status"):
        client.stop_training_job(TrainingJobName="stopped")


def test_a_container_that_ignores_sigterm_is_killed_after_the_grace_period(cloud):
    create(cloud, "stubborn", seconds=600, ignore_term=1)
    training(cloud, "stubborn")
    cloud.client("sagemaker").stop_training_job(TrainingJobName="stubborn")
    assert ended(cloud, "stubborn")["SecondaryStatus"] == "Stopped"
    assert processes_of(cloud, "stubborn") == []


def test_time_limits_stop_a_job_and_say_which_one(cloud):
    limit = {"MaxRuntimeInSeconds": 2}
    create(cloud, "too-long", seconds=600, StoppingCondition=limit)
    assert ended(cloud, "too-long")["SecondaryStatus"] == "MaxRuntimeExceeded"
    cloud.sagemaker.engine.capacity.fail("ml.g5.xlarge", Shortage.WAIT)
    limit = {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
    create(cloud, "no-capacity", spot=True, StoppingCondition=limit)
    done = ended(cloud, "no-capacity")
    assert (done["TrainingJobStatus"], done["SecondaryStatus"]) == (
        "Stopped",
        "MaxWaitTimeExceeded",
    )
    assert statuses(done) == ["Starting", "Pending", "MaxWaitTimeExceeded"]


@pytest.mark.parametrize("notice", [True, False])
def test_managed_spot_restarts_the_same_job_in_place_with_fresh_containers(cloud, notice):
    name = f"spot-{notice}".lower()
    create(cloud, name, hosts=2, spot=True, seconds=600)
    training(cloud, name, incarnations=2)
    assert cloud.sagemaker.interrupt(name, Interruption(notice, hold_seconds=0.2)) == name
    training(cloud, name, incarnations=4)
    cloud.client("sagemaker").stop_training_job(TrainingJobName=name)
    done = ended(cloud, name)
    restart = ["Interrupted", "Starting", "Downloading", "Training"]
    assert statuses(done) == [
        "Starting",
        "Downloading",
        "Training",
        *restart,
        "Stopping",
        "Stopped",
    ]
    assert set(lines(cloud, name, "incarnation")) == {"incarnation 1"}  # a fresh /opt/ml each time
    first_stop = 2 if notice else 0
    assert len(lines(cloud, name, "SIGTERM")) == first_stop + 2
    assert len(set(lines(cloud, name, "instance"))) == 4
    assert done["BillableTimeInSeconds"] <= done["TrainingTimeInSeconds"]


def test_a_notice_warns_through_ec2_for_each_instance(cloud):
    create(cloud, "warned", hosts=2, spot=True, seconds=600)
    training(cloud, "warned", incarnations=2)
    known = {host.instance_id for host in cloud.sagemaker.jobs["warned"].hosts}
    cloud.sagemaker.interrupt("warned", Interruption(True, hold_seconds=60))
    until(lambda: describe(cloud, "warned")["SecondaryStatus"] == "Interrupted")
    kind = "EC2 Spot Instance Interruption Warning"
    sent = [e["detail"]["instance-id"] for e in cloud.bus.recent if e["detail-type"] == kind]
    assert known <= set(sent)
    # While capacity is away the control plane may give the job up.
    cloud.client("sagemaker").stop_training_job(TrainingJobName="warned")
    assert ended(cloud, "warned")["TrainingJobStatus"] == "Stopped"


def test_only_spot_jobs_that_train_can_be_interrupted(cloud):
    create(cloud, "on-demand", seconds=1)
    with pytest.raises(Exception, match="No job of on-demand is training on Spot"):
        cloud.sagemaker.interrupt("on-demand", Interruption())
    ended(cloud, "on-demand")


def test_a_crashed_host_fails_the_job(cloud):
    create(cloud, "crashed", hosts=2, seconds=600)
    training(cloud, "crashed", incarnations=2)
    assert not cloud.sagemaker.jobs["crashed"].crash_host(-1)
    assert not cloud.sagemaker.jobs["crashed"].crash_host(2)
    assert cloud.sagemaker.jobs["crashed"].crash_host(1)
    done = ended(cloud, "crashed")
    assert done["FailureReason"] == "AlgorithmError: , exit code: 137"


def test_the_spot_market_interrupts_by_seed(cloud):
    market = SpotMarket.parse("seed=7,mean-minutes=0.01,notice=0,hold=0.1")
    assert market.fate("a", 1) == market.fate("a", 1)
    assert market.fate("a", 1) != market.fate("a", 2)
    cloud.sagemaker.engine.market = market
    create(cloud, "market", spot=True, seconds=600)
    until(lambda: statuses(describe(cloud, "market")).count("Interrupted") >= 2)
    cloud.client("sagemaker").stop_training_job(TrainingJobName="market")
    ended(cloud, "market")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed=7,mean=2", "unknown Spot market setting"),
        ("seed=7", "needs .'mean-minutes'"),
        ("foo", "'foo' is not a Spot market setting; write key=value"),
        ("seed=x,mean-minutes=2", "seed=x: give a whole number"),
        ("seed=7,mean-minutes=0", "mean-minutes=0: give more than 0"),
        ("seed=7,mean-minutes=-1", "mean-minutes=-1: give more than 0"),
        ("seed=7,mean-minutes=nan", "mean-minutes=nan: give a number"),
        ("seed=7,mean-minutes=soon", "mean-minutes=soon: give a number"),
        ("seed=7,mean-minutes=2,notice=2", "notice=2: give a fraction from 0 to 1"),
        ("seed=7,mean-minutes=2,hold=-1", "hold=-1: give 0 seconds or more"),
    ],
)
def test_a_spot_market_that_cannot_be_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        SpotMarket.parse(text)


def test_a_spot_market_is_read_with_its_defaults():
    assert SpotMarket.parse("seed=-7, mean-minutes=2,") == SpotMarket(-7, 2.0, 0.5, 2.0)
    assert SpotMarket.parse("seed=7,mean-minutes=2,notice=1,hold=0") == SpotMarket(7, 2.0, 1.0, 0.0)


def test_a_fault_of_the_cloud_itself_ends_the_job(cloud):
    cloud.sagemaker.engine.market = SpotMarket(seed=7, mean_minutes=0)
    create(cloud, "faulty", spot=True, seconds=600)
    done = ended(cloud, "faulty")
    assert done["TrainingJobStatus"] == "Failed"
    assert done["FailureReason"].startswith("InternalServerError: We encountered an internal error")
    assert "ZeroDivisionError" in done["FailureReason"]
    assert processes_of(cloud, "faulty") == []


def test_shortages_show_as_sagemaker_shows_them(cloud):
    capacity = cloud.sagemaker.engine.capacity
    capacity.fail("ml.g5.xlarge", Shortage.CAPACITY, count=1)
    create(cloud, "short")
    reason = ended(cloud, "short")["FailureReason"]
    assert reason.startswith("CapacityError: Unable to provision requested ML compute capacity.")
    create(cloud, "not-short")
    assert ended(cloud, "not-short")["TrainingJobStatus"] == "Completed"
    capacity.fail("ml.g5.xlarge", Shortage.QUOTA)
    error = refusal(cloud)
    assert error["Code"] == "ResourceLimitExceeded"
    assert error["Message"].startswith("The account-level service limit 'ml.g5.xlarge for training")


def test_a_counted_shortage_ends_by_itself():
    capacity = Capacity()
    kind = "ml.g5.xlarge"
    capacity.fail(kind, Shortage.CAPACITY, count=2)
    assert [capacity.take(kind, Shortage.CAPACITY) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "shortage", "count", "words"),
    [
        ("ml.bogus", Shortage.CAPACITY, None, "ml.bogus"),
        ("ml.g5.xlarge", Shortage.CAPACITY, 0, "count 0: give 1 or more"),
        ("ml.g5.xlarge", Shortage.QUOTA, -3, "count -3: give 1 or more"),
        ("ml.g5.xlarge", Shortage.WAIT, 1, "wait takes no count"),
    ],
)
def test_a_shortage_that_cannot_be_is_refused(kind, shortage, count, words):
    capacity = Capacity()
    with pytest.raises(ValueError, match=words):
        capacity.fail(kind, shortage, count=count)
    assert capacity.shortages == {}


def test_a_name_is_used_once(cloud):
    create(cloud, "taken")
    error = refusal(cloud, "taken")
    assert error["Code"] == "ResourceInUse"
    assert "a training job with this name already exists (arn:aws:sagemaker" in error["Message"]
    ended(cloud, "taken")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"name": "under_score"},
            "'trainingJobName' failed to satisfy constraint: Member must sati",
        ),
        ({"name": "x" * 64}, "Member must have length less than or equal to 63"),
        ({"RoleArn": "this-is-long-but-no-role"}, "at 'roleArn' failed to satisfy constraint"),
        ({"Environment": {"A": "v" * 513}}, "at 'environment.A' failed to satisfy constraint"),
        ({"HyperParameters": {"k": "v" * 2501}}, "at 'hyperParameters.k' failed to satisfy"),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60}},
            "Invalid MaxWaitTimeInSeconds. It is only supported when EnableManagedSpotTraining",
        ),
        (
            {
                "spot": True,
                "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 59},
            },
            "greater than or equal to MaxRuntimeInSeconds",
        ),
        (
            {"spot": True, "StoppingCondition": {"MaxRuntimeInSeconds": 60}},
            "Invalid MaxWaitTimeInSeconds. It must be present",
        ),
    ],
)
def test_requests_are_refused_in_the_words_of_sagemaker(cloud, settings, words):
    """Kenza-AI/sagify#111: MaxWait without Spot is a ValidationException."""
    error = refusal(cloud, **settings)
    assert error["Code"] == "ValidationException"
    assert words in error["Message"]


def test_an_unknown_job_is_not_found(cloud):
    client = cloud.client("sagemaker")
    with pytest.raises(client.exceptions.ClientError, match="Requested resource not found"):
        describe(cloud, "nobody")


def test_jobs_are_listed_in_pages_newest_first(cloud):
    for number in range(3):
        create(cloud, f"listed-{number}")
        ended(cloud, f"listed-{number}")
    client = cloud.client("sagemaker")
    pages = client.get_paginator("list_training_jobs").paginate(
        NameContains="listed-", PaginationConfig={"PageSize": 2}
    )
    names = [j["TrainingJobName"] for page in pages for j in page["TrainingJobSummaries"]]
    assert names == ["listed-2", "listed-1", "listed-0"]


def test_local_checkpoints_are_mirrored_and_come_back_at_the_next_start(cloud):
    """aws/sagemaker-python-sdk#1040: what an incarnation left must be there for the next."""
    uri = f"s3://{cloud.outputs['BucketName']}/mirror"
    create(cloud, "mirror-1", CheckpointConfig={"S3Uri": uri})
    ended(cloud, "mirror-1")
    create(cloud, "mirror-2", CheckpointConfig={"S3Uri": uri})
    ended(cloud, "mirror-2")
    assert lines(cloud, "mirror-1", "incarnation") == ["incarnation 1"]
    assert lines(cloud, "mirror-2", "incarnation") == ["incarnation 2"]


def test_a_deleted_job_frees_its_name(cloud):
    client = cloud.client("sagemaker")
    create(cloud, "deleted")
    ended(cloud, "deleted")
    client.delete_training_job(TrainingJobName="deleted")
    create(cloud, "deleted")
    ended(cloud, "deleted")


def test_an_operation_that_is_not_served_says_so(cloud):
    client = cloud.client("sagemaker")
    with pytest.raises(client.exceptions.ClientError, match="does not serve ListDomains"):
        client.list_domains()


def test_events_name_no_environment(cloud):
    create(cloud, "private", Environment={"SECRETISH": "value-not-to-broadcast"})
    ended(cloud, "private")
    assert "value-not-to-broadcast" not in json.dumps(events(cloud, "private"))
