"""Frames of HTTP/2 (RFC 9113): cut by size here, read and written by hyperframe and hpack."""

from collections.abc import Iterable, Iterator
from enum import IntEnum

from hpack import Encoder, NeverIndexedHeaderTuple
from hyperframe.exceptions import HyperframeError, InvalidFrameError
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16_384
"""Of a payload, in both directions: what every endpoint takes."""
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
"""Bytes of DATA that may be sent before more is allowed, of a stream and of a connection."""

Header = tuple[bytes, bytes]

_HEAD_BYTES = 9
# It keeps nothing for what is never indexed, so all connections share it.
_ENCODER = Encoder()


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


class FrameReader:
    """Cuts what a client sends into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now.

        Raises:
            ProtocolError: it is not HTTP/2, or a frame is too large or malformed.
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
                content, place = bytes(pending[place:end]), end
                yield _read(memoryview(content))
        finally:
            del pending[:place]


def _read(content: memoryview) -> Frame:
    try:
        frame, _ = Frame.parse_frame_header(content[:_HEAD_BYTES])
        frame.parse_body(content[_HEAD_BYTES:])
    except InvalidFrameError as error:
        raise ProtocolError(Code.FRAME_SIZE_ERROR, str(error)) from error
    except HyperframeError as error:
        raise ProtocolError(Code.PROTOCOL_ERROR, str(error)) from error
    return frame


def headers_frames(stream_id: int, headers: Iterable[Header], *, ends: bool) -> bytes:
    """Headers on the wire, in as many frames as they need. They leave no trace in the client's
    table.
    """
    plain = [NeverIndexedHeaderTuple(*each) for each in headers]
    block = _ENCODER.encode(plain, huffman=False)
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    frames: list[Frame] = [HeadersFrame(stream_id, parts[0])]
    frames += [ContinuationFrame(stream_id, part) for part in parts[1:]]
    frames[-1].flags.add("END_HEADERS")
    if ends:
        frames[0].flags.add("END_STREAM")
    return b"".join(each.serialize() for each in frames)
