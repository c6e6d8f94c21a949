"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The gate must say the same of the same code, whatever else the machine is doing.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate")
