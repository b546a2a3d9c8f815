"""Receipting: a request that asks for a receipt, and its reply that gets one.

A whole reply has it in a header. The headers of a stream are gone before its text is known, so its
last line is a comment of server-sent events, which clients skip: ``: x-maskdial-receipt RECEIPT``.
"""

import time

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

import maskdial
from maskdial.engine.offload import offload
from maskdial.engine.provenance import Provenance
from maskdial.errors import ValidationError
from maskdial.http.exchange import route_path
from maskdial.http.sse import EVENTS
from maskdial.receipts.content import reply_sha256, request_sha256
from maskdial.receipts.receipt import HEADER, Receipt
from maskdial.receipts.signing import SigningKey

_SECONDS_PER_BYTE = 1e-7  # of JSON that is read and written again


def wants_receipt(value: bytes) -> bool:
    """Whether a request asks for a receipt, by the value of its header.

    Raises:
        ValidationError: it is neither 1 nor 0.
    """
    if value not in (b"0", b"1"):
        raise ValidationError(f"{HEADER} must be 1, which asks for a receipt, or 0")
    return value == b"1"


class Receipting:
    """Stands between a route and its client for one request.

    Args:
        scope: of the request.
        receive: as in ASGI.
        send: as in ASGI.
        key: signs the receipt; None for nobody.
        seed: of a request that is repeated; None for its own, or a fresh one.

    Attributes:
        provenance: what the request is answered with, which those who answer it fill in.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        key: SigningKey | None,
        seed: int | None = None,
    ) -> None:
        self.provenance = Provenance(seed)
        self._scope = scope
        self._receive = receive
        self._send = send
        self._key = key
        self._body: list[bytes] = []
        self._reply: list[bytes] = []
        self._start: Message | None = None
        self._is_stream = False

    async def receive(self) -> Message:
        """The next part of the request's body."""
        message = await self._receive()
        self._body.append(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Passes the reply on; its headers with the first part of its body.

        Raises:
            ValidationError: it is a stream that has no room for a receipt.
        """
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            self._is_stream = "content-length" not in headers
            if self._is_stream and not kind.startswith(EVENTS.media_type):
                raise ValidationError(
                    "a stream of JSON lines has no room for a receipt; set stream to false"
                )
            self._start = message
            return
        start, self._start = self._start, None
        self._reply.append(message.get("body", b""))
        ends = not message.get("more_body", False)
        failed = "outcome" in self._scope["state"]
        if start is not None:
            if ends and start["status"] == 200 and (receipt := await self._receipt()):
                MutableHeaders(scope=start)[HEADER] = receipt
            await self._send(start)
        elif ends and self._is_stream and not failed and (receipt := await self._receipt()):
            comment = f": {HEADER} {receipt}\n\n".encode()
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})
        await self._send(message)

    async def _receipt(self) -> str:
        """The receipt of the whole reply; empty if no model was asked."""
        found, body, reply = self.provenance, b"".join(self._body), b"".join(self._reply)
        if not found.bundle:
            return ""

        def make() -> str:
            return Receipt(
                bundle=found.bundle,
                numerics=found.numerics,
                server=maskdial.__version__,
                request=request_sha256(route_path(self._scope), body, found.seed),
                asked=found.asked,
                seed=found.seed,
                reply=reply_sha256(reply),
                time=int(time.time()),
            ).encode(self._key)

        return await offload(make, (len(body) + len(reply)) * _SECONDS_PER_BYTE)
