"""EventBridge rules: what wakes the control plane, as each function's row in the table says.

Rules, not EventBridge Scheduler, and the default bus: that is where AWS services send their events.
"""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from constructs import Construct

from infra.functions import HubFunction, Surroundings

__all__ = ["EventRules"]


class EventRules(Construct):
    """All rules, each with one Lambda target and that function's dead-letter queue."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        functions: Mapping[str, HubFunction],
        surroundings: Surroundings,
    ) -> None:
        super().__init__(scope, id)
        for function in functions.values():
            for rule in function.row.rules:
                pattern = surroundings.fill(rule.pattern)
                events.Rule(
                    self,
                    rule.name,
                    description=rule.description,
                    event_pattern=events.EventPattern(
                        source=pattern["source"],
                        detail_type=pattern["detail-type"],
                        detail=pattern.get("detail"),
                    ),
                    targets=[self._target(function)],
                )
            if function.row.schedule_minutes:
                events.Rule(
                    self,
                    f"{function.row.construct_id}Schedule",
                    description=function.row.description,
                    schedule=events.Schedule.rate(
                        cdk.Duration.minutes(function.row.schedule_minutes)
                    ),
                    targets=[self._target(function)],
                )

    def _target(self, function: HubFunction) -> targets.LambdaFunction:
        """EventBridge gives up after 24 hours; what it gives up goes to the queue."""
        return targets.LambdaFunction(
            function.function,
            dead_letter_queue=function.dead_letters,
            retry_attempts=185,
            max_event_age=cdk.Duration.hours(24),
        )
