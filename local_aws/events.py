"""EventBridge: rules matched by moto, delivered by us, with the faults that a control plane must
survive.

AWS may deliver an event twice, late, in another order, or (those of SageMaker and EC2) never.
`EventFaults` makes each of these happen on demand.
"""

import json
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from botocore.exceptions import ClientError
from werkzeug.wrappers import Request, Response

from contracts.events import execution_event, object_created_event
from local_aws.lambdas import FunctionNotFoundError, Lambdas
from local_aws.site import ACCOUNT, REGION, Site

DELIVERY_TRIES = 3  # AWS tries for 24 hours; here a target that fails three times is broken
DELIVERY_PAUSE_SECONDS = 10.0
REORDER_SECONDS = 3.0
Event = dict[str, Any]

_RATE = re.compile(r"rate\((\d+) (second|minute|hour|day)s?\)")
_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


@dataclass
class EventFaults:
    """What is wrong with the event bus at present; `reorder` holds each event back for a random
    while.
    """

    drop: bool = False
    duplicate: bool = False
    reorder: bool = False
    dropped: int = 0
    delays: random.Random = field(default_factory=lambda: random.Random(0))


class EventBus:
    """The default event bus and the schedules."""

    def __init__(self, site: Site, lambdas: Lambdas) -> None:
        self.faults = EventFaults()
        self.recent: list[Event] = []
        self._site, self._lambdas = site, lambdas

    def send(self, event: Event) -> None:
        """Put an event on the bus. Delivery happens behind the caller's back."""
        event = json.loads(json.dumps(event))
        self.recent = [*self.recent[-499:], event]
        if self.faults.drop:
            self.faults.dropped += 1
            return
        for _ in range(2 if self.faults.duplicate else 1):
            if self.faults.reorder:
                delay = self.faults.delays.uniform(0, REORDER_SECONDS)
                timer = threading.Timer(delay, self._match, (event,))
                timer.daemon = True
                timer.start()
            else:
                self._match(event)

    def api(self, request: Request) -> Response:
        """PutEvents; every other operation of EventBridge is moto's."""
        entries = []
        for entry in request.get_json(force=True)["Entries"]:
            detail = json.loads(entry.get("Detail", "{}"))
            resources = entry.get("Resources", [])
            event = _event(entry["Source"], entry["DetailType"], detail, resources)
            self.send(event)
            entries.append({"EventId": event["id"]})
        body = json.dumps({"FailedEntryCount": 0, "Entries": entries})
        return Response(body, content_type="application/x-amz-json-1.1")

    def object_created(self, reason: str, bucket: Any, key: Any) -> None:
        """S3 stored an object; buckets that send to EventBridge say so."""
        configuration = bucket.notification_configuration
        if configuration is None or configuration.event_bridge is None:
            return
        event = object_created_event(
            bucket.name,
            key.name,
            size=key.contentsize,
            etag=key.etag.strip('"'),
            version_id=None if key.version_id == "null" else key.version_id,
            sequencer=f"{time.time_ns():016X}",
            reason=reason,
        )
        self.send(event)

    def execution_changed(self, execution: Any) -> None:
        """Step Functions started or ended an execution."""
        output = json.dumps(execution.output) if execution.output is not None else None
        description = {
            "executionArn": execution.exec_arn,
            "stateMachineArn": execution.state_machine_arn,
            "name": execution.name,
            "status": execution.status,
            "startDate": execution.start_date,
            "stopDate": execution.stop_date,
            "input": execution.execution_input,
            "output": output,
            "error": execution.error,
            "cause": execution.cause,
        }
        self.send(execution_event(description))

    def start_schedules(self) -> list[str]:
        """Let every rule with a `rate(…)` fire; returns what cannot be honoured, in words."""
        refused = []
        for rule in self._rules():
            if not rule.scheduled_expression or rule.state != "ENABLED":
                continue
            period = rate_seconds(rule.scheduled_expression)
            if period is None:
                refused.append(f"schedule {rule.name}: {rule.scheduled_expression} is not a rate")
                continue
            self._site.every(period / self._site.speed, self._ticker(rule), f"rule:{rule.name}")
        return refused

    def schedule(self, name: str, expression: str, target: Mapping[str, Any]) -> str | None:
        """Let a Scheduler schedule fire; returns why it cannot, if so."""
        period = rate_seconds(expression)
        if period is None:
            return f"schedule {name}: {expression} is not a rate"
        body = target.get("Input", "{}")
        send = self._sender(str(target["Arn"]), body, str(uuid.uuid4()))
        fire = partial(self._site.pool.submit, send)
        self._site.every(period / self._site.speed, fire, f"schedule:{name}")
        return None

    def deliver(self, target: Mapping[str, Any], event: Event) -> None:
        """Hand an event to one target; a target that cannot take it gets its dead-letter queue."""
        body = target.get("Input") or json.dumps(event)
        send = self._sender(str(target["Arn"]), body, str(event["id"]))
        for attempt in range(DELIVERY_TRIES):
            if attempt and self._site.sleep(DELIVERY_PAUSE_SECONDS):
                return
            try:
                send()
                return
            except FunctionNotFoundError as error:
                reason = f"no such function: {error}"
                break  # NO_RESOURCE goes to the dead-letter queue without a retry
            except ClientError as error:
                reason = str(error)
        self._site.report(f"event {event['detail-type']} not delivered: {reason}")
        queue_arn = target.get("DeadLetterConfig", {}).get("Arn")
        if queue_arn:
            url = self._site.queue_url(queue_arn)
            self._site.client("sqs").send_message(QueueUrl=url, MessageBody=body)

    def _match(self, event: Event) -> None:
        for rule in self._rules():
            if rule.state != "ENABLED" or not rule.event_pattern.get_pattern():
                continue
            if rule.event_pattern.matches_event(event):
                for target in list(rule.targets):
                    self._site.pool.submit(self.deliver, target, event)

    def _ticker(self, rule: Any) -> Callable[[], None]:
        def tick() -> None:
            event = _event("aws.events", "Scheduled Event", {}, [rule.arn])
            for target in list(rule.targets):
                self._site.pool.submit(self.deliver, target, event)

        return tick

    def _sender(self, arn: str, body: str, event_id: str) -> Callable[[], None]:
        def send() -> None:
            service = arn.split(":")[2]
            if service == "lambda":
                self._lambdas.invoke_async(arn, body.encode())
            elif service == "states":
                # AWS names the execution anew for each delivery, so that a duplicate starts a
                # second one.
                name = f"{event_id}_{uuid.uuid4()}"
                client = self._site.client("stepfunctions")
                client.start_execution(stateMachineArn=arn, name=name, input=body)
            elif service == "sqs":
                url = self._site.queue_url(arn)
                self._site.client("sqs").send_message(QueueUrl=url, MessageBody=body)
            elif service == "sns":
                self._site.client("sns").publish(TopicArn=arn, Message=body)
            else:
                self._site.report(f"events to {arn} are not delivered here")

        return send

    @staticmethod
    def _rules() -> list[Any]:
        from moto.events.models import events_backends

        return list(events_backends[ACCOUNT][REGION].event_buses["default"].rules.values())


def rate_seconds(expression: str) -> float | None:
    """The period of `rate(5 minutes)`; None for any other kind of schedule."""
    found = _RATE.fullmatch(expression)
    return int(found[1]) * _UNIT_SECONDS[found[2]] if found else None


def _event(
    source: str, detail_type: str, detail: Mapping[str, Any], resources: Iterable[str]
) -> Event:
    return {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": detail_type,
        "source": source,
        "account": ACCOUNT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "region": REGION,
        "resources": list(resources),
        "detail": dict(detail),
    }
