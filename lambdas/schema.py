"""Keys and indexes of the single DynamoDB table, as plain data for the CDK app, the adapter and
tests.

| item | pk | sk |
|---|---|---|
| run | `RUN#<run id>` | `RUN` |
| stage | `RUN#<run id>` | `STAGE#<i>` |
| attempt | `RUN#<run id>` | `ATTEMPT#<i>#<nnnn>` |
| timeline entry | `RUN#<run id>` | `TIMELINE#<time>#<kind>#<discriminator>` |
| endpoint | `ENDPOINT#<name>` | `ENDPOINT` |
| EC2 instance | `INSTANCE#<i-…>` | `INSTANCE` |
| idempotency key | `IDEMPOTENCY#<key>` | `IDEMPOTENCY` |
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INDEXES", "PARTITION_KEY", "SORT_KEY", "TTL_ATTRIBUTE", "Index"]

PARTITION_KEY = "pk"
SORT_KEY = "sk"
TTL_ATTRIBUTE = "expires_at"
"""Epoch seconds; on idempotency keys and instances only."""


@dataclass(frozen=True, slots=True)
class Index:
    """A sparse global secondary index: an item without its keys is not in it. All attributes are
    projected."""

    name: str
    partition_key: str
    sort_key: str


INDEXES: dict[str, Index] = {
    # listed = "RUN" | "ENDPOINT"; listed_at = creation time
    "listed": Index("listed", "listed", "listed_at"),
    # open = "RUN" | "ATTEMPT" | "ENDPOINT" while the reconciler has to look at the item
    "open": Index("open", "open", "open_since"),
}
