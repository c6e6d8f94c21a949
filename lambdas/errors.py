"""Errors of the control plane. Step Functions sees their class names: the state machine retries
some of them."""

from __future__ import annotations

__all__ = [
    "AttemptStillRunningError",
    "ConflictError",
    "EndpointBusyError",
    "EndpointFailedError",
    "EndpointTakenError",
    "HubError",
    "InputMissingError",
    "JobExistsError",
    "NoCapacityError",
    "NotFoundError",
    "ObjectChangedError",
    "ObjectMissingError",
    "QuotaError",
    "RequestRefusedError",
    "RunCancelledError",
    "RunFailedError",
    "SmokeTestFailedError",
    "TransientError",
]


class HubError(Exception):
    """Base of all errors that the control plane raises on purpose."""


class TransientError(HubError):
    """AWS throttled or failed inside; the same call may succeed later. The state machine retries
    it."""


class AttemptStillRunningError(HubError):
    """The attempt before has not ended, so no other may start. The state machine retries it."""


class EndpointBusyError(HubError):
    """The endpoint is changing, so nothing can be done to it now. The state machine retries it."""


class EndpointTakenError(HubError):
    """An endpoint, model or job of this name exists and is not this hub's."""


class SmokeTestFailedError(HubError):
    """The endpoint is in service but does not answer a plain question."""


class InputMissingError(HubError):
    """Data or a model that the run file names is not there or cannot be read."""


class RunFailedError(HubError):
    """Ends the execution of a failed run."""


class RunCancelledError(HubError):
    """Ends the execution of a cancelled run."""


class EndpointFailedError(HubError):
    """Ends the execution of a run whose model is published but whose endpoint failed."""


class NotFoundError(HubError):
    """The request names something that does not exist."""


class ConflictError(HubError):
    """The request does not fit the present state."""


class ObjectMissingError(HubError):
    """S3 has no such object. Access denied is another error."""


class ObjectChangedError(HubError):
    """A conditional write found another version than the one read."""


class JobExistsError(HubError):
    """A training job of this name exists."""


class QuotaError(HubError):
    """The account's quota for the instance type is used up."""


class NoCapacityError(HubError):
    """AWS has no such instances now."""


class RequestRefusedError(HubError):
    """AWS refused the request for good: it is wrong, or not allowed."""
