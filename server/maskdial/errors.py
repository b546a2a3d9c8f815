"""Every error that a caller can meet, and the one place that knows its status.

MaskdialError
├── ValidationError      422  the request asks for something that cannot be done
│   ├── PromptTooLongError    its prompt does not fit the context
│   └── RefusedError          a policy refuses what it says
├── UnauthorizedError    401  the key is missing or wrong
├── ForbiddenError       403  this server does not do that for anyone
├── NotFoundError        404  no such model, route, file or batch
├── SlowBodyError        408  the body did not arrive in time
├── TooLargeError        413  the body is larger than the server accepts
├── OverloadedError      429  the queue is full; Retry-After says when to retry
├── UnavailableError     503  starting, draining, or the model is not there or down
├── DeadlineError        504  not finished within the timeout
├── InferenceError       500  a pass of a masked model failed
├── GenerationError      500  a step of a causal model failed
├── DeviceLostError      500  the GPU is gone; the engines that it runs die
├── InternalError        500  a bug in the server
├── BundleError               a model folder cannot be served
│   └── CheckError            it computes something else here than where it was exported
└── ConfigError               a setting is wrong (start-up only)
"""

import contextlib
import re
from collections.abc import Iterator
from typing import ClassVar, Self

_MAX_LENGTH = 4000
_RAISE_LIMITS = (
    "raise the limits of memory and processes (ulimit -v and -u, or the container's), or serve less"
)


def shortened(text: str, length: int = 64) -> str:
    """What a client wrote, as far as an error repeats it."""
    return text if len(text) <= length else text[:length] + "..."


# The C0 and C1 control characters, delete, Unicode's line separators, and halves of pairs, which
# cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """A text of others on one line of a terminal: control characters are shown, not obeyed."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


class MaskdialError(Exception):
    """The root. ``message`` is a sentence that a person can act on, lower case, no period. What a
    client wrote cannot make it longer than a page.

    ``status`` is the HTTP status, ``error_type`` the name on the wire, ``retry_after`` the value of
    the Retry-After header in seconds (None: no such header).
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    retry_after: int | None = None

    def __init__(self, message: str) -> None:
        message = shortened(message, _MAX_LENGTH)
        super().__init__(message)
        self.message = message


class ValidationError(MaskdialError):
    """The request is well-formed but cannot be served as it is.

    ``field`` names the part of the request at fault, as the families' requests call it; the body
    of a dialect translates it to its own. ``index`` says which item of a list it is.
    """

    status = 422
    error_type = "validation"

    def __init__(self, message: str, *, field: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.index = index

    def __str__(self) -> str:
        """The sentence with the part at fault, for callers in Python."""
        if self.field is None:
            return self.message
        where = self.field if self.index is None else f"{self.field}[{self.index}]"
        return f"{where}: {self.message}"


class PromptTooLongError(ValidationError):
    """A prompt has more tokens than the context.

    The sentence is the one by which agents know that they have to shorten the conversation, so that
    no dialect puts a field before it.
    """

    @classmethod
    def of(cls, num_tokens: int, model: str, context: int, about: str = "") -> Self:
        """The error of a prompt; ``about`` comes before the number of its tokens."""
        return cls(
            f"prompt is too long: {about}{num_tokens} tokens > {context - 1} maximum (model "
            f"{model!r} has a context of {context}: --max-context)"
        )


class RefusedError(ValidationError):
    """A rule of a policy found something in the request. The sentence says which rule and what, not
    where: whoever tries what passes learns no more.
    """

    error_type = "content_filter"


class UnauthorizedError(MaskdialError):
    """The key is missing or wrong."""

    status = 401
    error_type = "unauthorized"


class ForbiddenError(MaskdialError):
    """Disabled on this server, for every caller."""

    status = 403
    error_type = "forbidden"


class NotFoundError(MaskdialError):
    """No such model, route, file or batch; ``field`` is what named it, if a field did."""

    status = 404
    error_type = "not_found"

    def __init__(self, message: str, *, field: str | None = "model") -> None:
        super().__init__(message)
        self.field = field


class SlowBodyError(MaskdialError):
    """The request body did not arrive in time."""

    status = 408
    error_type = "request_timeout"


class TooLargeError(MaskdialError):
    """The request body is over the limit."""

    status = 413
    error_type = "too_large"


class OverloadedError(MaskdialError):
    """The queue is full, or the client is over its limits.

    Args:
        retry_after: in seconds.
    """

    status = 429
    error_type = "overloaded"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(MaskdialError):
    """The server is starting or draining, or the model is not loaded or its engine down."""

    status = 503
    error_type = "unavailable"
    retry_after = 5


class DeadlineError(MaskdialError):
    """The request did not finish within its timeout."""

    status = 504
    error_type = "timeout"


class InferenceError(MaskdialError):
    """A pass of a masked model failed."""

    error_type = "inference"


class GenerationError(MaskdialError):
    """A step of a causal model failed."""

    error_type = "generation"


class DeviceLostError(MaskdialError):
    """The GPU is gone until the process starts again: its driver crashed or was reset."""


class InternalError(MaskdialError):
    """A bug in the server; the log has its traceback."""


class BundleError(MaskdialError):
    """A model folder is missing, damaged, or made for another version."""


class CheckError(BundleError):
    """A model's golden check, or the check of its products, fails; other models are served."""


class ConfigError(MaskdialError):
    """A flag, environment variable or configuration key is wrong."""


def io_reason(error: Exception) -> str:
    """Why a file or an address cannot be used, without the error's number and the path: the
    sentence that it ends has that.
    """
    reason = getattr(error, "strerror", None)
    return f"{reason[:1].lower()}{reason[1:]}" if reason else str(error) or type(error).__name__


@contextlib.contextmanager
def about(field: str, index: int | None = None) -> Iterator[None]:
    """Has a ValidationError that names no field say which one it is about, and which item of it."""
    try:
        yield
    except ValidationError as error:
        if error.field is not None:
            raise
        raise type(error)(error.message, field=field, index=index) from error


# ONNX Runtime's errors, and the system's where a library is loaded.
_NO_MEMORY = ("std::bad_alloc", "failed to map segment from shared object")


def exhaustion(error: BaseException) -> str | None:
    """What the system refused, if memory or threads ran out; otherwise None."""
    said = str(error)
    if isinstance(error, MemoryError) or any(each in said for each in _NO_MEMORY):
        return "the process gets no more memory"
    if isinstance(error, RuntimeError) and "can't start new thread" in said:
        return "the process can start no more threads"
    return None


@contextlib.contextmanager
def explain_exhaustion() -> Iterator[None]:
    """Has a failure say that memory or threads ran out.

    Raises:
        ConfigError: in its place.
    """
    try:
        yield
    except Exception as error:
        if (refused := exhaustion(error)) is None:
            raise
        raise ConfigError(f"{refused}; {_RAISE_LIMITS}") from error
