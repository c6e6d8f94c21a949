"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The gate must say the same of the same code, whatever else the machine is doing; `make test-long`
# searches further.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("gate")
