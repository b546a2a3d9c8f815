"""Frames are the same however they are cut, and malformed ones end the connection."""

import random

import hpack
import pytest
from hyperframe.frame import ContinuationFrame, HeadersFrame

from maskdial.rpc.frames import PREFACE, Code, FrameReader, ProtocolError, headers_frames
from tests.http.raw_http2 import Kind, frame


def read(content: bytes) -> list[object]:
    return list(FrameReader().feed(PREFACE + content))


def test_frames_may_come_in_any_pieces() -> None:
    source = random.Random(7)
    sent = [
        frame(kind, stream_id, source.randbytes(size))
        for kind, stream_id, size in (
            (Kind.DATA, 1, 0),
            (Kind.PING, 0, 8),
            (Kind.HEADERS, 3, 300),
            (Kind.DATA, 7, 16_384),
            (99, 2**31 - 1, 5),
            (Kind.CONTINUATION, 3, 1),
        )
    ]
    whole = [repr(each) for each in read(b"".join(sent))]
    assert len(whole) == len(sent)
    for _ in range(20):
        reader, rest = FrameReader(), PREFACE + b"".join(sent)
        found: list[str] = []
        while rest:
            size = source.choice((1, 2, 7, 100, 5000, 20_000))
            found += [repr(each) for each in reader.feed(rest[:size])]
            rest = rest[size:]
        assert found == whole


@pytest.mark.parametrize("start", [b"GET", b"PRI * HTTP/1.1", b"\x16\x03\x01"])
def test_another_protocol_is_refused_at_its_first_bytes(start: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(start))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (frame(Kind.DATA, 1, bytes(16_385)), Code.FRAME_SIZE_ERROR),
        (frame(Kind.HEADERS, 1, b"\x03ab", 8), Code.PROTOCOL_ERROR),  # more padding than content
        (frame(Kind.PING, 0, b"x"), Code.FRAME_SIZE_ERROR),
        (frame(Kind.WINDOW_UPDATE, 0, bytes(4)), Code.PROTOCOL_ERROR),
        (frame(Kind.DATA, 0, b"x"), Code.PROTOCOL_ERROR),
        (frame(Kind.SETTINGS, 1), Code.PROTOCOL_ERROR),
    ],
)
def test_a_malformed_frame_says_why(content: bytes, code: Code) -> None:
    with pytest.raises(ProtocolError) as error:
        read(content)
    assert error.value.code == code


def test_long_headers_take_several_frames_and_leave_no_trace() -> None:
    headers = [(b"grpc-message", bytes([97]) * 40_000), (b"grpc-status", b"0")]
    decoder = hpack.Decoder(100_000)
    for _ in range(2):
        first, *rest = FrameReader().feed(PREFACE + headers_frames(3, headers, ends=True))
        assert isinstance(first, HeadersFrame)
        assert set(first.flags) == {"END_STREAM"}
        assert all(isinstance(each, ContinuationFrame) for each in rest)
        assert [set(each.flags) for each in rest] == [set(), {"END_HEADERS"}]
        block = first.data + b"".join(each.data for each in rest)  # type: ignore[attr-defined]
        assert [tuple(each) for each in decoder.decode(block, raw=True)] == headers
        assert not decoder.header_table.dynamic_entries
