"""Receipts: what they count as the same, and what is none."""

import asyncio
import base64
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.engine.philox import settle_seed
from maskdial.engine.provenance import Provenance
from maskdial.errors import ConfigError, ValidationError
from maskdial.http.receipting import Receipting
from maskdial.receipts.content import lasting, reply_sha256, request_sha256
from maskdial.receipts.receipt import HEADER, Receipt, ReceiptError, read_receipt
from maskdial.receipts.signing import read_public_key, read_signing_key

HEX = "0123456789abcdef" * 2
RECEIPT = Receipt(
    bundle="b",
    numerics="1",
    server="0",
    request="r",
    asked="a",
    seed=7,
    reply="o",
    time=1,
)


def coded(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def test_a_request_is_what_it_says_however_it_is_written() -> None:
    one = request_sha256("/x", b'{"a": 1.0, "b": "\xc3\xa9"}', 3)
    assert one == request_sha256("/x", b'{"b":"\\u00e9","a":1.0}', 3)
    others: list[tuple[str, bytes, int | None]] = [
        ("/y", b'{"a":1.0,"b":"\\u00e9"}', 3),
        ("/x", b'{"a":2.0,"b":"\\u00e9"}', 3),
    ]
    others += [("/x", b'{"a":1.0,"b":"\\u00e9"}', seed) for seed in (4, None)]
    assert one not in {request_sha256(*each) for each in others}


def test_hashes_can_be_computed_by_anybody() -> None:
    """As docs/receipts.md says."""
    written = '{"body":{"inputs":"x"},"path":"/classify","seed":null}'
    expected = hashlib.sha256(written.encode()).hexdigest()
    assert request_sha256("/classify", b'{"inputs": "x"}', None) == expected
    reply = hashlib.sha256(b'[{"label":"A","score":0.1}]').hexdigest()
    assert reply_sha256(b'[{"score": 0.1, "label": "A"}]') == reply


@pytest.mark.parametrize(
    "reply",
    [
        {
            "id": f"cmpl-{HEX}",
            "created": 5,
            "usage": {"prompt_tokens_details": {"cached_tokens": 5}},
        },
        {"message": {"tool_calls": [{"id": f"call_{HEX}"}]}, "created_at": "2026-01-01T10:11:12Z"},
        {"content": [{"id": f"call_{HEX}"}], "usage": {"input_tokens": 3}},
        {"response": {"id": f"resp_{HEX}", "output": [{"id": f"msg_{HEX}", "call_id": HEX}]}},
    ],
)
def test_ids_times_and_the_cache_do_not_count(reply: dict[str, Any]) -> None:
    bare = lasting(json.dumps(reply).encode())
    assert not any(
        isinstance(each, str | int) and not isinstance(each, bool) for each in leaves(bare)
    )


def leaves(content: Any) -> list[Any]:
    if isinstance(content, dict | list):
        values = content.values() if isinstance(content, dict) else content
        return [leaf for each in values for leaf in leaves(each)]
    return [content]


@pytest.mark.parametrize(
    "reply",
    [
        {"content": [{"type": "tool_use", "input": {"id": 5, "created": 6}}]},
        {"id": "Smith", "created": "by hand"},  # fields that a schema of /extract asks for
        {"message": {"tool_calls": [{"id": "functions.look:0", "function": {}}]}},
        {"choices": [{"index": 0, "text": f"id {HEX}"}], "usage": {"completion_tokens": 5}},
        [{"id": HEX}],
        {"output": [{"id": 3}, {"content": [{"id": HEX}]}]} | {"output": [{"text": HEX}]},
    ],
)
def test_what_a_model_says_counts(reply: Any) -> None:
    assert lasting(json.dumps(reply).encode()) == reply


def test_texts_that_are_streamed_together_come_in_any_order() -> None:
    def stream(*events: tuple[int, str]) -> bytes:
        frames = (f'data: {{"choices": [{{"index": {i}, "text": "{t}"}}]}}\n\n' for i, t in events)
        return "".join((": keep-alive\n\n", *frames, "data: [DONE]\n\n")).encode()

    one = reply_sha256(stream((0, "a"), (1, "b"), (0, "c")))
    assert one == reply_sha256(
        stream((1, "b"), (0, "a"), (0, "c")).replace(b": keep-alive\n\n", b"")
    )
    whole = stream((0, "a"), (0, "c"), (1, "b"))
    assert (
        one
        == reply_sha256(whole.replace(b"\n", b"\r\n"))
        == reply_sha256(whole.replace(b"\n", b"\r"))
    )
    # What a client reads as an event counts, also behind a comment's carriage return.
    assert one != reply_sha256(b": x\r" + stream((0, "more")).replace(b"\n", b"\r") + b"\n" + whole)
    assert one != reply_sha256(stream((0, "c"), (0, "a"), (1, "b")))
    assert one != reply_sha256(stream((0, "a"), (1, "b"), (1, "c")))
    assert one != reply_sha256(stream((0, "a"), (1, "b")))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"no json", b"\xff\x00", b"[" * 200_000, b"9" * 5000, rb'"\ud800"'),
        *(b"[" * 600 + b"]" * 600, b"data: " + b"[" * 600 + b"]" * 600),
        *(b'data: {"choices": [3], "index": []}', b"data: \xff", b"event: x\n\ndata"),
    ],
)
def test_other_bytes_count_as_they_are(body: bytes) -> None:
    assert reply_sha256(body) == reply_sha256(body)
    assert reply_sha256(body) != reply_sha256(body + b"x")
    assert request_sha256("/x", body, None) != request_sha256("/x", body + b"x", None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it was cut"),
        ("a.b", "it was cut"),
        ("x" * 20_000, "it was cut"),
        ("\xe4.b.c", "cut or changed"),
        ("a.b.c", "cut or changed"),
        (f"{coded({'alg': 'none'})}.{coded({})}.", "another kind"),
        (f"{coded([])}.{coded({})}.", "another kind"),
        (f"{coded({'typ': 'maskdial-receipt', 'alg': 'none'})}.{coded({'v': 2})}.", "version 2"),
        (f"{coded({'typ': 'maskdial-receipt', 'alg': 'none'})}.{coded({'v': 1})}.", "other fields"),
        (
            f"{coded({'typ': 'maskdial-receipt', 'alg': 'HS256'})}.{coded({'v': 1})}.",
            "only EdDSA",
        ),
        (
            f"{coded({'typ': 'maskdial-receipt', 'alg': 'EdDSA', 'kid': 3})}.{coded({'v': 1})}.",
            "EdDSA",
        ),
    ],
)
def test_what_is_no_receipt(text: str, why: str) -> None:
    with pytest.raises(ReceiptError, match=why) as caught:
        read_receipt(text)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "changed",
    [{"seed": -1}, {"seed": 2**63}, {"seed": True}, {"seed": 0.5}, {"bundle": 3}, {"more": ""}],
)
def test_fields_of_another_kind_are_refused(changed: dict[str, Any]) -> None:
    header = coded({"typ": "maskdial-receipt", "alg": "none"})
    content = {"v": 1, **RECEIPT.model_dump(), **changed}
    with pytest.raises(ReceiptError, match="other fields"):
        read_receipt(f"{header}.{coded(content)}.")


