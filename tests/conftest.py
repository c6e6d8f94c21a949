"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# The gate must say the same of the same code, whatever else the machine is doing; `make test-long`
# searches further.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("gate")

UNPROVEN = {
    "tests/reliability/test_interruptions.py",
}
"""Files whose `long` tests are written and have not yet been seen to end on an idle machine.
`GRPOHUB_UNPROVEN=1 make test-long` runs them; a file leaves this list when they have passed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that nobody has seen to the end, and say so."""
    if os.environ.get("GRPOHUB_UNPROVEN"):
        return
    skip = pytest.mark.skip(reason="written, not yet seen to end on an idle machine")
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        long = item.get_closest_marker("long") is not None
        if long and file in UNPROVEN:
            item.add_marker(skip)
