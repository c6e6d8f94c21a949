"""One training job from Starting to its end, managed Spot restarts in between.

The order of secondary statuses, the failure reasons and the grace periods are SageMaker's (FACTS
A.1.1, A.1.6, A.1.9). A job's containers run as processes on this machine, one tree per host.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from contracts.events import spot_interruption_event, training_job_event
from local_aws.images import UnknownImageError
from local_aws.sagemaker.capacity import Interruption, Shortage
from local_aws.sagemaker.engine import Engine, Record, tag_map, with_datetimes
from local_aws.sagemaker.hosts import Host, checkpoint_folder, write_tree
from local_aws.sagemaker.processes import stop_containers
from local_aws.sagemaker.storage import (
    CheckpointMirror,
    InputNotFoundError,
    download_channel,
    upload_artefacts,
)

STOP_GRACE_SECONDS = 120.0
PEER_GRACE_SECONDS = 10.0
SPOT_PRICE = 0.3  # of on-demand, as BillableTimeInSeconds reflects it; a usual value
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
REASON_LENGTH = 1024  # the most characters that FailureReason has
TERMINAL = ("Completed", "Failed", "Stopped")
_POLL_SECONDS = 0.05


class End(Enum):
    """How an incarnation ended."""

    COMPLETED = auto()
    FAILED = auto()
    STOPPED = auto()
    MAX_RUNTIME = auto()
    MAX_WAIT = auto()
    INTERRUPTED = auto()
    SHUTDOWN = auto()


@dataclass(frozen=True)
class Outcome:
    """An ending and, for failures, the FailureReason."""

    end: End
    reason: str | None = None


class TrainingJob:
    """A job and the thread that drives it. `record` is what DescribeTrainingJob answers."""

    def __init__(self, engine: Engine, record: Record, save: Callable[[Record], None]) -> None:
        self.record = record
        self._engine, self._save = engine, save
        self._name: str = record["TrainingJobName"]
        self._stop_asked = False
        self._interruption: Interruption | None = None
        self._crash: int | None = None
        self._hosts: list[Host] = []
        self._incarnation = 0
        self._trained_seconds = 0.0
        self._metrics: dict[str, tuple[float, float]] = {}
        self._patterns = [
            (m["Name"], re.compile(m["Regex"]))
            for m in record["AlgorithmSpecification"].get("MetricDefinitions", ())
        ]

    # What the API and the fault switches ask of a job. They only leave a note; the job's thread
    # acts on it.

    def start(self) -> None:
        """Announce the job and let it run."""
        self._transition("InProgress", "Starting", "Starting the training job")
        threading.Thread(target=self._run, name=f"job:{self._name}", daemon=True).start()

    def stop(self) -> None:
        """StopTrainingJob on a job that is not terminal."""
        with self._engine.lock:
            if not self._stop_asked:
                self._stop_asked = True
                self._transition("Stopping", "Stopping", "Stopping the training job")

    def interrupt(self, interruption: Interruption) -> bool:
        """Reclaim the instances; False when the job does not train on Spot capacity just now, or
        its instances are being reclaimed already."""
        with self._engine.lock:
            training = self.record["SecondaryStatus"] == "Training"
            if not self.spot or not training or self._interruption is not None:
                return False
            self._interruption = interruption
            return True

    def crash_host(self, rank: int) -> bool:
        """Kill one host's processes without notice; False when there is no such host."""
        if not 0 <= rank < len(self._hosts) or self.record["SecondaryStatus"] != "Training":
            return False
        self._crash = rank
        return True

    @property
    def spot(self) -> bool:
        """Whether the job runs on managed Spot capacity."""
        return bool(self.record.get("EnableManagedSpotTraining"))

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.record["TrainingJobStatus"] in TERMINAL

    @property
    def hosts(self) -> list[Host]:
        """The present incarnation's hosts."""
        return self._hosts

    # The job's own thread.

    def _run(self) -> None:
        try:
            while True:
                outcome = self._await_capacity() or self._run_incarnation()
                if outcome.end is not End.INTERRUPTED:
                    break
                outcome = self._hold()
                if outcome is not None:
                    break
                self._transition("InProgress", "Starting", "Preparing the instances for training")
        except Exception as error:  # noqa: BLE001 (a job whose thread has died would never end)
            if self._engine.site.stopping.is_set():
                return
            self._engine.site.report(f"{self._name}: {error!r}")
            text = "InternalServerError: We encountered an internal error. Please try again."
            outcome = Outcome(End.FAILED, f"{text} ({error!r})"[:REASON_LENGTH])
        self._finish(outcome)

    def _await_capacity(self) -> Outcome | None:
        kind = self.record["ResourceConfig"]["InstanceType"]
        capacity = self._engine.capacity
        if capacity.take(kind, Shortage.CAPACITY):
            reason = "CapacityError: Unable to provision requested ML compute capacity. "
            reason += "Please retry using a different ML instance type."
            return Outcome(End.FAILED, reason)
        if capacity.waits(kind):
            self._transition("InProgress", "Pending", "Waiting for capacity")
        while capacity.waits(kind):
            if ended := self._ended_while_waiting():
                return ended
            time.sleep(_POLL_SECONDS)
        return self._ended_while_waiting()

    def _run_incarnation(self) -> Outcome:
        self._incarnation += 1
        addresses = self._engine.addresses.take(self.record["ResourceConfig"]["InstanceCount"])
        folder = self._engine.site.state_dir / "jobs" / self._name / str(self._incarnation)
        self._hosts = [
            Host(rank, address, folder / f"algo-{rank + 1}")
            for rank, address in enumerate(addresses)
        ]
        started = time.time()
        if "TrainingStartTime" not in self.record:
            self._note(TrainingStartTime=started)
        mirrors: list[CheckpointMirror] = []
        outcome = Outcome(End.SHUTDOWN)
        try:
            mirrors = self._download()
            self._transition(
                "InProgress", "Training", "Training image download completed. Training in progress."
            )
            self._start_containers()
            outcome = self._watch(started)
            self._end_containers(outcome)
            for mirror in mirrors:
                mirror.stop(final_copy=outcome.end is not End.INTERRUPTED)
            mirrors = []
            if outcome.end in (End.COMPLETED, End.STOPPED, End.MAX_RUNTIME):
                self._upload()
        except InputNotFoundError as error:
            outcome = Outcome(End.FAILED, f"ClientError: {error}")
        except UnknownImageError as error:
            outcome = Outcome(End.FAILED, f"ClientError: Cannot pull the training image {error}")
        finally:
            stop_containers([host.container for host in self._hosts], grace_seconds=0)
            for mirror in mirrors:
                mirror.stop(final_copy=False)
            self._trained_seconds += time.time() - started
            self._engine.addresses.release(addresses)
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _download(self) -> list[CheckpointMirror]:
        self._transition("InProgress", "Downloading", "Downloading input data")
        record, mirrors = self.record, []
        for host in self._hosts:
            write_tree(host, record, self._hosts)
            for channel in record.get("InputDataConfig", ()):
                download_channel(
                    self._engine.s3,
                    channel,
                    host.base / "input" / "data" / channel["ChannelName"],
                    shard=host.rank,
                    shards=len(self._hosts),
                    role=record["RoleArn"],
                )
            if checkpoints := record.get("CheckpointConfig"):
                folder = checkpoint_folder(host, record)
                folder.mkdir(parents=True, exist_ok=True)
                mirror = CheckpointMirror(self._engine.s3, folder, checkpoints["S3Uri"])
                mirror.restore()
                mirrors.append(mirror)
        for mirror in mirrors:
            mirror.start()
        return mirrors

    def _start_containers(self) -> None:
        algorithm = self.record["AlgorithmSpecification"]
        command = self._engine.images.command(algorithm.get("TrainingImage", ""))
        site = self._engine.site
        for host in self._hosts:
            host.container.start(
                command,
                "train",
                {
                    **site.credentials(),
                    "TRAINING_JOB_NAME": self._name,
                    "TRAINING_JOB_ARN": self.record["TrainingJobArn"],
                    "AWS_EC2_METADATA_SERVICE_ENDPOINT": (
                        f"{site.url}/_imds/{self._name}/{host.rank}/"
                    ),
                    **self.record.get("Environment", {}),
                },
                logs=self._engine.logs,
                group=LOG_GROUP,
                stream=f"{self._name}/{host.name}-{int(time.time())}",
                on_line=self._read_metrics,
            )

    def _watch(self, started: float) -> Outcome:
        """Wait until the incarnation has to end, for whatever reason."""
        limits = self.record["StoppingCondition"]
        runtime_left = limits["MaxRuntimeInSeconds"] - self._trained_seconds
        fate = None
        if self.spot and self._engine.market:
            seconds, interruption = self._engine.market.fate(self._name, self._incarnation)
            fate = (time.time() + seconds, interruption)
        while not self._engine.site.stopping.is_set():
            if self._stop_asked:
                return Outcome(End.STOPPED)
            if fate and time.time() > fate[0]:
                self._interruption = fate[1]
            if self._interruption:
                return Outcome(End.INTERRUPTED)
            if self._crash is not None:
                self._hosts[self._crash].container.kill()
                self._crash = None
            exited = self._exited()
            if exited and not self._engine.site.stopping.is_set():  # else: killed with the cloud
                return exited
            if time.time() - started > runtime_left:
                return Outcome(End.MAX_RUNTIME)
            if self._waited_too_long():
                return Outcome(End.MAX_WAIT)
            time.sleep(_POLL_SECONDS)
        return Outcome(End.SHUTDOWN)

    def _exited(self) -> Outcome | None:
        """A job has failed as soon as one host has, and has completed when all have."""
        codes = [host.container.exit_code() for host in self._hosts]
        for host, code in zip(self._hosts, codes, strict=True):
            if code:
                return Outcome(End.FAILED, failure_reason(host.failure(), code))
        return Outcome(End.COMPLETED) if all(code == 0 for code in codes) else None

    def _end_containers(self, outcome: Outcome) -> None:
        containers = [host.container for host in self._hosts]
        grace = self._engine.grace(STOP_GRACE_SECONDS)
        if outcome.end is End.INTERRUPTED:
            assert self._interruption is not None
            if self._interruption.with_notice:
                self._warn()
            else:
                grace = 0.0
                for container in containers:
                    container.kill()
        elif outcome.end is End.FAILED:
            grace = min(grace, PEER_GRACE_SECONDS)
        elif outcome.end is End.MAX_RUNTIME:
            self._transition("Stopping", "Stopping", "Maximum runtime exceeded")
        stop_containers(containers, grace)

    def _warn(self) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        for host in self._hosts:
            host.warned = {"action": "terminate", "time": at}
            self._engine.bus.send(spot_interruption_event(host.instance_id))

    def _upload(self) -> None:
        leader = self._hosts[0].base
        output = self.record["OutputDataConfig"]
        if self.record["TrainingJobStatus"] == "InProgress":
            self._transition("InProgress", "Uploading", "Uploading generated training model")
        for folder, name in ((leader / "output" / "data", "output"), (leader / "model", "model")):
            if any(folder.iterdir()):
                uri = upload_artefacts(self._engine.s3, folder, output, self._name, name)
                if name == "model":
                    self._note(ModelArtifacts={"S3ModelArtifacts": uri})

    def _hold(self) -> Outcome | None:
        """Stay Interrupted while capacity is away; None when the job may start again."""
        assert self._interruption is not None
        back_at = time.time() + self._interruption.hold_seconds
        self._interruption = None
        self._transition("InProgress", "Interrupted", "Training job interrupted")
        while time.time() < back_at:
            if ended := self._ended_while_waiting():
                return ended
            time.sleep(_POLL_SECONDS)
        return None

    def _ended_while_waiting(self) -> Outcome | None:
        if self._engine.site.stopping.is_set():
            return Outcome(End.SHUTDOWN)
        if self._stop_asked:
            return Outcome(End.STOPPED)
        return Outcome(End.MAX_WAIT) if self._waited_too_long() else None

    def _waited_too_long(self) -> bool:
        limit = self.record["StoppingCondition"].get("MaxWaitTimeInSeconds")
        return limit is not None and time.time() - self.record["CreationTime"] > limit

    def _finish(self, outcome: Outcome) -> None:
        if outcome.end is End.SHUTDOWN:
            return  # the record stays as it is; the next process finds it in flight
        if "TrainingStartTime" in self.record:
            trained = int(self._trained_seconds + 0.5)
            billed = int(trained * (SPOT_PRICE if self.spot else 1.0) + 0.5)
            self._note(TrainingTimeInSeconds=trained, BillableTimeInSeconds=billed)
        metrics = [
            {"MetricName": name, "Value": value, "Timestamp": at}
            for name, (value, at) in list(self._metrics.items())
        ]
        self._note(TrainingEndTime=time.time(), FinalMetricDataList=metrics)
        self._engine.logs.flush()
        status, secondary, message = {
            End.COMPLETED: ("Completed", "Completed", "Training job completed"),
            End.FAILED: ("Failed", "Failed", "Training job failed"),
            End.STOPPED: ("Stopped", "Stopped", "Training job stopped"),
            End.MAX_RUNTIME: ("Stopped", "MaxRuntimeExceeded", "Maximum runtime exceeded"),
            End.MAX_WAIT: ("Stopped", "MaxWaitTimeExceeded", "Maximum wait time exceeded"),
        }[outcome.end]
        if outcome.reason:
            self._note(FailureReason=outcome.reason)
        self._hosts = []
        self._transition(status, secondary, message, force=True)

    def _note(self, **members: Any) -> None:
        """Change the record; the API reads it under the same lock."""
        with self._engine.lock:
            self.record.update(members)

    def _transition(
        self, status: str, secondary: str, message: str, *, force: bool = False
    ) -> None:
        """Change the status, keep the record, and tell EventBridge."""
        with self._engine.lock:
            if self._stop_asked and secondary != "Stopping" and not force:
                return  # a job that is stopping shows nothing else until it has stopped
            now = time.time()
            transitions = self.record.setdefault("SecondaryStatusTransitions", [])
            if transitions:
                transitions[-1].setdefault("EndTime", now)
            entry: Record = {"Status": secondary, "StartTime": now, "StatusMessage": message}
            if force:
                entry["EndTime"] = now
            transitions.append(entry)
            self.record.update(
                TrainingJobStatus=status, SecondaryStatus=secondary, LastModifiedTime=now
            )
            self._save(self.record)
            announce(self._engine, self.record)

    def _read_metrics(self, line: str) -> None:
        for name, pattern in self._patterns:
            if found := pattern.search(line):
                try:
                    value = float(found[1])
                except (ValueError, IndexError):
                    continue  # SageMaker drops what does not parse as a number
                self._metrics[name] = (value, time.time())