def test_a_receipt_is_read_as_it_was_written() -> None:
    read = read_receipt(RECEIPT.encode(None) + "\n")
    assert (read.receipt, read.key_id) == (RECEIPT, "")


@given(st.data())
def test_damaged_receipts_are_read_or_refused(data: st.DataObject) -> None:
    text = RECEIPT.encode(None)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.text(max_size=2)) + text[place + 1 :]
    with contextlib.suppress(ReceiptError):
        read_receipt(damaged)


def test_a_request_with_a_receipt_has_one_seed() -> None:
    usage = ClientUsage(provenance=Provenance())
    token = usage_of_request.set(usage)
    try:
        assert settle_seed(None) == settle_seed(None)
        assert usage.provenance is not None
        drawn = usage.provenance.seed
        usage.provenance = Provenance(drawn)  # repeated
        assert settle_seed(None) == drawn
        assert settle_seed(5) == usage.provenance.seed == 5
    finally:
        usage_of_request.reset(token)
    assert settle_seed(None) != settle_seed(None)


def sent(
    parts: list[bytes], *, status: int = 200, kind: str = "text/event-stream", **state: str
) -> list[Message]:
    """What a client gets of a reply with these parts, of a route that has asked a model."""
    scope: Scope = {"path": "/x", "state": state}
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        messages.append(message)

    async def answer() -> None:
        receipting = Receipting(scope, receive, send, None)
        await receipting.receive()
        bundle = SimpleNamespace(sha256="b")
        model: Any = SimpleNamespace(bundle=bundle, adapter=None, numerics="1")
        receipting.provenance.note(model, [1, 2], {"x"}, np.float32(1), int)
        headers = [(b"content-type", kind.encode())]
        if kind == "application/json":
            headers.append((b"content-length", b"2"))
        await receipting.send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await receipting.send({"type": "http.response.body", "body": part, "more_body": more})

    asyncio.run(answer())
    return messages


