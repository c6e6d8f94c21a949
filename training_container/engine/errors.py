"""What ends a stage, by kind, each with its documented exit code."""

from __future__ import annotations

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["DataChangedError", "DataError", "ExportError", "NonFiniteError", "WeightSyncError"]


class DataError(StageError):
    """Rows or model files are missing, empty, unreadable, or lack a column."""

    def __init__(self, cause: str) -> None:
        super().__init__(ExitCode.DATA, cause)


class DataChangedError(DataError):
    """The data or the settings are not those the checkpoint was made with."""


class NonFiniteError(StageError):
    """A loss or gradient is NaN or infinite."""

    def __init__(self, cause: str) -> None:
        super().__init__(ExitCode.NON_FINITE, cause)


class ExportError(StageError):
    """The exported model does not reproduce the trained one."""

    def __init__(self, cause: str) -> None:
        super().__init__(ExitCode.EXPORT, cause)


class WeightSyncError(StageError):
    """The rollout engine does not compute with the policy's weights."""

    def __init__(self, cause: str) -> None:
        super().__init__(ExitCode.INTERNAL, cause)
