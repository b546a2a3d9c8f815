"""Frames of HTTP/2 (RFC 9113), as far as a server of gRPC reads and writes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16_384
"""Of a payload, in both directions: what every endpoint takes."""
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
"""Bytes of DATA that may be sent before more is allowed, of a stream and of a connection."""

_HEAD_BYTES = 9


class Kind(IntEnum):
    """The types of frames; others are ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntFlag):
    """Flags, of which ACK and END_STREAM are the same bit."""

    END_STREAM = 1
    ACK = 1
    END_HEADERS = 4
    PADDED = 8
    PRIORITY = 32


class Setting(IntEnum):
    """The settings that are read or written."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ProtocolError(Exception):
    """What a client sent ends its connection."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    def number(self) -> int:
        """What a frame holds that is one number of 31 bits: WINDOW_UPDATE, RST_STREAM.

        Raises:
            ProtocolError: it has another size.
        """
        if len(self.payload) != 4:
            raise ProtocolError(Code.FRAME_SIZE_ERROR, "a frame has another size than its kind")
        return int.from_bytes(self.payload, "big") & MAX_WINDOW

    def content(self) -> bytes:
        """The payload without padding and priority.

        Raises:
            ProtocolError: it is shorter than these.
        """
        payload = self.payload
        start, padding = 0, 0
        if self.flags & Flag.PADDED:
            start, padding = 1, int.from_bytes(payload[:1], "big")
        if self.kind == Kind.HEADERS and self.flags & Flag.PRIORITY:
            start += 5
        if start + padding > len(payload):
            raise ProtocolError(Code.PROTOCOL_ERROR, "a frame has more padding than content")
        return payload[start : len(payload) - padding]

    def settings(self) -> Iterator[tuple[int, int]]:
        """The settings, whose identifiers and values are checked by nobody yet.

        Raises:
            ProtocolError: there is a part of one.
        """
        if len(self.payload) % 6 or (self.flags & Flag.ACK and self.payload):
            raise ProtocolError(Code.FRAME_SIZE_ERROR, "settings have another size than settings")
        for place in range(0, len(self.payload), 6):
            pair = self.payload[place : place + 6]
            yield int.from_bytes(pair[:2], "big"), int.from_bytes(pair[2:], "big")


class FrameReader:
    """Cuts what a client sends into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now.

        Raises:
            ProtocolError: it is not HTTP/2, or a frame is too large.
        """
        pending = self._pending
        pending += data
        place = 0
        try:
            if not self._has_begun:
                if not PREFACE.startswith(pending[: len(PREFACE)]):
                    raise ProtocolError(Code.PROTOCOL_ERROR, "the connection does not begin HTTP/2")
                if len(pending) < len(PREFACE):
                    return
                self._has_begun, place = True, len(PREFACE)
            while len(pending) - place >= _HEAD_BYTES:
                size = int.from_bytes(pending[place : place + 3], "big")
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(Code.FRAME_SIZE_ERROR, "a frame is too large")
                end = place + _HEAD_BYTES + size
                if end > len(pending):
                    return
                start, place = place, end
                yield Frame(
                    pending[start + 3],
                    pending[start + 4],
                    int.from_bytes(pending[start + 5 : start + 9], "big") & MAX_WINDOW,
                    bytes(pending[start + _HEAD_BYTES : end]),
                )
        finally:
            del pending[:place]


def frame(kind: Kind, stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame on the wire."""
    return b"".join(
        (
            len(payload).to_bytes(3, "big"),
            bytes((kind, flags)),
            stream_id.to_bytes(4, "big"),
            payload,
        )
    )


def number_frame(kind: Kind, stream_id: int, number: int) -> bytes:
    """A frame that is one number: WINDOW_UPDATE, RST_STREAM."""
    return frame(kind, stream_id, number.to_bytes(4, "big"))


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """A frame of settings."""
    pairs = (key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings.items())
    return frame(Kind.SETTINGS, 0, b"".join(pairs))


def headers_frames(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """The frames of a header block, which follow each other."""
    parts = [
        block[place : place + MAX_FRAME_BYTES] for place in range(0, len(block), MAX_FRAME_BYTES)
    ]
    last = len(parts) - 1
    return b"".join(
        frame(
            Kind.CONTINUATION if number else Kind.HEADERS,
            stream_id,
            part,
            (Flag.END_HEADERS if number == last else 0)
            | (Flag.END_STREAM if ends and not number else 0),
        )
        for number, part in enumerate(parts)
    )