def announce(engine: Engine, record: Record) -> None:
    """Send 'SageMaker Training Job State Change'."""
    shown = {k: v for k, v in with_datetimes(record).items() if k not in _NOT_IN_EVENTS}
    shown["SecondaryStatusTransitions"] = [
        {k: v for k, v in transition.items() if k != "EndTime"}
        for transition in shown["SecondaryStatusTransitions"]
    ]
    engine.bus.send(training_job_event(shown, tags=tag_map(record)))


# The event's schema has none of these; Environment may hold what must not be broadcast.
_NOT_IN_EVENTS = ("Environment", "FinalMetricDataList", "Tags")


def failure_reason(text: str, code: int) -> str:
    """FailureReason of a container that failed: at most `REASON_LENGTH`, its own words first."""
    tail = f", exit code: {code}"
    head = f"AlgorithmError: {text}"
    return head[: REASON_LENGTH - len(tail)] + tail


def mark_lost(engine: Engine, record: Record, save: Callable[[Record], None]) -> None:
    """Mark a job whose process died with an earlier cloud as failed, as SageMaker words its own
    faults.
    """
    now = time.time()
    reason = "InternalServerError: We encountered an internal error. Please try again."
    record.update(
        TrainingJobStatus="Failed",
        SecondaryStatus="Failed",
        FailureReason=f"{reason} (the embedded cloud ended while this job ran)",
        TrainingEndTime=now,
        LastModifiedTime=now,
    )
    record["SecondaryStatusTransitions"].append(
        {"Status": "Failed", "StartTime": now, "EndTime": now, "StatusMessage": "Process ended"}
    )
    save(record)
    announce(engine, record)
