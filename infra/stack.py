"""The stack: composes the constructs and says what came of them."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from infra.api import Api
from infra.events import EventRules
from infra.functions import Functions, Surroundings
from infra.inference import Inference
from infra.logs import log_group
from infra.monitoring import Monitoring
from infra.options import StackOptions
from infra.state_machine import RunStateMachine
from infra.storage import Storage
from infra.training import Training

__all__ = ["HubStack"]


class HubStack(cdk.Stack):
    """GRPO Hub."""

    def __init__(self, scope: Construct, options: StackOptions) -> None:
        super().__init__(
            scope, options.stack_name, description="GRPO Hub: from one YAML file to a live model"
        )
        storage = Storage(self, "Storage", options=options)
        training = Training(self, "Training", storage=storage, options=options)
        inference = Inference(self, "Inference", storage=storage, options=options)
        surroundings = Surroundings(
            storage=storage,
            options=options,
            # By name: the functions start executions of the machine whose tasks they are.
            state_machine_arn=self.format_arn(
                service="states",
                resource="stateMachine",
                resource_name=options.state_machine_name,
                arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
            ),
            training_image_uri=training.image.image_uri,
            training_role_arn=training.role.role_arn,
            inference_image_uri=inference.image.image_uri,
            inference_role_arn=inference.role.role_arn,
        )
        functions = Functions(self, "Functions", surroundings=surroundings).by_name
        run = RunStateMachine(
            self,
            "Run",
            name=options.state_machine_name,
            functions=functions,
            log_group=log_group(
                self,
                "RunLogs",
                # Groups under this prefix need no entry in the account's log resource policy.
                name=f"/aws/vendedlogs/states/{options.stack_name}",
                storage=storage,
                options=options,
            ),
        )
        EventRules(self, "Events", functions=functions, surroundings=surroundings)
        api = Api(
            self,
            "Api",
            functions=functions,
            log_group=log_group(
                self,
                "ApiLogs",
                name=f"/aws/vendedlogs/apis/{options.stack_name}",
                storage=storage,
                options=options,
            ),
            options=options,
        )
        Monitoring(
            self,
            "Monitoring",
            functions=functions,
            state_machine=run.state_machine,
            api=api.api,
            storage=storage,
            options=options,
        )
        for name, value in {
            "ApiUrl": api.api.api_endpoint,
            "BucketName": storage.bucket.bucket_name,
            "StateMachineArn": run.state_machine.state_machine_arn,
            "TableName": storage.table.table_name,
            "TrainingImageUri": training.image.image_uri,
            "InferenceImageUri": inference.image.image_uri,
        }.items():
            cdk.CfnOutput(self, name, value=value)
