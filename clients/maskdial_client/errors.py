"""Every exception of the client.

MaskdialClientError
├── ApiError                   the server replied with an error
│   ├── ValidationError        422  the request cannot be served as it stands
│   ├── NotFoundError          404  no such model or route
│   ├── UnauthorizedError      401  the API key is missing or wrong
│   ├── ForbiddenError         403  the server does that for nobody
│   ├── SlowBodyError          408  the request body did not arrive in time
│   ├── TooLargeError          413  the request body exceeds the server's limit
│   ├── OverloadedError        429  the server's queue is full
│   ├── DeadlineError          504  the request's deadline passed on the server
│   ├── UnavailableError       503  the server is starting or draining, or the model not there
│   ├── InferenceError         500  a masked model failed
│   └── GenerationError        500  a causal model failed
├── TransportError             no complete reply arrived
│   ├── ConnectionFailedError  could not connect, or lost the connection
│   ├── ResponseTimeoutError   no data arrived within the client's timeout
│   └── StreamEndedError       a stream ended before its last event
└── ProtocolError              the reply does not follow the API
"""

from typing import ClassVar


class MaskdialClientError(Exception):
    """The base class. ``message`` is one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ApiError(MaskdialClientError):
    """The server replied with an error. Raised as such for error types unknown to this client.

    ``status`` is the HTTP status; for an error in the middle of a stream, the one that its type has
    elsewhere. ``error_type`` is the type's name on the wire, None if neither body nor status tell
    it. ``request_id`` is the server's ``x-request-id``, by which its log can be searched, and
    ``retry_after`` its Retry-After in seconds; both may be None.
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
    """The request cannot be served as it stands."""

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


class ForbiddenError(ApiError):
    """The server does that for nobody; its message says how to allow it."""

    default_status = 403
    default_type = "forbidden"


class SlowBodyError(ApiError):
    """The request body did not arrive in time."""

    default_status = 408
    default_type = "request_timeout"


class TooLargeError(ApiError):
    """The request body exceeds the server's limit."""

    default_status = 413
    default_type = "too_large"


class OverloadedError(ApiError):
    """The server's queue is full."""

    default_status = 429
    default_type = "overloaded"


class DeadlineError(ApiError):
    """The request's deadline passed on the server."""

    default_status = 504
    default_type = "timeout"


class UnavailableError(ApiError):
    """The server is starting or draining, or the model is not loaded or its engine down."""

    default_status = 503
    default_type = "unavailable"


class InferenceError(ApiError):
    """A masked model failed."""

    default_type = "inference"


class GenerationError(ApiError):
    """A causal model failed."""

    default_type = "generation"


class TransportError(MaskdialClientError):
    """No complete reply arrived."""


class ConnectionFailedError(TransportError):
    """The client could not connect, or lost the connection."""


class ResponseTimeoutError(TransportError):
    """No data arrived within the client's timeout."""


class StreamEndedError(TransportError):
    """A stream ended before its last event."""


class ProtocolError(MaskdialClientError):
    """The reply does not follow the API."""


_API_ERRORS: tuple[type[ApiError], ...] = (
    ValidationError,
    NotFoundError,
    UnauthorizedError,
    ForbiddenError,
    SlowBodyError,
    TooLargeError,
    OverloadedError,
    DeadlineError,
    UnavailableError,
    InferenceError,
    GenerationError,
)
_BY_TYPE = {error.default_type: error for error in _API_ERRORS}
# Two types share status 500, which therefore identifies neither.
_BY_STATUS = {error.default_status: error for error in _API_ERRORS if error.default_status != 500}


def api_error_class(error_type: str | None, status: int | None) -> type[ApiError]:
    """The class for an ``error_type`` on the wire, else for an HTTP status, else ApiError."""
    if error_type in _BY_TYPE:
        return _BY_TYPE[error_type]
    return _BY_STATUS.get(status, ApiError) if status is not None else ApiError
