"""Step Functions: executions and their task tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from lambdas.adapters.aws import client, error_code

__all__ = ["Executions"]

# AWS says TaskTimedOut or TaskDoesNotExist of a late token, other implementations InvalidToken.
# Each means that the execution has gone on and no longer wants to know.
_SETTLED = {"TaskTimedOut", "TaskDoesNotExist", "InvalidToken"}


class Executions:
    """Executions of the one state machine."""

    def __init__(self) -> None:
        self._states = client("stepfunctions")

    def start(self, state_machine_arn: str, name: str, payload: Mapping[str, Any]) -> None:
        """Start ``name``; an execution of that name, running or ended, is as good."""
        try:
            self._states.start_execution(
                stateMachineArn=state_machine_arn, name=name, input=json.dumps(payload)
            )
        except ClientError as error:
            if error_code(error) != "ExecutionAlreadyExists":
                raise

    def stop(self, execution_arn: str, error: str, cause: str) -> None:
        """Abort an execution; one that has ended or never was is left alone."""
        try:
            self._states.stop_execution(executionArn=execution_arn, error=error, cause=cause)
        except ClientError as failure:
            if error_code(failure) not in ("ExecutionDoesNotExist", "ValidationException"):
                raise

    def status(self, execution_arn: str) -> tuple[str, str | None, str | None] | None:
        """(status, error, cause); None when there is no such execution."""
        try:
            answer = self._states.describe_execution(executionArn=execution_arn)
        except ClientError as error:
            if error_code(error) == "ExecutionDoesNotExist":
                return None
            raise
        return answer["status"], answer.get("error"), answer.get("cause")

    def settle(self, token: str, output: Mapping[str, Any]) -> bool:
        """Answer a waiting task. False: it does not wait any more, which is settled too."""
        try:
            self._states.send_task_success(taskToken=token, output=json.dumps(output))
        except ClientError as error:
            if error_code(error) in _SETTLED:
                return False
            raise
        return True

    def heartbeat(self, token: str) -> bool:
        """Say that the task is alive. False: nobody waits for it."""
        try:
            self._states.send_task_heartbeat(taskToken=token)
        except ClientError as error:
            if error_code(error) in _SETTLED:
                return False
            raise
        return True
