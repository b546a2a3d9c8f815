"""Server-sent events, read from bytes as they arrive, and the generation stream made of them."""

from collections.abc import Iterator, Mapping

from maskdial_client.errors import StreamEndedError
from maskdial_client.replies import read_event
from maskdial_client.results import StreamEvent


class EventParser:
    """Bytes in, ``data`` fields out, wherever the chunks are cut.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html. Lines end in LF or CRLF
    (a lone CR, which the specification allows too, is not taken for a line's end). Fields other
    than ``data`` and comment lines mean nothing here.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The data of every event that this chunk completes."""
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


class StreamDecoder:
    """One generation stream: bytes in, ``StreamEvent`` out."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._parser = EventParser()
        self._request_id = headers.get("x-request-id")
        self._complete = False

    def feed(self, chunk: bytes) -> Iterator[StreamEvent]:
        """The events that this chunk completes; raises the ApiError that an error event carries."""
        for data in self._parser.feed(chunk):
            event = read_event(data, self._request_id)
            self._complete = event.details is not None
            yield event

    def finish(self) -> None:
        """Called at the end of the bytes; raises StreamEndedError if the text is not whole."""
        if not self._complete:
            raise StreamEndedError(
                "the stream ended before the text was complete: the server stopped, or something "
                "between closed the connection"
            )
