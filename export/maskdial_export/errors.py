"""The one error of an export."""

from maskdial.errors import MaskdialError


class ExportError(MaskdialError):
    """The checkpoint cannot be exported; the message is one sentence that says why."""
