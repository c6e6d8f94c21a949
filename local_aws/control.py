"""The fault switches and the state of the cloud, under /_local, for `grpohub local …` and for
tests.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from werkzeug.wrappers import Request, Response

from contracts.events import rebalance_event
from local_aws.front import json_response
from local_aws.sagemaker.capacity import Interruption, Shortage, SpotMarket
from local_aws.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from local_aws.server import LocalCloud

Body = dict[str, Any]


class Control:
    """One method per path; a POST's JSON body holds its settings."""

    def __init__(self, cloud: "LocalCloud") -> None:
        self._cloud = cloud
        self._actions: dict[str, Callable[[Body], Body]] = {
            "status": self._status,
            "interrupt": self._interrupt,
            "crash-host": self._crash_host,
            "rebalance": self._rebalance,
            "fail-capacity": self._fail_capacity,
            "restore-capacity": self._restore_capacity,
            "drop-events": self._event_fault("drop"),
            "duplicate-events": self._event_fault("duplicate"),
            "reorder-events": self._event_fault("reorder"),
            "spot-market": self._spot_market,
        }

    def handle(self, request: Request) -> Response:
        """Serve one request."""
        action = self._actions.get(re.sub("^/_local/", "", request.path))
        if action is None:
            return json_response({"message": f"known: {sorted(self._actions)}"}, 404)
        body = request.get_json(force=True) if request.get_data() else {}
        try:
            return json_response(action(body))
        except ApiError as error:
            return json_response({"message": error.message}, 409)
        except (KeyError, ValueError) as error:
            return json_response({"message": str(error)}, 400)

    def _status(self, _: Body) -> Body:
        cloud = self._cloud
        sagemaker, faults = cloud.sagemaker, cloud.bus.faults
        deployment = cloud.deployment
        capacity = sagemaker.engine.capacity.shortages
        return {
            "url": cloud.url,
            "api_url": cloud.api_url,
            "outputs": cloud.outputs,
            "functions": cloud.lambdas.names(),
            "jobs": {
                name: f"{job.record['TrainingJobStatus']}/{job.record['SecondaryStatus']}"
                for name, job in sagemaker.jobs.items()
            },
            "endpoints": {name: e.status for name, e in sagemaker.endpoints.items()},
            "faults": {
                "drop_events": faults.drop,
                "duplicate_events": faults.duplicate,
                "reorder_events": faults.reorder,
                "events_dropped": faults.dropped,
                "capacity": {kind: [str(s), left] for kind, (s, left) in capacity.items()},
                "spot_market": repr(sagemaker.engine.market),
            },
            "skipped": dict(deployment.skipped),
            "refused": deployment.refused,
            "not_kept": cloud.lost,
        }

    def _interrupt(self, body: Body) -> Body:
        interruption = Interruption(
            with_notice=body.get("notice", True), hold_seconds=float(body.get("hold", 2.0))
        )
        return {"job": self._cloud.sagemaker.interrupt(body["run"], interruption)}

    def _crash_host(self, body: Body) -> Body:
        for job in reversed(self._cloud.sagemaker.jobs_of(body["run"])):
            if job.crash_host(int(body.get("host", 0))):
                return {"job": job.record["TrainingJobName"]}
        raise ValueError(f"no job of {body['run']} is training with such a host")

    def _rebalance(self, body: Body) -> Body:
        hosts = [host for job in self._cloud.sagemaker.jobs_of(body["run"]) for host in job.hosts]
        for host in hosts:
            self._cloud.bus.send(rebalance_event(host.instance_id))
        return {"instances": [host.instance_id for host in hosts]}

    def _fail_capacity(self, body: Body) -> Body:
        shortage = Shortage(body.get("kind", "capacity"))
        count = body.get("count")
        capacity = self._cloud.sagemaker.engine.capacity
        capacity.fail(body["type"], shortage, int(count) if count is not None else None)
        return {"type": body["type"], "kind": shortage, "count": count}

    def _restore_capacity(self, body: Body) -> Body:
        self._cloud.sagemaker.engine.capacity.restore(body["type"])
        return {"type": body["type"]}

    def _event_fault(self, name: str) -> Callable[[Body], Body]:
        def switch(body: Body) -> Body:
            setattr(self._cloud.bus.faults, name, bool(body.get("on", True)))
            return {name: getattr(self._cloud.bus.faults, name)}

        return switch

    def _spot_market(self, body: Body) -> Body:
        text = body.get("market", "")
        self._cloud.sagemaker.engine.market = SpotMarket.parse(text) if text else None
        return {"market": text or None}
