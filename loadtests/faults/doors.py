"""Generators of hostile inputs for the other doors: upload forms, batches' lines, gRPC."""

import json
import random
from collections.abc import Callable

import hpack

from loadtests.faults.hostile import body, with_a_change
from maskdial.rpc.frames import PREFACE
from maskdial.rpc.messages import SERVICE, message

BOUNDARY = "hostile"
_METHODS = ("ServerLive", "ServerReady", "ModelReady", "ModelMetadata", "ModelInfer", "Nothing")
_LINES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "It was", "model": "hybrid", "max_tokens": 2}),
    ("/v1/embeddings", {"input": "It was", "model": "sentiment"}),
    ("/classify", {"inputs": "good"}),
    ("/generate_stream", {"inputs": "It was", "parameters": {"max_new_tokens": 2}}),
    ("/v1/batches", {}),
)
_FIELDS = ("custom_id", "method", "url", "body", "x" * 3000, "background")
_DISPOSITIONS = (
    'form-data; name="purpose"',
    'form-data; name="file"; filename="a.jsonl"',
    'form-data; name="file"; filename="../../x"',
    'form-data; name="file"',
    'form-data; name=""',
    "form-data",
    'attachment; name="file"',
    'form-data; name="' + "y" * 5000 + '"',
)


def lines(source: random.Random) -> bytes:
    """A file for a batch: good lines and others."""
    return b"\n".join(_line(number, source) for number in range(source.randrange(1, 6)))


def _line(number: int, source: random.Random) -> bytes:
    if source.random() < 0.1:
        return source.choice((b"", b" " * 500, b"null", b"[]", b"\xff\xfe", b"[" * 2000, b"{"))
    url, content = source.choice(_LINES)
    line = {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": content}
    if source.random() < 0.3:
        return json.dumps(line).encode()
    return body(line, _FIELDS, source).replace(b"\n", b" ")


def form(source: random.Random) -> bytes:
    """A form with a file, of a boundary, with faults."""
    parts = [('form-data; name="purpose"', b"batch"), (_DISPOSITIONS[1], lines(source))]
    for _ in range(source.choice((0, 0, 0, 1, 2, 40))):
        part = source.choice(_DISPOSITIONS), source.choice((b"", b"batch", b"x" * 70_000))
        parts.insert(source.randrange(len(parts) + 1), part)
    content = b"".join(
        b"--%s\r\nContent-Disposition: %s\r\n\r\n%s\r\n"
        % (BOUNDARY.encode(), disposition.encode(), value)
        for disposition, value in parts
    )
    whole = content + b"--%s--\r\n" % BOUNDARY.encode()
    return with_a_change(whole, source) if source.random() < 0.4 else whole


def http2(source: random.Random) -> bytes:
    """What a client of gRPC sends: calls, and frames that belong to none."""
    encoder = hpack.Encoder()
    stream_ids = iter(range(1, 99, 2))
    pieces = [PREFACE, _frame(4, 0, b"")]
    for _ in range(source.randrange(1, 7)):
        make: Callable[[], bytes] = source.choice(
            (
                lambda: _call(next(stream_ids), encoder, source),
                lambda: _call(next(stream_ids), encoder, source),
                lambda: _any_frame(source),
            )
        )
        pieces.append(make())
    whole = b"".join(pieces)
    return with_a_change(whole, source) if source.random() < 0.3 else whole


def live_call() -> bytes:
    """The simplest call that has to be answered."""
    return PREFACE + _frame(4, 0, b"") + _headers(1, "ServerLive", hpack.Encoder()) + _data(1, b"")


def _call(stream_id: int, encoder: hpack.Encoder, source: random.Random) -> bytes:
    method = source.choice(_METHODS)
    request = message(f"{method}Request")() if method != "Nothing" else None
    content = b"" if request is None else request.SerializeToString()
    if method.startswith("Model"):
        content += b"\x0a\x06hybrid" if source.random() < 0.5 else b"\x0a\x03\xff\xfe\x00"
    if source.random() < 0.5:
        content += source.randbytes(source.choice((1, 9, 300)))
    return _headers(stream_id, method, encoder) + _data(stream_id, content)


def _headers(stream_id: int, method: str, encoder: hpack.Encoder) -> bytes:
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{method}"),
        (":authority", "local"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    return _frame(1, stream_id, encoder.encode(headers), 4)


def _data(stream_id: int, content: bytes) -> bytes:
    return _frame(0, stream_id, b"\x00" + len(content).to_bytes(4, "big") + content, 1)


def _any_frame(source: random.Random) -> bytes:
    kind = source.choice((*range(10), 99))
    size = source.choice((0, 1, 4, 5, 6, 8, 12, 300, 16_384))
    stream_id = source.choice((0, 1, 2, 3, 2**31 - 1))
    return _frame(kind, stream_id, source.randbytes(size), source.choice((0, 1, 4, 5, 8, 37)))


def _frame(kind: int, stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload
