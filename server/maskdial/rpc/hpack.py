"""HPACK, the headers of HTTP/2 (RFC 7541): reads all of it, writes its plainest form."""

from collections import deque
from collections.abc import Iterable

Header = tuple[bytes, bytes]

TABLE_BYTES = 4096
"""Of the headers that a client may have kept for it (SETTINGS_HEADER_TABLE_SIZE)."""

_OVERHEAD = 32  # of a header, as the table and the limit count it
_MAX_INTEGER_BYTES = 5
# Appendix A: names, with the values that are known.
_STATIC_NAMES = (
    ":authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https "
    ":status=200 :status=204 :status=206 :status=304 :status=400 :status=404 :status=500 "
    "accept-charset accept-encoding=gzip,_deflate accept-language accept-ranges accept "
    "access-control-allow-origin age allow authorization cache-control content-disposition "
    "content-encoding content-language content-length content-location content-range content-type "
    "cookie date etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified link location max-forwards proxy-authenticate "
    "proxy-authorization range referer refresh retry-after server set-cookie "
    "strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)
_STATIC: tuple[Header, ...] = tuple(
    (name.encode(), value.replace("_", " ").encode())
    for name, _, value in (each.partition("=") for each in _STATIC_NAMES.split())
)
# Appendix B: the code is canonical, so that the lengths of the codes say all of it. The last is the
# end of a string, which never occurs in one.
_CODE_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b"
    "0a0a080b080606060505050606060606060607080f060c0a0d060707070707070707070707070707"
    "07070707070707070807080d130d0e060f0506050605060606050707060606050607060505060707"
    "0707070f0b0e0d1c1416141416161617161717171717181718181617181717171715161716171718"
    "16151416161717151716161815161717151516151716171714161616171616171a1a141316171619"
    "1a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
_END = 256


class HeaderError(Exception):
    """Headers that are none: the connection cannot go on, as its table is no longer known."""


class HeadersTooLargeError(Exception):
    """Headers of more bytes than are allowed."""


def encode(headers: Iterable[Header]) -> bytes:
    """Headers as literals, which leave no trace in the client's table."""
    return b"".join(
        b"\x00" + _integer(len(name)) + name + _integer(len(value)) + value
        for name, value in headers
    )


def _integer(value: int) -> bytes:
    """Of 7 bits, in the first byte and as many as it takes."""
    if value < 127:
        return bytes((value,))
    value -= 127
    content = bytearray(b"\x7f")
    while value >= 128:
        content.append(value & 127 | 128)
        value >>= 7
    content.append(value)
    return bytes(content)


class Decoder:
    """Reads the header blocks of one connection, one after the other.

    Args:
        max_bytes: of the headers of a block, each with 32 more than it has.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._table: deque[Header] = deque()  # the newest first
        self._table_bytes = 0
        self._table_limit = TABLE_BYTES
        self._block = b""
        self._place = 0

    def decode(self, block: bytes) -> list[Header]:
        """The headers of a block.

        Raises:
            HeaderError: it is malformed.
            HeadersTooLargeError: they are too large.
        """
        self._block, self._place = block, 0
        headers: list[Header] = []
        size = 0
        while self._place < len(block):
            first = block[self._place]
            if first & 0x80:
                header = self._known(self._integer(7))
            elif first & 0xE0 == 0x20:
                if headers:
                    raise HeaderError("the table's size changes within headers")
                self._resize(self._integer(5))
                continue
            else:
                is_kept = first & 0x40
                index = self._integer(6 if is_kept else 4)
                name = self._known(index)[0] if index else self._string()
                header = (name, self._string())
                if is_kept:
                    self._keep(header)
            size += len(header[0]) + len(header[1]) + _OVERHEAD
            if size > self._max_bytes:
                raise HeadersTooLargeError
            headers.append(header)
        return headers

    def _known(self, index: int) -> Header:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        if not 0 < index <= len(_STATIC) + len(self._table):
            raise HeaderError("no header has the index")
        return self._table[index - len(_STATIC) - 1]

    def _keep(self, header: Header) -> None:
        self._table.appendleft(header)
        self._table_bytes += len(header[0]) + len(header[1]) + _OVERHEAD
        self._evict()

    def _resize(self, limit: int) -> None:
        if limit > TABLE_BYTES:
            raise HeaderError("the table is larger than allowed")
        self._table_limit = limit
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._table_limit:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _OVERHEAD

    def _integer(self, bits: int) -> int:
        """Section 5.1; more bytes than a length of gigabytes takes are refused."""
        most = (1 << bits) - 1
        value = self._byte() & most
        if value < most:
            return value
        for number in range(_MAX_INTEGER_BYTES):
            byte = self._byte()
            value += (byte & 127) << 7 * number
            if byte < 128:
                return value
        raise HeaderError("a number is too long")

    def _byte(self) -> int:
        if self._place >= len(self._block):
            raise HeaderError("the headers end too early")
        self._place += 1
        return self._block[self._place - 1]

    def _string(self) -> bytes:
        is_coded = self._place < len(self._block) and self._block[self._place] & 0x80
        length = self._integer(7)
        start, self._place = self._place, self._place + length
        if self._place > len(self._block):
            raise HeaderError("a string ends beyond the headers")
        content = self._block[start : self._place]
        return _decode_string(content) if is_coded else content


def _huffman() -> tuple[list[list[tuple[int, bytes]]], frozenset[int]]:
    """For each node of the code's tree and each half of a byte, the next node and what was read;
    and the nodes at which a string may end: a part of the end's code, of 7 bits at most.
    """
    children: list[list[int]] = [[-1, -1]]
    code = length = 0
    for wanted, symbol in sorted((wanted, symbol) for symbol, wanted in enumerate(_CODE_LENGTHS)):
        code <<= wanted - length
        length = wanted
        node = 0
        for place in range(length - 1, -1, -1):
            bit = code >> place & 1
            if place == 0:
                children[node][bit] = -2 - symbol
            elif children[node][bit] < 0:
                children.append([-1, -1])
                children[node][bit] = len(children) - 1
            node = children[node][bit]
        code += 1
    table = [[_step(children, node, half) for half in range(16)] for node in range(len(children))]
    padding, node = [0], 0
    for _ in range(7):
        node = children[node][1]
        padding.append(node)
    return table, frozenset(padding)


def _step(children: list[list[int]], node: int, half: int) -> tuple[int, bytes]:
    """-1 is no node: the end of a string was read."""
    found = b""
    for place in (3, 2, 1, 0):
        node = children[node][half >> place & 1]
        if node < -1:
            symbol = -2 - node
            if symbol == _END:
                return -1, b""
            found += bytes((symbol,))
            node = 0
    return node, found


_TABLE, _PADDING = _huffman()


def _decode_string(content: bytes) -> bytes:
    node, parts = 0, []
    for byte in content:
        node, found = _TABLE[node][byte >> 4]
        if found:
            parts.append(found)
        if node < 0:
            break
        node, found = _TABLE[node][byte & 15]
        if found:
            parts.append(found)
        if node < 0:
            break
    if node not in _PADDING:
        raise HeaderError("a string is not coded as it should be")
    return b"".join(parts)
