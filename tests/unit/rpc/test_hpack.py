"""HPACK: RFC 7541's examples, and headers that no client should send."""

import random

import pytest

from maskdial.rpc.hpack import Decoder, HeaderError, HeadersTooLargeError, encode

FIRST = [
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/"),
    (b":authority", b"www.example.com"),
]
SECOND = [*FIRST, (b"cache-control", b"no-cache")]
THIRD = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
]


@pytest.mark.parametrize(
    "blocks",
    [
        (  # C.3
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ),
        (  # C.4, with Huffman's code
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ),
    ],
)
def test_the_requests_of_the_rfc(blocks: tuple[str, ...]) -> None:
    decoder = Decoder(10_000)
    found = [decoder.decode(bytes.fromhex(block)) for block in blocks]
    assert found == [FIRST, SECOND, THIRD]


def test_what_is_written_is_read() -> None:
    source = random.Random(7)
    for _ in range(200):
        headers = [
            (source.randbytes(source.randrange(200)), source.randbytes(source.randrange(20_000)))
            for _ in range(source.randrange(4))
        ]
        assert Decoder(10**6).decode(encode(headers)) == headers


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # no index
        b"\xbe",  # of a table that is empty
        b"\xff\xff\xff\xff\xff\xff\xff\x01",  # a number without end
        b"\x00\x05abc",  # a name that ends beyond the block
        b"\x00\x01",
        b"\x00",
        b"\x3f\xe2\x1f",  # a table larger than allowed
        b"\x82\x20",  # a table that changes behind a header
        b"\x00\x01a\x81\xfe",  # padding that is no end
        b"\x00\x01a\x82\xff\xff",  # too much padding
        b"\x00\x01a\x84\xff\xff\xff\xff",  # the end of a string within one
    ],
)
def test_malformed_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(HeaderError):
        Decoder(10_000).decode(block)


def test_a_small_block_of_large_headers_is_refused() -> None:
    """One that is kept costs a byte each time that it comes again."""
    kept = b"\x40\x01a" + b"\x7f\xa1\x1e" + bytes(4000)
    with pytest.raises(HeadersTooLargeError):
        Decoder(16_384).decode(kept + b"\xbe" * 5)


def test_the_table_forgets_what_is_older() -> None:
    decoder = Decoder(10**6)
    decoder.decode(b"\x40\x01a\x01b" + b"\x40\x01c\x01d")
    assert decoder.decode(b"\xbe\xbf") == [(b"c", b"d"), (b"a", b"b")]
    decoder.decode(b"\x3f\x09")  # 40 bytes, room for one
    assert decoder.decode(b"\xbe") == [(b"c", b"d")]
    with pytest.raises(HeaderError):
        decoder.decode(b"\xbf")
    decoder.decode(b"\x40\x01e\x7f\xa1\x1f" + bytes(4128))  # larger than the table: empties it
    with pytest.raises(HeaderError):
        decoder.decode(b"\xbe")
