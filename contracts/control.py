"""`control.json` of a stage: who may commit, and what the control plane asks of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.base import Strict

__all__ = ["Control"]


class Control(Strict):
    """Written by the control plane with a conditional PUT; read by the leader host each step."""

    format: Literal[1] = 1
    attempt: Annotated[int, Field(ge=1)]
    """The current attempt. A trainer of an older one must not commit and exits."""
    checkpoint_request: str | None = None
    """An id; a new one asks for a checkpoint at the end of the running step."""
    stop_after_checkpoint: bool = False
    """Save, then exit with the stop code."""

    def allows(self, attempt: int) -> bool:
        """Whether a trainer of ``attempt`` may still commit."""
        return attempt >= self.attempt
