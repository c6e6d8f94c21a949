"""SageMaker's refusals, worded as the service words them, since callers classify by them."""


class ApiError(Exception):
    """An error answer of the API; `code` is the exception's name on the wire."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


def invalid(message: str) -> ApiError:
    """A ValidationException."""
    return ApiError("ValidationException", message)


def not_found(kind: str, arn: str) -> ApiError:
    """The answer for a missing model, endpoint configuration or endpoint."""
    return invalid(f'Could not find {kind} "{arn}".')


def exists(kind: str, arn: str) -> ApiError:
    """The answer for a second model, endpoint configuration or endpoint of one name."""
    return invalid(f'Cannot create already existing {kind} "{arn}".')
