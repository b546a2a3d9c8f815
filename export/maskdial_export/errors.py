"""The error that ends an export."""

from maskdial.errors import MaskdialError


class ExportError(MaskdialError):
    """The checkpoint cannot be exported. The message is one sentence that says why."""


def first_line(error: Exception) -> str:
    """The first line of another library's message, or its repr if the message is empty."""
    return (str(error).strip() or repr(error)).splitlines()[0]
