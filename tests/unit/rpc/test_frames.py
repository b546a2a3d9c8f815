"""Frames are the same however they are cut, and malformed ones end the connection."""

import random

import pytest

from maskdial.rpc.frames import (
    PREFACE,
    Code,
    Flag,
    Frame,
    FrameReader,
    Kind,
    ProtocolError,
    frame,
    headers_frames,
)


def test_frames_may_come_in_any_pieces() -> None:
    source = random.Random(7)
    sent = [
        (source.randrange(12), source.randrange(256), source.randrange(2**31), source.randbytes(n))
        for n in (0, 1, 5, 300, 16_384, 0)
    ]
    content = PREFACE + b"".join(
        frame(kind, stream_id, payload, flags)  # type: ignore[arg-type]
        for kind, flags, stream_id, payload in sent
    )
    for _ in range(20):
        reader, found, rest = FrameReader(), [], content
        while rest:
            size = source.choice((1, 2, 7, 100, 5000, 20_000))
            found += list(reader.feed(rest[:size]))
            rest = rest[size:]
        assert found == [Frame(*each) for each in sent]


@pytest.mark.parametrize("start", [b"GET", b"PRI * HTTP/1.1", b"\x16\x03\x01"])
def test_another_protocol_is_refused_at_its_first_bytes(start: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(start))


@pytest.mark.parametrize(
    ("flags", "payload", "content"),
    [
        (0, b"abc", b"abc"),
        (Flag.PADDED, b"\x02abc\x00\x00", b"abc"),
        (Flag.PRIORITY, bytes(5) + b"abc", b"abc"),
        (Flag.PADDED | Flag.PRIORITY, b"\x01" + bytes(5) + b"abc\x00", b"abc"),
        (Flag.PADDED, b"\x00", b""),
    ],
)
def test_padding_and_priority_are_no_content(flags: int, payload: bytes, content: bytes) -> None:
    assert Frame(Kind.HEADERS, flags, 1, payload).content() == content


@pytest.mark.parametrize(
    ("flags", "payload"), [(Flag.PADDED, b"\x03ab"), (Flag.PADDED, b""), (Flag.PRIORITY, bytes(4))]
)
def test_more_padding_than_content_is_refused(flags: int, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        Frame(Kind.HEADERS, flags, 1, payload).content()


def test_long_headers_take_several_frames() -> None:
    reader = FrameReader()
    list(reader.feed(PREFACE))
    first, second, third = reader.feed(headers_frames(3, bytes(40_000), ends=True))
    assert (first.kind, first.flags) == (Kind.HEADERS, Flag.END_STREAM)
    assert (second.kind, second.flags) == (Kind.CONTINUATION, 0)
    assert (third.kind, third.flags) == (Kind.CONTINUATION, Flag.END_HEADERS)


def test_codes_are_those_of_the_rfc() -> None:
    assert [int(each) for each in Code] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 11]
