"""Everything the client raises.

MaskdialClientError
├── ApiError                   the server refused or failed; status, error_type, request_id
│   ├── ValidationError        422  the request asks for something that cannot be done
│   ├── NotFoundError          404  no such model or route
│   ├── UnauthorizedError      401  the API key is missing or wrong
│   ├── TooLargeError          413  the body is larger than the server takes
│   ├── OverloadedError        429  the queue is full; retry_after says when to come back
│   ├── DeadlineError          504  the server's own deadline for the request passed
│   ├── UnavailableError       503  starting, draining, or the engine is down
│   ├── InferenceError         500  a masked model's pass failed
│   └── GenerationError        500  a causal model's step failed
├── TransportError             no whole reply came
│   ├── ConnectionFailedError  no connection, or it broke
│   ├── ResponseTimeoutError   nothing came within the client's timeout
│   └── StreamEndedError       a stream closed before its last event
└── ProtocolError              a reply came that is not the one the API promises
"""

from typing import ClassVar


class MaskdialClientError(Exception):
    """The root. ``message`` is one sentence that a person can act on."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ApiError(MaskdialClientError):
    """The server answered with an error; of this class itself when its type is not known here.

    ``status`` is the HTTP status (for a failure in the middle of a stream, the one that its
    type has elsewhere), ``error_type`` the wire's name (None for an unknown error without one, a
    proxy's say), ``request_id`` the server's ``x-request-id``, ``retry_after`` seconds, or None.
    """

    default_status: ClassVar[int] = 500
    default_type: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        error_type: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = self.default_status if status is None else status
        self.error_type = self.default_type if error_type is None else error_type
        self.request_id = request_id
        self.retry_after = retry_after


class ValidationError(ApiError):
    """The request is well-formed but cannot be served as it stands."""

    default_status = 422
    default_type = "validation"


class NotFoundError(ApiError):
    """No such model or route."""

    default_status = 404
    default_type = "not_found"


class UnauthorizedError(ApiError):
    """The API key is missing or wrong."""

    default_status = 401
    default_type = "unauthorized"


class TooLargeError(ApiError):
    """The request body is over the server's limit."""

    default_status = 413
    default_type = "too_large"


class OverloadedError(ApiError):
    """The server's queue is full."""

    default_status = 429
    default_type = "overloaded"


class DeadlineError(ApiError):
    """The server's own deadline for the request passed."""

    default_status = 504
    default_type = "timeout"


class UnavailableError(ApiError):
    """The server is starting, draining, or an engine is down."""

    default_status = 503
    default_type = "unavailable"


class InferenceError(ApiError):
    """A pass of a masked model failed."""

    default_type = "inference"


class GenerationError(ApiError):
    """A step of a causal model failed."""

    default_type = "generation"


class TransportError(MaskdialClientError):
    """No whole reply came."""


class ConnectionFailedError(TransportError):
    """The server could not be reached, or the connection broke."""


class ResponseTimeoutError(TransportError):
    """Nothing came within the client's timeout."""


class StreamEndedError(TransportError):
    """The server closed a stream before its last event."""


class ProtocolError(MaskdialClientError):
    """A reply came that is not the one the API promises."""


_API_ERRORS: tuple[type[ApiError], ...] = (
    ValidationError,
    NotFoundError,
    UnauthorizedError,
    TooLargeError,
    OverloadedError,
    DeadlineError,
    UnavailableError,
    InferenceError,
    GenerationError,
)
_BY_TYPE = {error.default_type: error for error in _API_ERRORS}
# Two types share status 500, so it alone does not say which one it was.
_BY_STATUS = {error.default_status: error for error in _API_ERRORS if error.default_status != 500}


def api_error_class(error_type: str | None, status: int | None) -> type[ApiError]:
    """The class for a wire ``error_type``, else for an HTTP status, else ``ApiError``."""
    if error_type in _BY_TYPE:
        return _BY_TYPE[error_type]
    return _BY_STATUS.get(status, ApiError) if status is not None else ApiError
