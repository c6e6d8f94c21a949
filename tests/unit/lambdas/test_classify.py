"""Failure texts of real jobs and what they mean."""

from __future__ import annotations

import pytest

from contracts.failures import EXIT_MEANINGS, ExitCode, Failure
from contracts.states import Outcome
from lambdas.logic.classify import classify_failure, is_capacity_error


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (
            "CapacityError: Unable to provision requested ML compute capacity. Please retry using "
            "a different ML instance type.",
            Outcome.OUT_OF_CAPACITY,
        ),
        ("InsufficientInstanceCapacity: We currently do not have enough", Outcome.OUT_OF_CAPACITY),
        (
            "ResourceLimitExceeded: The account-level service limit 'ml.p4d.24xlarge for training "
            "job usage' is 0 Instances",
            Outcome.OUT_OF_QUOTA,
        ),
        (
            "InternalServerError: We encountered an internal error. Please try again.",
            Outcome.INFRASTRUCTURE_FAILURE,
        ),
        ("ClientError: Data download failed: No S3 objects found", Outcome.USER_FAILURE),
        ("AlgorithmError: , exit code: 137", Outcome.INFRASTRUCTURE_FAILURE),
        ("AlgorithmError: , exit code: 1", Outcome.INFRASTRUCTURE_FAILURE),
        ("AlgorithmError: , exit code: 11", Outcome.USER_FAILURE),
        ("AlgorithmError: , exit code: 20", Outcome.INFRASTRUCTURE_FAILURE),
        ("AlgorithmError: , exit code: 30", Outcome.INTERRUPTED),
        ("words nobody has seen before", Outcome.INFRASTRUCTURE_FAILURE),
        ("", Outcome.INFRASTRUCTURE_FAILURE),
        (None, Outcome.INFRASTRUCTURE_FAILURE),
    ],
)
def test_known_words(reason: str | None, outcome: Outcome) -> None:
    """skypilot-org/skypilot#1610: what fails before the first step is not the user's fault unless
    an exit code says so."""
    assert classify_failure(reason).outcome is outcome


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_containers_own_line_decides(code: ExitCode) -> None:
    text = f"AlgorithmError: {Failure(code, 'CapacityError: in the cause').text()}, exit code: 1"
    found = classify_failure(text)
    assert found.outcome is EXIT_MEANINGS[code][0]
    assert found.code == code.name.lower()
    assert found.cause.startswith("CapacityError: in the cause")


def test_only_capacity_and_quota_move_a_deployment_on() -> None:
    """aws/deep-learning-containers#6411: other failures are not retried elsewhere."""
    assert is_capacity_error("InsufficientInstanceCapacity")
    assert is_capacity_error("ResourceLimitExceeded")
    assert not is_capacity_error("The primary container did not pass the ping health check.")
    assert not is_capacity_error(None)
