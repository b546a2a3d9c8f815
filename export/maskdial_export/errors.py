"""The one error of an export."""

from maskdial.errors import MaskdialError


class ExportError(MaskdialError):
    """The checkpoint cannot be exported; the message is one sentence that says why."""


def first_line(error: Exception) -> str:
    """What another library says, cut to its first line."""
    return (str(error).strip() or repr(error)).splitlines()[0]
