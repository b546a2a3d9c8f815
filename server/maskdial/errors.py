"""Every error a caller can meet, and the one place that knows its status.

MaskdialError
├── ValidationError      422  the request asks for something that cannot be done
├── NotFoundError        404  no such model or route
├── TooLargeError        413  the body is larger than the server takes
├── OverloadedError      429  the queue is full; Retry-After says when to come back
├── UnavailableError     503  starting, draining, or the engine is down
├── DeadlineError        504  not finished in time
├── InferenceError       500  a masked model's pass failed
├── GenerationError      500  a causal model's step failed
├── BundleError               a model folder cannot be served (start-up only)
└── ConfigError               a setting is wrong (start-up only)
"""

from typing import ClassVar


class MaskdialError(Exception):
    """The root. ``message`` is one sentence that a person can act on.

    ``status`` is the HTTP status, ``error_type`` the wire's lower-case name, and ``retry_after``
    the seconds for the Retry-After header, or None when no such header is sent.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "inference"
    retry_after: ClassVar[int | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ValidationError(MaskdialError):
    """The request is well-formed but cannot be served as it stands."""

    status = 422
    error_type = "validation"


class NotFoundError(MaskdialError):
    """No such model or route."""

    status = 404
    error_type = "not_found"


class TooLargeError(MaskdialError):
    """The request body is over the limit."""

    status = 413
    error_type = "too_large"


class OverloadedError(MaskdialError):
    """The queue is full."""

    status = 429
    error_type = "overloaded"
    retry_after = 1


class UnavailableError(MaskdialError):
    """The server is starting, draining, or an engine is down."""

    status = 503
    error_type = "unavailable"
    retry_after = 5


class DeadlineError(MaskdialError):
    """The request was not finished within its timeout."""

    status = 504
    error_type = "timeout"


class InferenceError(MaskdialError):
    """A pass of a masked model failed."""

    error_type = "inference"


class GenerationError(MaskdialError):
    """A step of a causal model failed."""

    error_type = "generation"


class BundleError(MaskdialError):
    """A model folder is missing, damaged, or made for another version."""


class ConfigError(MaskdialError):
    """A flag, environment variable or configuration key is wrong."""
