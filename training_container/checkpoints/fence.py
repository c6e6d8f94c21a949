"""`control.json`, seen from the container: may this attempt still commit, and what is asked of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from contracts.control import Control
from contracts.failures import ExitCode
from training_container.checkpoints.store import Store, StoreError
from training_container.failure import StageError

__all__ = ["ControlWatch", "read_control"]


def read_control(store: Store, key: str) -> Control:
    """The stage's control object.

    Raises:
        StageError: STORAGE when it is missing (the control plane writes it before it submits a
        job),
            unreadable, or S3 failed.
    """
    try:
        return _parse(store.read(key), key)
    except KeyError as error:
        raise StageError(ExitCode.STORAGE, f"{key} is missing: no attempt may commit") from error


class ControlWatch:
    """The leader's conditional GET after each step, at most one every ``every_seconds``.

    A failed read is counted and keeps the last answer: training must not stop for it, and it
    blesses nothing, because the uploader reads the fence again, without mercy, before every flag.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        attempt: int,
        *,
        every_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._key, self._attempt = store, key, attempt
        self._every, self._clock = every_seconds, clock
        self._next = clock()
        self._etag: str | None = None
        self._control: Control | None = None
        self._served: str | None = None
        self.failures = 0

    def poll(self) -> None:
        """Read `control.json` if it is time and it changed."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + self._every
        try:
            body, etag = self._store.read_if_changed(self._key, self._etag)
            if body is not None:
                control = _parse(body, self._key)
                if self._control is None:
                    # What was asked before this incarnation began is answered by its resume.
                    self._served = control.checkpoint_request
                self._control, self._etag = control, etag
        except (StoreError, KeyError, StageError):
            self.failures += 1

    @property
    def fenced_by(self) -> int:
        """The newer attempt; 0 while this one is the current."""
        control = self._control
        return control.attempt if control and not control.allows(self._attempt) else 0

    @property
    def requested(self) -> bool:
        """Whether a checkpoint is asked for that has not been made."""
        return self._control is not None and self._control.checkpoint_request != self._served

    @property
    def stop_after(self) -> bool:
        return self._control is not None and self._control.stop_after_checkpoint

    def served(self) -> None:
        """A save has begun that answers the open request."""
        if self._control is not None:
            self._served = self._control.checkpoint_request


def _parse(body: bytes, key: str) -> Control:
    try:
        return Control.model_validate_json(body)
    except ValidationError as error:
        raise StageError(ExitCode.STORAGE, f"{key} is not a control object: {error}") from error
