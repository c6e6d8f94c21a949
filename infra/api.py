"""The HTTP API: one Lambda behind every route, IAM-signed, throttled, logged."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aws_cdk import aws_apigatewayv2 as apigateway
from aws_cdk import aws_logs as logs
from aws_cdk.aws_apigatewayv2_authorizers import HttpIamAuthorizer
from aws_cdk.aws_apigatewayv2_integrations import HttpLambdaIntegration
from constructs import Construct

from infra.functions import HubFunction
from infra.options import StackOptions

__all__ = ["Api"]

ACCESS_LOG_FORMAT = {
    "requestId": "$context.requestId",
    "time": "$context.requestTime",
    "caller": "$context.identity.userArn",
    "route": "$context.routeKey",
    "path": "$context.path",
    "status": "$context.status",
    "milliseconds": "$context.responseLatency",
    "error": "$context.integrationErrorMessage",
}


class Api(Construct):
    """API Gateway HTTP API with the paths under `/v1`."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        functions: Mapping[str, HubFunction],
        log_group: logs.LogGroup,
        options: StackOptions,
    ) -> None:
        super().__init__(scope, id)
        self.api = apigateway.HttpApi(
            self,
            "Http",
            api_name=f"{options.stack_name}-api",
            description="GRPO Hub: runs, endpoints, rewards, recipes",
            create_default_stage=False,
            default_authorizer=HttpIamAuthorizer(),
        )
        for name, item in functions.items():
            for route in item.row.routes:
                method, path = route.split(" ", 1)
                self.api.add_routes(
                    path=path,
                    methods=[apigateway.HttpMethod[method]],
                    integration=HttpLambdaIntegration(f"To-{name}", item.function),
                )
        self.stage = apigateway.HttpStage(
            self,
            "Stage",
            http_api=self.api,
            stage_name="$default",
            auto_deploy=True,
            throttle=apigateway.ThrottleSettings(
                rate_limit=options.throttle_rate, burst_limit=options.throttle_burst
            ),
        )
        self._log_access(log_group)

    def _log_access(self, log_group: logs.LogGroup) -> None:
        stage = self.stage.node.default_child
        assert isinstance(stage, apigateway.CfnStage)
        stage.access_log_settings = apigateway.CfnStage.AccessLogSettingsProperty(
            destination_arn=log_group.log_group_arn, format=json.dumps(ACCESS_LOG_FORMAT)
        )
