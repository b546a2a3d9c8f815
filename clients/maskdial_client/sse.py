"""EventParser: server-sent events from bytes."""

from collections.abc import Iterator


class EventParser:
    """Parses server-sent events incrementally: chunks of bytes in, ``data`` fields out.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, except that a lone CR
    does not end a line. Comments and fields other than ``data`` are ignored.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yields the data of each event that ``chunk`` completes."""
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            if text:
                self._feed_line(text)
            elif self._data:
                data, self._data = "\n".join(self._data), []
                yield data

    def _feed_line(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
