"""What the reliability tests share."""

from collections.abc import Iterator

import pytest

from tests.reliability.warm import warm_ranks


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    with warm_ranks():
        yield
