"""What ends a stage, by kind; the entrypoint turns each into its documented exit code."""

from __future__ import annotations

__all__ = ["DataChangedError", "DataError", "ExportError", "NonFiniteError", "WeightSyncError"]


class DataError(ValueError):
    """Rows are missing, empty, unreadable, or lack a column (exit code DATA)."""


class DataChangedError(DataError):
    """The data or the settings are not those the checkpoint was made with (exit code DATA)."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite (exit code NON_FINITE)."""


class ExportError(RuntimeError):
    """The exported model does not reproduce the trained one (exit code EXPORT)."""


class WeightSyncError(RuntimeError):
    """The rollout engine does not compute with the policy's weights (exit code INTERNAL)."""
