"""The options of the stack: `cdk.json` context, or `-c name=value` on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["StackOptions", "VpcOptions"]


class VpcOptions(BaseModel):
    """Where training jobs and endpoints attach; they then have no other network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subnet_ids: Annotated[tuple[str, ...], Field(min_length=1)]
    security_group_ids: Annotated[tuple[str, ...], Field(min_length=1)]


class StackOptions(BaseModel):
    """Every option. Lists and objects may be JSON text, because `-c` passes only text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    stack_name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,39}$")] = "GrpoHub"
    """CloudFormation stack; two hubs in one account and region differ by it."""
    region: str = Field(
        default_factory=lambda: (
            os.environ.get("CDK_DEFAULT_REGION") or os.environ.get("AWS_REGION") or "us-east-1"
        )
    )
    """Whose AWS base images the containers build on; the template itself fits every region."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_retention_days: Literal[7, 14, 30, 60, 90, 180, 365] = 90
    removal: Literal["retain", "destroy"] = "retain"
    """What `cdk destroy` does with bucket, table and key; `destroy` is for test accounts."""
    readable_buckets: tuple[str, ...] = ()
    """Other buckets that run files may name as data or model; never written to."""
    secret_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9/_+=.@-]+$")] = "grpohub/"
    """Only secrets with this name prefix can be read by containers (hub tokens, judge keys)."""
    vpc: VpcOptions | None = None
    encrypt_traffic_between_hosts: bool = False
    """Encrypt what the hosts of a multi-host job exchange; slower, and not available with EFA."""
    alarm_email: str | None = None
    """Gets every alarm, after confirming the subscription."""
    throttle_rate: Annotated[int, Field(ge=1)] = 50
    """API requests per second."""
    throttle_burst: Annotated[int, Field(ge=1)] = 100
    nag: bool = True
    """Judge the stack by cdk-nag's AwsSolutions rules; an unexplained finding fails the synth."""

    @property
    def state_machine_name(self) -> str:
        """`grpo-run`; a second hub in the account has its stack's name behind it."""
        return "grpo-run" if self.stack_name == "GrpoHub" else f"grpo-run-{self.stack_name}"

    @field_validator("readable_buckets", "vpc", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @classmethod
    def from_context(cls, context: Mapping[str, Any]) -> StackOptions:
        """The options among a CDK app's context; the CDK's own keys hold a `:` or a `/`.

        Raises:
            pydantic.ValidationError: naming an unknown or wrong option.
        """
        ours = {k: v for k, v in context.items() if ":" not in k and "/" not in k}
        ours.pop("aws-cdk", None)
        return cls.model_validate({k: v for k, v in ours.items() if v is not None})
