"""Transcript: what a request and its reply say, for the log with ``--log-format json-texts``."""

MAX_BYTES = 65_536
"""Of each body; what follows is left out, so that no line of the log is longer than its reader."""


class Transcript:
    """The beginnings of a request's body and of its reply's."""

    def __init__(self) -> None:
        self._request = bytearray()
        self._reply = bytearray()

    def add_request(self, part: bytes) -> None:
        """Takes the next part of the request's body."""
        self._request += part[: MAX_BYTES - len(self._request)]

    def add_reply(self, part: bytes) -> None:
        """Takes the next part of the reply's body."""
        self._reply += part[: MAX_BYTES - len(self._reply)]

    def fields(self) -> dict[str, str]:
        """For the record; bytes that are no UTF-8 are replaced."""
        return {
            "request": self._request.decode(errors="replace"),
            "reply": self._reply.decode(errors="replace"),
        }
