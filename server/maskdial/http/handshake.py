"""Handshake: a connection from accept until its TLS handshake is done."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from maskdial.http.connections import Connections, Place
from maskdial.http.exchange import Begun
from maskdial.metrics import ConnectionEnd

_log = logging.getLogger("maskdial.connections")


class Successor(Protocol):
    """The protocol that takes a connection over after its handshake."""

    def take_over(self, transport: asyncio.Transport, place: Place, received: bytes) -> None:
        """Begins, with what was received since the handshake."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Takes in that the client left before its handshake ended."""


class Handshake(asyncio.Protocol):
    """One client's connection while TLS is negotiated, which it has ``header_timeout`` for.

    asyncio's servers tell nobody of a connection before its handshake is done. Here it takes its
    place among the others when it is accepted.

    Args:
        connections: shared by all.
        context: with the certificate.
        successor: makes the protocol that follows.
        siblings: the connections of the port, to end them with the server.
    """

    def __init__(
        self,
        connections: Connections,
        context: ssl.SSLContext,
        successor: Callable[[], Successor],
        siblings: set[Any],
    ) -> None:
        self._all = connections
        self._context = context
        self._successor = successor
        self._siblings = siblings
        self._place = Place(self.abort)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._is_lost = False
        self._following: Successor | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._siblings.add(self)
        if self._all.enter(self._place, self._loop) == "closed":
            self.abort("limit")
            self._leave()
            return
        limits = self._all.limits
        # Begun here, or what the client sends first could come before it.
        begun = Begun(
            self._loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limits.header_timeout,
                # How long a reply that is still unread may wait after the end of its connection.
                ssl_shutdown_timeout=limits.write_timeout,
            )
        )
        self._task = self._loop.create_task(self._shake_hands(transport, begun))

    def data_received(self, data: bytes) -> None:
        # Between the end of the handshake and the next step of the task.
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._following is not None:  # told late: this call was scheduled before it followed
            self._following.connection_lost(exc)

    def abort(self, why: ConnectionEnd) -> None:
        """Closes the connection at once."""
        self._all.ended(why)
        self.shutdown()

    def shutdown(self) -> None:
        """Closes the connection; uvicorn calls it when the server ends."""
        assert self._transport is not None
        self._is_lost = True
        self._transport.abort()

    async def _shake_hands(
        self, raw: asyncio.Transport, begun: Begun[asyncio.Transport | None]
    ) -> None:
        secured: asyncio.Transport | None = None
        try:
            secured = await begun
        except ConnectionAbortedError:  # by the timeout
            self._all.ended("handshake")
        except Exception as error:  # of any kind, as it depends on what a stranger sends
            _log.debug("a TLS handshake failed: %r", error)
        finally:
            self._siblings.discard(self)
            # A client that leaves at once ends it without an error.
            is_done = secured is not None and secured.get_extra_info("ssl_object") is not None
            if self._is_lost or not is_done:
                raw.abort()
                self._leave()
        if secured is not None and is_done and not self._is_lost:
            self._following = self._successor()
            secured.set_protocol(self._following)  # type: ignore[arg-type]
            self._following.take_over(secured, self._place, self._received)

    def _leave(self) -> None:
        self._siblings.discard(self)
        self._all.leave(self._place)
