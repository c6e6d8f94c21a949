"""The SageMaker API: one method per operation, over the records of jobs, models, configurations,
endpoints.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from werkzeug.wrappers import Request, Response

from local_aws.sagemaker import runtime
from local_aws.sagemaker.capacity import Interruption, Shortage
from local_aws.sagemaker.endpoints import Endpoint
from local_aws.sagemaker.engine import Engine, Record, RecordStore
from local_aws.sagemaker.errors import ApiError, exists, invalid, not_found
from local_aws.sagemaker.processes import kill_all
from local_aws.sagemaker.requests import check_training_job
from local_aws.sagemaker.shapes import check
from local_aws.sagemaker.training import LOG_GROUP, TrainingJob, mark_lost

MODEL, CONFIG, ENDPOINT = "model", "endpoint configuration", "endpoint"
_PATHS = {MODEL: "model", CONFIG: "endpoint-config", ENDPOINT: "endpoint"}


class SageMaker:
    """All jobs and endpoints of one cloud."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        state = engine.site.state_dir / "sagemaker"
        self._stores = {
            kind: RecordStore(state / folder)
            for kind, folder in (("job", "training-jobs"), *_PATHS.items())
        }
        self.jobs: dict[str, TrainingJob] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._models: dict[str, Record] = {}
        self._configs: dict[str, Record] = {}

    # The cloud's own doings.

    def restore(self) -> list[str]:
        """Take up what an earlier process left: finished jobs as they were, running ones as failed,
        endpoints served again. Returns what was lost, in words."""
        report = self.engine.site.report
        kill_all(self.engine.site.state_dir)  # containers that outlived a killed process
        self._models = self._stores[MODEL].load(report)
        self._configs = self._stores[CONFIG].load(report)
        lost = []
        for name, record in self._stores["job"].load(report).items():
            self.jobs[name] = TrainingJob(self.engine, record, self._saver("job", name))
            if not self.jobs[name].terminal:
                mark_lost(self.engine, record, self._saver("job", name))
                lost.append(f"training job {name} was running and is now Failed")
        if self.jobs:
            self.engine.logs.restore(LOG_GROUP)
        for name, record in self._stores[ENDPOINT].load(report).items():
            endpoint = self._new_endpoint(record)
            if record["EndpointStatus"] == "Deleting":
                self._stores[ENDPOINT].delete(name)
            else:
                self.endpoints[name] = endpoint
                if record["EndpointStatus"] != "Failed":
                    endpoint.create()
        return lost

    def stop(self) -> None:
        """End every container."""
        for endpoint in self.endpoints.values():
            endpoint.shut_down()
        kill_all(self.engine.site.state_dir)

    def jobs_of(self, run: str) -> list[TrainingJob]:
        """The jobs that belong to a run (or the job of that name), newest last."""
        found = [j for n, j in self.jobs.items() if n == run or n.startswith(f"{run}-")]
        return sorted(found, key=lambda job: job.record["CreationTime"])

    def interrupt(self, run: str, interruption: Interruption) -> str:
        """Reclaim a run's Spot instances; returns the job's name.

        Raises:
            ApiError: the run has no job that trains on Spot capacity just now.
        """
        for job in reversed(self.jobs_of(run)):
            if job.interrupt(interruption):
                return str(job.record["TrainingJobName"])
        raise invalid(f"No job of {run} is training on Spot capacity just now.")

    # HTTP.

    def api(self, request: Request) -> Response:
        """Serve one request signed for `sagemaker`: the control API or the runtime."""
        if request.path.startswith("/endpoints/"):
            name = request.path.split("/")[2]
            endpoint = self.endpoints.get(name)
            fleet = endpoint.fleet if endpoint else None
            if fleet:
                self.engine.site.pool.submit(self._count_invocation, name, fleet.variant)
            return runtime.invoke(request, fleet, name)
        operation = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        try:
            handler = self._operation(operation)
            body = request.get_json(force=True)
            check(operation, body)
            with self.engine.lock:
                answer = json.dumps(handler(body))
        except ApiError as refusal:
            text = json.dumps({"__type": refusal.code, "message": refusal.message})
            return Response(text, refusal.status, content_type="application/x-amz-json-1.1")
        headers = {"x-amzn-RequestId": str(uuid.uuid4())}
        content = "application/x-amz-json-1.1"
        return Response(answer, 200, headers, content_type=content)

    def metadata(self, request: Request) -> Response:
        """The instance metadata service of one host, under /_imds/<job>/<rank>/latest/…"""
        _, _, name, rank, path = request.path.split("/", 4)
        job = self.jobs.get(name)
        host = job.hosts[int(rank)] if job and int(rank) < len(job.hosts) else None
        if host is None:
            return Response("", 404)
        if path == "latest/api/token":
            return Response("local-token", 200)
        answers = {
            "latest/meta-data/instance-id": host.instance_id,
            "latest/meta-data/placement/availability-zone": "us-east-1a",
            "latest/meta-data/spot/instance-action": json.dumps(host.warned),
        }
        if path not in answers or (path.endswith("instance-action") and host.warned is None):
            return Response("", 404)
        return Response(answers[path], 200)

    def _operation(self, name: str) -> Callable[[Record], Record]:
        handler: Callable[[Record], Record] | None = getattr(self, _snake(name), None)
        if not re.fullmatch(r"[A-Z]\w+", name) or handler is None:
            raise invalid(f"The embedded SageMaker does not serve {name}.")
        return handler

    # Training jobs.

    def create_training_job(self, request: Record) -> Record:
        """CreateTrainingJob."""
        name = request["TrainingJobName"]
        arn = self._arn("training-job", name)
        if name in self.jobs:
            raise ApiError(
                "ResourceInUse",
                "Training job names must be unique within an AWS account and region, and a "
                f"training job with this name already exists ({arn})",
            )
        record = check_training_job(request)
        resources = record["ResourceConfig"]
        kind = resources["InstanceType"]
        if self.engine.capacity.take(kind, Shortage.QUOTA):
            delta = resources["InstanceCount"]
            raise ApiError(
                "ResourceLimitExceeded",
                f"The account-level service limit '{kind} for training job usage' is 0 Instances, "
                f"with current utilization of 0 Instances and a request delta of {delta} "
                "Instances. Please use AWS Service Quotas to request an increase for this quota.",
            )
        now = time.time()
        record.update(TrainingJobArn=arn, CreationTime=now, LastModifiedTime=now)
        job = self.jobs[name] = TrainingJob(self.engine, record, self._saver("job", name))
        job.start()
        return {"TrainingJobArn": arn}

    def describe_training_job(self, request: Record) -> Record:
        """DescribeTrainingJob."""
        record = self._job(request).record
        return {name: value for name, value in record.items() if name != "Tags"}

    def stop_training_job(self, request: Record) -> Record:
        """StopTrainingJob: again on a stopping job is fine, on a terminal one it is refused."""
        job = self._job(request)
        if job.terminal:
            status = job.record["TrainingJobStatus"]
            raise invalid(
                f"The request was rejected because the training job is in status {status}."
            )
        job.stop()
        return {}

    def delete_training_job(self, request: Record) -> Record:
        """DeleteTrainingJob, for terminal jobs; the name is free again."""
        job = self._job(request)
        if not job.terminal:
            raise invalid("Only a training job in a terminal status can be deleted.")
        del self.jobs[request["TrainingJobName"]]
        self._stores["job"].delete(request["TrainingJobName"])
        return {}

    def list_training_jobs(self, request: Record) -> Record:
        """ListTrainingJobs, newest first unless asked otherwise."""
        shown = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingEndTime",
                 "LastModifiedTime", "TrainingJobStatus", "SecondaryStatus")  # fmt: skip
        records = [job.record for job in self.jobs.values()]
        return _page("TrainingJobSummaries", records, request, shown, status="TrainingJobStatus")

    # Models and endpoint configurations.

    def create_model(self, request: Record) -> Record:
        """CreateModel."""
        return self._create(MODEL, self._models, request, "ModelName", "ModelArn")

    def describe_model(self, request: Record) -> Record:
        """DescribeModel."""
        return self._find(MODEL, self._models, request["ModelName"])

    def delete_model(self, request: Record) -> Record:
        """DeleteModel."""
        return self._delete(MODEL, self._models, request["ModelName"])

    def list_models(self, request: Record) -> Record:
        """ListModels."""
        shown = ("ModelName", "ModelArn", "CreationTime")
        return _page("Models", self._models.values(), request, shown)

    def create_endpoint_config(self, request: Record) -> Record:
        """CreateEndpointConfig."""
        for variant in request["ProductionVariants"]:
            if "ModelName" in variant:
                self._find(MODEL, self._models, variant["ModelName"])
        return self._create(
            CONFIG, self._configs, request, "EndpointConfigName", "EndpointConfigArn"
        )

    def describe_endpoint_config(self, request: Record) -> Record:
        """DescribeEndpointConfig."""
        return self._find(CONFIG, self._configs, request["EndpointConfigName"])

    def delete_endpoint_config(self, request: Record) -> Record:
        """DeleteEndpointConfig."""
        return self._delete(CONFIG, self._configs, request["EndpointConfigName"])

    def list_endpoint_configs(self, request: Record) -> Record:
        """ListEndpointConfigs."""
        shown = ("EndpointConfigName", "EndpointConfigArn", "CreationTime")
        return _page("EndpointConfigs", self._configs.values(), request, shown)

    # Endpoints.

    def create_endpoint(self, request: Record) -> Record:
        """CreateEndpoint."""
        name, arn = request["EndpointName"], self._arn("endpoint", request["EndpointName"])
        self._find(CONFIG, self._configs, request["EndpointConfigName"])
        if name in self.endpoints:
            raise exists(ENDPOINT, arn)
        now = time.time()
        record = {**request, "EndpointArn": arn, "CreationTime": now}
        endpoint = self.endpoints[name] = self._new_endpoint(record)
        endpoint.create()
        return {"EndpointArn": arn}

    def describe_endpoint(self, request: Record) -> Record:
        """DescribeEndpoint."""
        record = dict(self._endpoint(request["EndpointName"]).record)
        record.pop("Tags", None)
        config = self._configs.get(record["EndpointConfigName"])
        if config is not None:
            record["ProductionVariants"] = [
                {
                    "VariantName": variant["VariantName"],
                    "CurrentWeight": variant.get("InitialVariantWeight", 1.0),
                    "DesiredWeight": variant.get("InitialVariantWeight", 1.0),
                    "CurrentInstanceCount": variant.get("InitialInstanceCount", 1),
                    "DesiredInstanceCount": variant.get("InitialInstanceCount", 1),
                }
                for variant in config["ProductionVariants"]
            ]
        return record

    def update_endpoint(self, request: Record) -> Record:
        """UpdateEndpoint."""
        endpoint = self._endpoint(request["EndpointName"])
        self._find(CONFIG, self._configs, request["EndpointConfigName"])
        arn = endpoint.record["EndpointArn"]
        if endpoint.status != "InService":
            raise invalid(f'Cannot update in-progress endpoint "{arn}".')
        endpoint.update(request["EndpointConfigName"])
        return {"EndpointArn": arn}

    def delete_endpoint(self, request: Record) -> Record:
        """DeleteEndpoint; one that is still being created cannot be deleted."""
        name = request["EndpointName"]
        endpoint = self._endpoint(name)
        if endpoint.status in ("Creating", "Updating", "RollingBack"):
            arn = endpoint.record["EndpointArn"]
            raise invalid(f'Cannot update in-progress endpoint "{arn}".')

        def forget() -> None:
            self.endpoints.pop(name, None)
            self._stores[ENDPOINT].delete(name)

        if endpoint.status != "Deleting":
            endpoint.delete(forget)
        return {}

    def list_endpoints(self, request: Record) -> Record:
        """ListEndpoints."""
        shown = ("EndpointName", "EndpointArn", "CreationTime", "LastModifiedTime",
                 "EndpointStatus")  # fmt: skip
        records = [endpoint.record for endpoint in self.endpoints.values()]
        return _page("Endpoints", records, request, shown, status="EndpointStatus")

    # Tags.

    def add_tags(self, request: Record) -> Record:
        """AddTags."""
        record = self._by_arn(request["ResourceArn"])
        tags = {tag["Key"]: tag for tag in (*record.get("Tags", ()), *request["Tags"])}
        record["Tags"] = list(tags.values())
        return {"Tags": record["Tags"]}

    def list_tags(self, request: Record) -> Record:
        """ListTags."""
        return {"Tags": self._by_arn(request["ResourceArn"]).get("Tags", [])}

    def _count_invocation(self, name: str, variant: str) -> None:
        """The metric by which idle endpoints are found."""
        dimensions = {"EndpointName": name, "VariantName": variant}
        datum = {
            "MetricName": "Invocations",
            "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
            "Value": 1.0,
            "Unit": "None",
        }
        cloudwatch = self.engine.site.client("cloudwatch")
        cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=[datum])

    def _by_arn(self, arn: str) -> Record:
        records = [j.record for j in self.jobs.values()]
        records += [e.record for e in self.endpoints.values()]
        records += [*self._models.values(), *self._configs.values()]
        for record in records:
            if arn in record.values():
                return record
        raise invalid(f"Could not find resource {arn}.")

    def _create(
        self, kind: str, records: dict[str, Record], request: Record, key: str, arn_key: str
    ) -> Record:
        name = request[key]
        arn = self._arn(_PATHS[kind], name)
        if name in records:
            raise exists(kind, arn)
        records[name] = {**request, arn_key: arn, "CreationTime": time.time()}
        self._stores[kind].save(name, records[name])
        return {arn_key: arn}

    def _find(self, kind: str, records: dict[str, Record], name: str) -> Record:
        if name not in records:
            raise not_found(kind, self._arn(_PATHS[kind], name))
        return {key: value for key, value in records[name].items() if key != "Tags"}

    def _delete(self, kind: str, records: dict[str, Record], name: str) -> Record:
        self._find(kind, records, name)
        del records[name]
        self._stores[kind].delete(name)
        return {}

    def _job(self, request: Record) -> TrainingJob:
        job = self.jobs.get(request["TrainingJobName"])
        if job is None:
            raise invalid("Requested resource not found.")
        return job

    def _endpoint(self, name: str) -> Endpoint:
        if name not in self.endpoints:
            raise not_found(ENDPOINT, self._arn("endpoint", name))
        return self.endpoints[name]

    def _new_endpoint(self, record: Record) -> Endpoint:
        def lookup(config_name: str) -> tuple[Record, Record]:
            config = self._find(CONFIG, self._configs, config_name)
            model = config["ProductionVariants"][0]["ModelName"]
            return config, self._find(MODEL, self._models, model)

        name = record["EndpointName"]
        return Endpoint(self.engine, record, lookup, self._saver(ENDPOINT, name))

    def _saver(self, kind: str, name: str) -> Callable[[Record], None]:
        return lambda record: self._stores[kind].save(name, record)

    def _arn(self, kind: str, name: str) -> str:
        return self.engine.site.arn("sagemaker", f"{kind}/{name.lower()}")


def _page(
    answer_key: str,
    records: Iterable[Record],
    request: Record,
    shown: tuple[str, ...],
    *,
    status: str = "",
) -> Record:
    """A List operation's answer: filtered, sorted, and cut into pages by an index as token.

    `shown` are the members of a summary, the name first; `status` is the one that StatusEquals
    filters by.
    """
    name = shown[0]
    found = [r for r in records if request.get("NameContains", "") in r[name]]
    if status and "StatusEquals" in request:
        found = [r for r in found if r[status] == request["StatusEquals"]]
    by_name = request.get("SortBy") == "Name"
    found.sort(key=lambda record: record[name] if by_name else record["CreationTime"])
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    start = int(request.get("NextToken", 0))
    end = start + int(request.get("MaxResults", 100))
    page: dict[str, Any] = {
        answer_key: [{k: r[k] for k in shown if k in r} for r in found[start:end]]
    }
    if end < len(found):
        page["NextToken"] = str(end)
    return page


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
