"""Events as AWS sends them: tolerant reading, and what the embedded mode emits."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from contracts.events import (
    EndpointEvent,
    ExecutionEvent,
    ObjectCreatedEvent,
    RebalanceEvent,
    SpotInterruptionEvent,
    TrainingJobEvent,
    endpoint_event,
    execution_event,
    normalize_endpoint_status,
    object_created_event,
    parse_event,
    rebalance_event,
    sequencer_order,
    spot_interruption_event,
    training_job_event,
)
from contracts.problems import InvalidInputError

NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 250_000, tzinfo=dt.UTC)
NOON_MS = 1_767_355_200_250


def training_job(detail: dict[str, Any], **envelope: Any) -> TrainingJobEvent:
    event = parse_event(
        {
            "detail-type": "SageMaker Training Job State Change",
            "source": "aws.sagemaker",
            "detail": {"TrainingJobName": "j", "TrainingJobStatus": "InProgress", **detail},
            **envelope,
        }
    )
    assert isinstance(event, TrainingJobEvent)
    return event


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NOON_MS, NOON),
        (float(NOON_MS), NOON),
        (str(NOON_MS), NOON),
        ("2026-01-02T12:00:00.25Z", NOON),
        (None, None),
        ("", None),
    ],
)
def test_times_come_as_epoch_milliseconds_text_null_or_iso(value: object, expected: object) -> None:
    """Documented examples and recorded events differ (FACTS A.1.1)."""
    detail = training_job({"CreationTime": value, "TrainingEndTime": value}).detail
    assert detail.creation_time == expected
    assert detail.training_end_time == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"run": "r"}, {"run": "r"}),
        ([{"Key": "run", "Value": "r"}, {"Key": "bare"}], {"run": "r", "bare": ""}),
        (None, {}),
    ],
)
def test_tags_come_as_a_map_a_list_or_null(value: object, expected: dict[str, str]) -> None:
    assert training_job({"Tags": value}).detail.tags == expected


def test_unknown_fields_and_statuses_are_kept() -> None:
    event = training_job(
        {
            "TrainingJobStatus": "Hibernating",
            "SecondaryStatus": "Dreaming",
            "FailureReason": None,
            "ResourceConfig": {"InstanceCount": 2},
            "SecondaryStatusTransitions": [
                {"Status": "Interrupted", "StartTime": str(NOON_MS), "Weather": "rain"}
            ],
        },
        replayed=True,
        resources=None,
    )
    detail = event.detail
    assert (detail.training_job_status, detail.secondary_status) == ("Hibernating", "Dreaming")
    assert detail.failure_reason is None
    assert detail.model_extra == {"ResourceConfig": {"InstanceCount": 2}}
    assert event.model_extra == {"replayed": True}
    assert event.resources == ()
    [transition] = detail.secondary_status_transitions
    assert (transition.status, transition.start_time) == ("Interrupted", NOON)
    assert transition.model_extra == {"Weather": "rain"}


def test_null_transitions_read_as_none_happened() -> None:
    assert training_job({"SecondaryStatusTransitions": None}).detail == training_job({}).detail


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("IN_SERVICE", "InService"),
        ("InService", "InService"),
        ("UPDATE_ROLLBACK_FAILED", "UpdateRollbackFailed"),
        ("SystemUpdating", "SystemUpdating"),
        ("NEW_STATUS", "NEW_STATUS"),
    ],
)
def test_endpoint_statuses_are_read_in_the_spelling_of_the_api(status: str, expected: str) -> None:
    assert normalize_endpoint_status(status) == expected
    event = parse_event(
        {
            "detail-type": "SageMaker Endpoint State Change",
            "source": "aws.sagemaker",
            "time": NOON_MS,  # epoch milliseconds in this event's envelope
            "detail": {"EndpointName": "e", "EndpointStatus": status, "ProductionVariants": []},
        }
    )
    assert isinstance(event, EndpointEvent)
    assert event.detail.endpoint_status == expected
    assert event.time == NOON


def test_a_spot_warning_is_keyed_by_its_instance_id_whatever_its_arn() -> None:
    warning = parse_event(
        {
            "detail-type": "EC2 Spot Instance Interruption Warning",
            "source": "aws.ec2",
            "resources": ["arn:aws:ec2:us-east-2a:instance/i-0abc"],
            "detail": {"instance-id": "i-0abc", "instance-action": "terminate"},
        }
    )
    assert isinstance(warning, SpotInterruptionEvent)
    assert warning.detail.instance_id == "i-0abc"
    assert warning.detail.instance_action == "terminate"


@pytest.mark.parametrize("key", ["uploads/a b+c/run.yaml", "uploads/ä/ü%20.jsonl"])
def test_an_object_key_is_read_as_the_writer_gave_it(key: str) -> None:
    event = parse_event(object_created_event("b", key, size=1, etag="e"))
    assert isinstance(event, ObjectCreatedEvent)
    assert event.detail.object.key == key


def test_an_object_version_has_one_identity_however_often_it_is_told_of() -> None:
    def identity(**how: Any) -> str:
        event = parse_event(object_created_event("b", "k", **{"size": 1, "etag": "e1", **how}))
        assert isinstance(event, ObjectCreatedEvent)
        return event.detail.identity

    assert identity() == identity(sequencer="0055", reason="CopyObject") == "b/k@e1"
    assert identity(version_id="v1") == "b/k@v1"
    assert identity() != identity(etag="e2")
    assert identity(version_id="v1") != identity(version_id="v2")


def test_sequencers_order_as_hex_numbers_of_any_length() -> None:
    assert sequencer_order("FF") < sequencer_order("0100") < sequencer_order("0A00")


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"detail-type": "EC2 Instance State-change Notification", "detail": {}},
        {"detail-type": "Object Tags Added", "source": "aws.s3", "detail": {}},
    ],
)
def test_an_event_the_hub_does_not_listen_to_is_refused_by_name(event: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="is no event of this hub"):
        parse_event(event)


def test_an_event_without_its_subject_is_refused() -> None:
    event = training_job_event({"TrainingJobName": "j", "TrainingJobStatus": "Failed"})
    del event["detail"]["TrainingJobName"]
    with pytest.raises(InvalidInputError, match=r"detail\.TrainingJobName"):
        parse_event(event)


def test_a_described_training_job_becomes_the_event_that_says_the_same() -> None:
    description = {
        "TrainingJobName": "tv-0-a001",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:1:training-job/tv-0-a001",
        "TrainingJobStatus": "Stopped",
        "SecondaryStatus": "MaxWaitTimeExceeded",
        "CreationTime": NOON,
        "SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": NOON}],
        "InputDataConfig": [{"ChannelName": "train"}],
        "ResponseMetadata": {"RequestId": "x"},
    }
    raw = training_job_event(description, tags={"grpohub:run": "tv"}, time=NOON)
    event = parse_event(raw)

    assert isinstance(event, TrainingJobEvent)
    assert raw["detail"]["CreationTime"] == NOON_MS
    assert "ResponseMetadata" not in raw["detail"]
    assert event.resources == (description["TrainingJobArn"],)
    assert event.detail.secondary_status == "MaxWaitTimeExceeded"
    assert event.detail.secondary_status_transitions[0].start_time == NOON
    assert event.detail.tags == {"grpohub:run": "tv"}
    assert event.time == NOON.replace(microsecond=0)


def test_a_described_endpoint_becomes_an_event_in_the_spelling_of_events() -> None:
    raw = endpoint_event({"EndpointName": "e", "EndpointStatus": "RollingBack"}, tags={"a": "b"})
    event = parse_event(raw)
    assert raw["detail"]["EndpointStatus"] == "ROLLING_BACK"
    assert isinstance(event, EndpointEvent)
    assert event.detail.endpoint_status == "RollingBack"
    assert event.detail.tags == {"a": "b"}


def test_a_described_execution_becomes_its_event() -> None:
    raw = execution_event(
        {
            "executionArn": "arn:x",
            "stateMachineArn": "arn:m",
            "name": "tv-20260101-abc",
            "status": "ABORTED",
            "startDate": NOON,
        }
    )
    event = parse_event(raw)
    assert isinstance(event, ExecutionEvent)
    assert (event.detail.name, event.detail.status) == ("tv-20260101-abc", "ABORTED")
    assert event.detail.start_date == NOON
    assert event.detail.stop_date is None


def test_instance_warnings_and_object_notices_are_read_back() -> None:
    warning = parse_event(spot_interruption_event("i-1", action="stop"))
    advice = parse_event(rebalance_event("i-2"))
    notice = parse_event(object_created_event("b", "k", size=3, etag="e", version_id="v"))
    assert isinstance(warning, SpotInterruptionEvent)
    assert isinstance(advice, RebalanceEvent)
    assert isinstance(notice, ObjectCreatedEvent)
    assert (warning.detail.instance_id, warning.detail.instance_action) == ("i-1", "stop")
    assert advice.detail.instance_id == "i-2"
    assert (notice.detail.bucket.name, notice.detail.object.version_id) == ("b", "v")


def test_two_events_of_one_change_have_ids_of_their_own() -> None:
    assert rebalance_event("i-1")["id"] != rebalance_event("i-1")["id"]
