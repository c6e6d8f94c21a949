"""One cloud for this folder, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.state_machine.cloud import Cloud, running_cloud


@pytest.fixture(scope="package")
def _cloud() -> Iterator[Cloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(_cloud: Cloud) -> Cloud:
    _cloud.fresh()
    return _cloud
