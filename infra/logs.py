"""Log groups that are encrypted, forgotten in time, and gone with the stack."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.options import StackOptions
from infra.storage import Storage

__all__ = ["log_group"]


def log_group(
    scope: Construct, id: str, *, name: str, storage: Storage, options: StackOptions
) -> logs.LogGroup:
    """A log group with the stack's key and retention.

    Created here and not by the service at its first line, which would keep everything for ever.
    """
    return logs.LogGroup(
        scope,
        id,
        log_group_name=name,
        retention=logs.RetentionDays[_RETENTION[options.log_retention_days]],
        encryption_key=storage.key,
        removal_policy=cdk.RemovalPolicy.DESTROY,
    )


_RETENTION = {
    7: "ONE_WEEK",
    14: "TWO_WEEKS",
    30: "ONE_MONTH",
    60: "TWO_MONTHS",
    90: "THREE_MONTHS",
    180: "SIX_MONTHS",
    365: "ONE_YEAR",
}
