"""The state machine `grpo-run`, from its definition file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.bundle import REPOSITORY
from infra.functions import HubFunction
from infra.permissions import acknowledge_wildcards

__all__ = ["DEFINITION", "RunStateMachine"]

DEFINITION = REPOSITORY / "state_machines" / "grpo_run.asl.json"
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


class RunStateMachine(Construct):
    """One Standard execution per run; its only tasks are our functions."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        name: str,
        functions: Mapping[str, HubFunction],
        log_group: logs.LogGroup,
        definition: Path = DEFINITION,
    ) -> None:
        super().__init__(scope, id)
        used = self._functions_of(definition, functions)
        self.state_machine = sfn.StateMachine(
            self,
            "Machine",
            state_machine_name=name,
            definition_body=sfn.DefinitionBody.from_file(str(definition)),
            definition_substitutions={
                placeholder: function.function_arn for placeholder, function in used.items()
            },
            logs=sfn.LogOptions(
                destination=log_group, level=sfn.LogLevel.ALL, include_execution_data=True
            ),
            tracing_enabled=True,
        )
        role = self.state_machine.role
        for function in used.values():
            function.grant_invoke(role)
        acknowledge_wildcards(
            role,
            [f"{function.function_arn}:*" for function in used.values()],
            "The run's own functions, at any version.",
        )
        acknowledge_wildcards(role, ["*"], "Log delivery and X-Ray have no resources.")

    @staticmethod
    def _functions_of(
        definition: Path, functions: Mapping[str, HubFunction]
    ) -> dict[str, lambda_.Function]:
        """Placeholders of the definition and the functions they stand for."""
        by_placeholder = {item.row.substitution: item.function for item in functions.values()}
        wanted = set(_PLACEHOLDER.findall(definition.read_text()))
        if unknown := sorted(wanted - by_placeholder.keys()):
            raise ValueError(f"{definition.name} names {unknown}, which are no functions")
        return {name: by_placeholder[name] for name in sorted(wanted)}