def test_a_stream_has_its_receipt_at_its_end() -> None:
    start, first, comment, last = sent([b"data: 1\n\n", b""])
    assert start["type"] == "http.response.start"
    assert HEADER.encode() not in dict(start["headers"])
    assert (first["body"], last["body"], last["more_body"]) == (b"data: 1\n\n", b"", False)
    assert comment["body"].startswith(b": x-maskdial-receipt ")
    assert comment["body"].endswith(b"\n\n")
    receipt = read_receipt(comment["body"].decode().split()[2]).receipt
    assert receipt.reply == reply_sha256(b"data: 1\n\n" + comment["body"])
    assert (receipt.bundle, receipt.numerics, receipt.seed) == ("b", "1", None)


def test_a_reply_that_fails_has_no_receipt() -> None:
    assert len(sent([b"data: 1\n\n", b"data: error\n\n", b""], outcome="timeout")) == 4
    for status in (200, 404):
        start, _ = sent([b"{}"], status=status, kind="application/json")
        assert (HEADER.encode() in dict(start["headers"])) == (status == 200)
    with pytest.raises(ValidationError, match="no room for a receipt"):
        sent([b"{}"], kind="application/x-ndjson")


class TestSignatures:
    """Against cryptography and PyJWT, which read the same files and the same form."""

    @pytest.fixture
    def keys(self, tmp_path: Path) -> tuple[Path, Path]:
        pytest.importorskip("cryptography")
        from cryptography.hazmat.primitives import serialization as how
        from cryptography.hazmat.primitives.asymmetric import ed25519

        key = ed25519.Ed25519PrivateKey.generate()
        private, public = tmp_path / "key.pem", tmp_path / "key.pub"
        private.write_bytes(
            key.private_bytes(how.Encoding.PEM, how.PrivateFormat.PKCS8, how.NoEncryption())
        )
        public.write_bytes(
            key.public_key().public_bytes(how.Encoding.PEM, how.PublicFormat.SubjectPublicKeyInfo)
        )
        return private, public

    def test_a_changed_receipt_is_not_signed(self, keys: tuple[Path, Path]) -> None:
        key, public = read_signing_key(keys[0]), read_public_key(keys[1])
        text = RECEIPT.encode(key)
        read = read_receipt(text)
        assert read.key_id == public.id == key.public.id == read_public_key(keys[0]).id
        assert read.is_signed_by(public)
        header, content, signature = text.split(".")
        other = RECEIPT.model_copy(update={"seed": 8}).encode(key).split(".")[1]
        for forged in (f"{header}.{other}.{signature}", f"{header}.{content}.", f"{text}A"):
            assert not read_receipt(forged).is_signed_by(public)
        unsigned = RECEIPT.encode(None)
        assert not read_receipt(unsigned).is_signed_by(public)
        assert not read_receipt(unsigned.rpartition(".")[0] + f".{signature}").is_signed_by(public)

    def test_other_libraries_verify_it(self, keys: tuple[Path, Path]) -> None:
        jwt = pytest.importorskip("jwt")
        text = RECEIPT.encode(read_signing_key(keys[0]))
        content = jwt.decode(text, keys[1].read_text(), ["EdDSA"])
        assert content == {"v": 1, **RECEIPT.model_dump()}

    @pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nx"])
    def test_a_file_without_a_key_is_a_sentence(self, content: bytes, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        (tmp_path / "key").write_bytes(content)
        for read in (read_signing_key, read_public_key):
            with pytest.raises(ConfigError, match="no Ed25519 key"):
                read(tmp_path / "key")
            with pytest.raises(ConfigError, match="cannot be read"):
                read(tmp_path / "missing")

    def test_keys_of_other_kinds_are_refused(self, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        from cryptography.hazmat.primitives import serialization as how
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        encoding, form = how.Encoding.PEM, how.PrivateFormat.PKCS8
        other = ec.generate_private_key(ec.SECP256R1())
        locked = ed25519.Ed25519PrivateKey.generate()
        for content in (
            other.private_bytes(encoding, form, how.NoEncryption()),
            locked.private_bytes(encoding, form, how.BestAvailableEncryption(b"secret")),
        ):
            (tmp_path / "key").write_bytes(content)
            with pytest.raises(ConfigError, match="no Ed25519 key in PEM without a passphrase"):
                read_signing_key(tmp_path / "key")


def test_without_cryptography_a_key_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"signatures need cryptography .*receipts"):
        read_signing_key(tmp_path / "key")
