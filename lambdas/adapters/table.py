"""The DynamoDB table: every write is conditional, so that a late or repeated event never rewinds a
state."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any, TypeVar

from boto3.dynamodb.conditions import Attr, ConditionBase, Key
from botocore.exceptions import ClientError

from contracts.states import (
    ATTEMPT_TRANSITIONS,
    ENDPOINT_TRANSITIONS,
    RUN_TRANSITIONS,
    STAGE_TRANSITIONS,
    AttemptState,
    EndpointState,
    RunState,
    StageState,
)
from lambdas.adapters.aws import error_code, error_message, resource
from lambdas.adapters.items import (
    Item,
    encode,
    endpoint_key,
    key_of,
    open_mark,
    read_record,
    read_token,
    run_key,
    stage_key,
    stamp,
    write_record,
    write_token,
)
from lambdas.errors import TransientError
from lambdas.logic.folder import RunFolder
from lambdas.logic.records import (
    AttemptRecord,
    EndpointRecord,
    InstanceOwner,
    RunRecord,
    StageRecord,
    TimelineRecord,
)
from lambdas.schema import INDEXES, PARTITION_KEY, SORT_KEY, TTL_ATTRIBUTE

__all__ = ["Table"]

StateT = TypeVar("StateT", RunState, StageState, AttemptState, EndpointState)
Stateful = RunRecord | StageRecord | AttemptRecord | EndpointRecord
_REFUSED = "ConditionalCheckFailedException"
# Of a cancelled transaction: another write met one of its rows, or the table was busy.
_PASSING = {"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"}


class Table:
    """Runs, stages, attempts, endpoints, timeline, instances and idempotency keys."""

    def __init__(self, name: str) -> None:
        self._resource = resource("dynamodb")
        self._table = self._resource.Table(name)
        self._name = name

    # Reading -------------------------------------------------------------------------------------

    def load(self, run_id: str) -> RunFolder | None:
        """A run with its stages and attempts, in one consistent query; None when there is no
        run."""
        condition = Key(PARTITION_KEY).eq(f"RUN#{run_id}") & Key(SORT_KEY).between(
            "ATTEMPT#", "STAGE#~"
        )
        items = self._query(KeyConditionExpression=condition, ConsistentRead=True)
        runs = [item for item in items if item[SORT_KEY] == "RUN"]
        if not runs:
            return None
        return RunFolder(
            run=read_record(RunRecord, runs[0]),
            stages=tuple(
                read_record(StageRecord, item)
                for item in items
                if item[SORT_KEY].startswith("STAGE#")
            ),
            attempts=tuple(
                read_record(AttemptRecord, item)
                for item in items
                if item[SORT_KEY].startswith("ATTEMPT#")
            ),
        )

    def get_run(self, run_id: str) -> RunRecord | None:
        """A run's own row."""
        item = self._get(run_key(run_id))
        return None if item is None else read_record(RunRecord, item)

    def get_endpoint(self, name: str) -> EndpointRecord | None:
        """An endpoint's row."""
        item = self._get(endpoint_key(name))
        return None if item is None else read_record(EndpointRecord, item)

    def open_runs(self) -> list[RunRecord]:
        """Runs that are not terminal."""
        return [read_record(RunRecord, item) for item in self._open("RUN")]

    def open_attempts(self) -> list[AttemptRecord]:
        """Attempts that have not ended, or whose end the execution does not know yet."""
        return [read_record(AttemptRecord, item) for item in self._open("ATTEMPT")]

    def open_endpoints(self) -> list[EndpointRecord]:
        """Endpoints that exist."""
        return [read_record(EndpointRecord, item) for item in self._open("ENDPOINT")]

    def list_runs(
        self, limit: int, token: str | None, state: RunState | None
    ) -> tuple[list[RunRecord], str | None]:
        """A page of runs, newest first."""
        extra: dict[str, Any] = {"ScanIndexForward": False}
        if state is not None:
            extra["FilterExpression"] = Attr("state").eq(state.value)
        condition = Key(INDEXES["listed"].partition_key).eq("RUN")
        items, after = self._page(condition, limit, token, "listed", **extra)
        return [read_record(RunRecord, item) for item in items], after

    def timeline(
        self, run_id: str, limit: int, token: str | None
    ) -> tuple[list[TimelineRecord], str | None]:
        """A page of a run's timeline, oldest first."""
        condition = Key(PARTITION_KEY).eq(f"RUN#{run_id}") & Key(SORT_KEY).begins_with("TIMELINE#")
        items, after = self._page(condition, limit, token, None)
        return [read_record(TimelineRecord, item) for item in items], after

    # Writing -------------------------------------------------------------------------------------

    def create_run(self, run: RunRecord, stages: tuple[StageRecord, ...]) -> bool:
        """Put a new run. False: it exists."""
        records: tuple[RunRecord | StageRecord, ...] = (run, *stages)
        puts = [self._put(write_record(record)) for record in records]
        return self._transact(puts)

    def update_run(self, run: RunRecord, state: RunState | None = None, **changes: Any) -> bool:
        """Change a run. False: it is in a state that ``state`` may not follow."""
        before = _predecessors(RUN_TRANSITIONS, state)
        return self._update(run, before, state=state, updated_at=_now(), **changes)

    def update_stage(
        self, stage: StageRecord, state: StageState | None = None, **changes: Any
    ) -> bool:
        """Change a stage. False: it is in a state that ``state`` may not follow."""
        return self._update(stage, _predecessors(STAGE_TRANSITIONS, state), state=state, **changes)

    def update_attempt(
        self,
        attempt: AttemptRecord,
        state: AttemptState | None = None,
        *,
        when: AttemptState | None = None,
        **changes: Any,
    ) -> bool:
        """Change an attempt. False: ``state`` may not follow, it is not in the state ``when``, or
        it has ended already: of two that see its end, one writes and counts it."""
        before = {when} if when else _predecessors(ATTEMPT_TRANSITIONS, state)
        if before is not None and state is AttemptState.ENDED:
            before.discard(AttemptState.ENDED)
        return self._update(attempt, before, state=state, **changes)

    def put_attempt(self, attempt: AttemptRecord, stage: StageRecord) -> bool:
        """Put the next attempt of a stage and count it. False: it exists, or the run is over.

        The run's row is checked in the same transaction, so a cancelled run gets no new attempt.
        """
        alive = [RunState.TRAINING, RunState.WAITING_CAPACITY, RunState.WAITING_QUOTA]
        states = {f":alive{index}": state.value for index, state in enumerate(alive)}
        return self._transact(
            [
                self._put(write_record(attempt)),
                {
                    "Update": {
                        "TableName": self._name,
                        "Key": stage_key(stage.run_id, stage.index),
                        "UpdateExpression": "SET attempts = :number",
                        "ConditionExpression": "attempts = :before",
                        "ExpressionAttributeValues": {
                            ":number": attempt.number,
                            ":before": stage.attempts,
                        },
                    }
                },
                {
                    "ConditionCheck": {
                        "TableName": self._name,
                        "Key": run_key(attempt.run_id),
                        "ConditionExpression": f"#state IN ({', '.join(states)})",
                        "ExpressionAttributeNames": {"#state": "state"},
                        "ExpressionAttributeValues": states,
                    }
                },
            ]
        )

    def claim_endpoint(self, endpoint: EndpointRecord) -> bool:
        """Put an endpoint's row for a deployment. False: another run's deployment is under way."""
        free = (
            Attr(PARTITION_KEY).not_exists()
            | Attr("owned").eq(False)
            | Attr("run_id").eq(endpoint.run_id)
        )
        return self._conditional_put(write_record(endpoint), free)

    def update_endpoint(
        self, endpoint: EndpointRecord, state: EndpointState | None = None, **changes: Any
    ) -> bool:
        """Change an endpoint. False: ``state`` may not follow, or it was deployed anew
        meanwhile."""
        before = _predecessors(ENDPOINT_TRANSITIONS, state)
        same = Attr("config_name").eq(endpoint.config_name)
        if state is not None and state is not endpoint.state:
            changes["updated_at"] = _now()
        return self._update(endpoint, before, state=state, also=same, **changes)

    def add_timeline(self, entry: TimelineRecord) -> bool:
        """Add an entry. False: it was there."""
        return self._conditional_put(write_record(entry), Attr(PARTITION_KEY).not_exists())

    def put_instance(self, instance_id: str, owner: InstanceOwner, expires: dt.datetime) -> None:
        """Remember whom an EC2 instance works for."""
        self._table.put_item(
            Item={
                PARTITION_KEY: f"INSTANCE#{instance_id}",
                SORT_KEY: "INSTANCE",
                TTL_ATTRIBUTE: int(expires.timestamp()),
                **dataclasses.asdict(owner),
            }
        )

    def get_instance(self, instance_id: str) -> InstanceOwner | None:
        """Whom an EC2 instance works for; None for anybody else's."""
        item = self._get({PARTITION_KEY: f"INSTANCE#{instance_id}", SORT_KEY: "INSTANCE"})
        if item is None:
            return None
        return InstanceOwner(
            item["run_id"], int(item["stage_index"]), item["stage"], int(item["attempt"])
        )

    def claim_key(
        self, key: str, run_id: str, body_sha256: str, expires: dt.datetime
    ) -> tuple[str, str]:
        """Bind an idempotency key to a run. Returns the (run id, body hash) it is bound to, new or
        old."""
        keys = {PARTITION_KEY: f"IDEMPOTENCY#{key}", SORT_KEY: "IDEMPOTENCY"}
        item = {
            **keys,
            "run_id": run_id,
            "body_sha256": body_sha256,
            TTL_ATTRIBUTE: int(expires.timestamp()),
        }
        # TTL deletes late, so an expired key may still be there and is as good as gone.
        free = Attr(PARTITION_KEY).not_exists() | Attr(TTL_ATTRIBUTE).lt(int(_now().timestamp()))
        if self._conditional_put(item, free):
            return run_id, body_sha256
        found = self._get(keys) or item
        return str(found["run_id"]), str(found["body_sha256"])

    # -- private ----------------------------------------------------------------------------------

    def _update(
        self,
        record: Stateful,
        before: set[Any] | None,
        *,
        state: Any = None,
        also: ConditionBase | None = None,
        **changes: Any,
    ) -> bool:
        if state is not None:
            changes["state"] = state
        after = dataclasses.replace(record, **changes)
        values: Item = {k: encode(v) for k, v in changes.items() if v is not None}
        removed: list[str] = [name for name, value in changes.items() if value is None]
        mark = open_mark(after)
        if mark is None:
            removed += ["open", "open_since"]
        elif state is not None:
            values |= {"open": mark, "open_since": stamp(_now())}
        condition: ConditionBase = Attr(PARTITION_KEY).exists()
        if before is not None:
            condition &= Attr("state").is_in(sorted(item.value for item in before))
        if also is not None:
            condition &= also
        names = {f"#{name}": name for name in (*values, *removed)}
        parts = []
        if values:
            parts.append("SET " + ", ".join(f"#{name} = :{name}" for name in values))
        if removed:
            parts.append("REMOVE " + ", ".join(f"#{name}" for name in removed))
        request: dict[str, Any] = {
            "Key": key_of(record),
            "UpdateExpression": " ".join(parts),
            "ConditionExpression": condition,
            "ExpressionAttributeNames": names,
        }
        if values:
            request["ExpressionAttributeValues"] = {f":{k}": v for k, v in values.items()}
        try:
            self._table.update_item(**request)
        except ClientError as error:
            if error_code(error) == _REFUSED:
                return False
            raise
        return True

    def _conditional_put(self, item: Item, condition: ConditionBase) -> bool:
        try:
            self._table.put_item(Item=item, ConditionExpression=condition)
        except ClientError as error:
            if error_code(error) == _REFUSED:
                return False
            raise
        return True

    def _put(self, item: Item) -> dict[str, Any]:
        return {
            "Put": {
                "TableName": self._name,
                "Item": item,
                "ConditionExpression": f"attribute_not_exists({PARTITION_KEY})",
            }
        }

    def _transact(self, actions: list[dict[str, Any]]) -> bool:
        try:  # A resource's client turns Python values into DynamoDB's and back.
            self._resource.meta.client.transact_write_items(TransactItems=actions)
        except ClientError as error:
            if error_code(error) != "TransactionCanceledException":
                raise
            reasons = {item.get("Code") for item in error.response.get("CancellationReasons", ())}
            if "ConditionalCheckFailed" in reasons:
                return False
            if reasons & _PASSING:
                raise TransientError(f"{error.operation_name}: {error_message(error)}") from error
            raise
        return True

    def _get(self, key: Item) -> Item | None:
        answer = self._table.get_item(Key=key, ConsistentRead=True)
        item: Item | None = answer.get("Item")
        return item

    def _open(self, kind: str) -> list[Item]:
        index = INDEXES["open"]
        return self._query(
            IndexName=index.name, KeyConditionExpression=Key(index.partition_key).eq(kind)
        )

    def _query(self, **request: Any) -> list[Item]:
        items: list[Item] = []
        while True:
            answer = self._table.query(**request)
            items += answer["Items"]
            if "LastEvaluatedKey" not in answer:
                return items
            request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]

    def _page(
        self, condition: ConditionBase, limit: int, token: str | None, index: str | None,
        **extra: Any,
    ) -> tuple[list[Item], str | None]:  # fmt: skip
        """Items until ``limit`` are found: a filter is applied after DynamoDB has counted to
        Limit."""
        request: dict[str, Any] = {"KeyConditionExpression": condition, "Limit": limit, **extra}
        if index is not None:
            request["IndexName"] = index
        after = read_token(token)
        items: list[Item] = []
        while True:
            if after is not None:
                request["ExclusiveStartKey"] = after
            request["Limit"] = limit - len(items)
            answer = self._table.query(**request)
            items += answer["Items"]
            after = answer.get("LastEvaluatedKey")
            if after is None or len(items) >= limit:
                return items, write_token(after)


def _predecessors(
    table: Mapping[StateT, frozenset[StateT]], state: StateT | None
) -> set[StateT] | None:
    """States that ``state`` may follow, itself included; None when no state is to be written."""
    if state is None:
        return None
    return {state} | {before for before, after in table.items() if state in after}


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
