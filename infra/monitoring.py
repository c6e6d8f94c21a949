"""What a person looks at, and what wakes one: a dashboard, and alarms that say what to do."""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_apigatewayv2 as apigateway
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.functions import HubFunction
from infra.options import StackOptions
from infra.storage import Storage
from lambdas import functions as table

__all__ = ["Monitoring"]

RECONCILE_MINUTES = table.function("reconcile").schedule_minutes or 5
_FIVE_MINUTES = cdk.Duration.minutes(5)


class Monitoring(Construct):
    """The topic, the alarms and the dashboard."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        functions: Mapping[str, HubFunction],
        state_machine: sfn.StateMachine,
        api: apigateway.HttpApi,
        storage: Storage,
        options: StackOptions,
    ) -> None:
        super().__init__(scope, id)
        self._functions = functions
        self.topic = self._build_topic(storage, options)
        self._build_queue_alarms()
        self._build_reconciler_alarm()
        self._build_run_alarms(state_machine)
        self._build_api_alarm(api)
        self._build_dashboard(state_machine, api, options)

    def _build_topic(self, storage: Storage, options: StackOptions) -> sns.Topic:
        topic = sns.Topic(self, "Alarms", master_key=storage.key, enforce_ssl=True)
        if options.alarm_email:
            topic.add_subscription(subscriptions.EmailSubscription(options.alarm_email))
        return topic

    def _alarm(
        self,
        id: str,
        metric: cloudwatch.IMetric,
        description: str,
        *,
        threshold: float = 1,
        periods: int = 1,
        below: bool = False,
        missing: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
    ) -> None:
        comparison = cloudwatch.ComparisonOperator
        alarm = cloudwatch.Alarm(
            self,
            id,
            metric=metric,
            alarm_description=description,
            threshold=threshold,
            evaluation_periods=periods,
            comparison_operator=comparison.LESS_THAN_THRESHOLD
            if below
            else comparison.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=missing,
        )
        alarm.add_alarm_action(actions.SnsAction(self.topic))

    def _build_queue_alarms(self) -> None:
        for name, function in self._functions.items():
            if function.dead_letters is None:
                continue
            self._alarm(
                f"DeadLetters-{name}",
                function.dead_letters.metric_approximate_number_of_messages_visible(
                    period=_FIVE_MINUTES, statistic="Maximum"
                ),
                f"An event never reached {name}, or failed there three times. Read the message's "
                f"error in the queue, and the function's log. When the cause is gone, purge the "
                f"queue: the reconciler repeats within {RECONCILE_MINUTES} minutes what the "
                f"event asked for.",
            )

    def _build_reconciler_alarm(self) -> None:
        self._alarm(
            "ReconcilerLag",
            self._functions["reconcile"].function.metric_invocations(
                period=cdk.Duration.minutes(3 * RECONCILE_MINUTES), statistic="Sum"
            ),
            f"The reconciler has not run for {3 * RECONCILE_MINUTES} minutes: lost events stay "
            "lost, and tokens get no heartbeat, so runs time out. Check that its schedule rule is "
            "enabled and that the account has Lambda concurrency left.",
            below=True,
            missing=cloudwatch.TreatMissingData.BREACHING,
        )
        self._alarm(
            "ReconcilerErrors",
            self._functions["reconcile"].function.metric_errors(
                period=_FIVE_MINUTES, statistic="Sum"
            ),
            "The reconciler failed three times in a row. Its log names the run and the call; other "
            "runs may be waiting behind it.",
            periods=3,
        )

    def _build_run_alarms(self, state_machine: sfn.StateMachine) -> None:
        self._alarm(
            "FailedExecutions",
            state_machine.metric_failed(period=_FIVE_MINUTES, statistic="Sum"),
            "A run failed. `grpohub status <run>` says why. When the cause is mended, `grpohub "
            "resume <run>` or Redrive in the Step Functions console goes on from "
            "the newest checkpoint.",
        )
        self._alarm(
            "TimedOutExecutions",
            state_machine.metric_timed_out(period=_FIVE_MINUTES, statistic="Sum"),
            "A run reached its time limit. Check that its training job has stopped, raise "
            "max_wait_hours or extend the ladder, and resume the run.",
        )
        self._alarm(
            "NoProgress",
            self._hub_metric("NoProgress", "Sum"),
            "A running job has written no complete checkpoint for too long. Look at the run's log "
            "and at seconds/* in its metrics: a hung rank, an upload that fails, or a job "
            "that never leaves Stopping.",
        )
        self._alarm(
            "AttemptsNeedingAttention",
            self._hub_metric("AttemptsNeedingAttention", "Sum"),
            "SageMaker reports a status of a training job that the hub has no rule for. The run is "
            "held, not failed: its timeline shows the status. Stop the job, or wait for SageMaker.",
        )
        self._alarm(
            "OrphanedJobs",
            self._hub_metric("OrphanedJobs", "Sum"),
            "A training job with this stack's tags was running although no attempt stood behind "
            "it, and was stopped. The reconciler's log names it. Check whether rows of the table "
            "were deleted or restored, and whether somebody copied a job together with its tags.",
        )

    def _build_api_alarm(self, api: apigateway.HttpApi) -> None:
        self._alarm(
            "ApiServerErrors",
            api.metric_server_error(period=_FIVE_MINUTES, statistic="Sum"),
            "The API answered 5xx five times in five minutes. Search the API function's log for "
            "the request_id that callers were given.",
            threshold=5,
        )

    def _hub_metric(self, name: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=table.ENVIRONMENT["POWERTOOLS_METRICS_NAMESPACE"],
            metric_name=name,
            statistic=statistic,
            period=_FIVE_MINUTES,
            dimensions_map={"service": table.ENVIRONMENT["POWERTOOLS_SERVICE_NAME"]},
        )

    def _spot_savings(self) -> cloudwatch.MathExpression:
        """Of the instance time that Spot attempts trained, the part that was not billed."""
        return cloudwatch.MathExpression(
            expression="100 * saved / trained",
            label="saved",
            period=cdk.Duration.days(1),
            using_metrics={
                "saved": self._hub_metric("SpotSavedInstanceSeconds", "Sum"),
                "trained": self._hub_metric("SpotInstanceSeconds", "Sum"),
            },
        )

    def _build_dashboard(
        self, state_machine: sfn.StateMachine, api: apigateway.HttpApi, options: StackOptions
    ) -> None:
        def graph(title: str, *metrics: cloudwatch.IMetric) -> cloudwatch.GraphWidget:
            return cloudwatch.GraphWidget(title=title, left=list(metrics), width=8, height=6)

        functions = [item.function for item in self._functions.values()]
        queues = [item.dead_letters for item in self._functions.values() if item.dead_letters]
        dashboard = cloudwatch.Dashboard(self, "Dashboard", dashboard_name=options.stack_name)
        dashboard.add_widgets(
            graph(
                "Runs",
                state_machine.metric_started(statistic="Sum"),
                state_machine.metric_succeeded(statistic="Sum"),
                state_machine.metric_failed(statistic="Sum"),
                state_machine.metric_aborted(statistic="Sum"),
            ),
            graph(
                "Attempts and interruptions",
                self._hub_metric("AttemptsEnded", "Sum"),
                self._hub_metric("Interruptions", "Sum"),
                self._hub_metric("Resubmissions", "Sum"),
            ),
            graph("Recovery (s)", self._hub_metric("RecoverySeconds", "Average")),
        )
        dashboard.add_widgets(
            graph("Steps lost to interruptions", self._hub_metric("StepsLost", "Sum")),
            graph("Spot savings (%)", self._spot_savings()),
            graph("Checkpoint lag (s)", self._hub_metric("CheckpointLagSeconds", "Maximum")),
        )
        dashboard.add_widgets(
            graph(
                "Reconciler",
                self._hub_metric("ReconcilerPasses", "Sum"),
                self._hub_metric("OpenAttempts", "Maximum"),
                self._hub_metric("EventsMissed", "Sum"),
                self._hub_metric("OrphanedJobs", "Sum"),
            ),
            graph(
                "Endpoints and models",
                self._hub_metric("ModelsPublished", "Sum"),
                self._hub_metric("RunsSucceeded", "Sum"),
            ),
            graph(
                "API",
                api.metric_count(statistic="Sum"),
                api.metric_client_error(statistic="Sum"),
                api.metric_server_error(statistic="Sum"),
            ),
        )
        dashboard.add_widgets(
            graph("Function errors", *(f.metric_errors(statistic="Sum") for f in functions)),
            graph(
                "Function duration p99", *(f.metric_duration(statistic="p99") for f in functions)
            ),
            graph(
                "Dead letters",
                *(q.metric_approximate_number_of_messages_visible() for q in queues),
            ),
        )
