"""The error that ends an export."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pydantic

from maskdial.errors import MaskdialError

_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;]*m")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NUMPY = re.compile(r"problem writing element|requested and \d+ written")  # with no error number


class ExportError(MaskdialError):
    """The checkpoint cannot be exported. The message is one sentence that says why."""


class QualityError(ExportError):
    """A lower precision loses more than the quality gate allows, or what it loses is not known.

    Attributes:
        measured: what was found, in a few words.
        traceable: whether the tracer knows the model, too, which can leave layers as they are.
    """

    def __init__(self, message: str, measured: str, *, traceable: bool = True) -> None:
        super().__init__(message)
        self.measured = measured
        self.traceable = traceable


class UntraceableError(ExportError):
    """A file is written directly or not at all."""


def first_line(error: Exception) -> str:
    """The first line of another library's message, or the error's repr if that says too little.

    A line that ends with a colon goes on with the next one. Of a pydantic error it is every entry.
    """
    if isinstance(error, pydantic.ValidationError):
        parts = ((".".join(map(str, each["loc"])), each["msg"]) for each in error.errors())
        return f"{error.title}: {'; '.join(f'{place}: {why}' for place, why in parts)}"
    lines = [line.strip() for line in _ESCAPE_CODES.sub("", str(error)).strip().splitlines()]
    if not lines or isinstance(error, KeyError):
        return repr(error)
    count = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: count + 1])


def io_reason(error: OSError) -> str:
    """Why a file could not be read or written."""
    if is_full(error):
        return "the disk is full"
    if error.errno == errno.EFBIG:
        return "a file would be larger than is allowed here (ulimit -f)"
    return error.strerror or first_line(error)


def is_full(error: OSError) -> bool:
    """Whether a disk, or a share of it, has no more room."""
    return error.errno in _FULL or (error.errno is None and bool(_NUMPY.search(str(error))))


@contextmanager
def onnxruntime_errors() -> Iterator[None]:
    """Turns ONNX Runtime's errors into ExportError."""
    try:
        yield
    except (MaskdialError, OSError):
        raise
    except Exception as error:  # onnxruntime has no common error class
        raise ExportError(f"ONNX Runtime cannot run the graph: {first_line(error)}") from error
