"""RpcServer: the listener for gRPC, in the event loop of the server."""

import asyncio
import logging
import ssl
from functools import partial
from typing import Any

from maskdial.errors import ConfigError
from maskdial.http.connections import Connections
from maskdial.http.context import ServerContext
from maskdial.http.handshake import Handshake
from maskdial.http.in_process import InProcess
from maskdial.rpc.calls import Calls
from maskdial.rpc.connection import Connection
from maskdial.rpc.services import Services

_MESSAGE_BYTES = 65_536  # of a message beside its tensors
_BACKLOG = 2048

_log = logging.getLogger("maskdial")


class RpcServer:
    """Serves `Services` until it is stopped.

    Args:
        application: answers the calls.
        context: of the server: settings, keys, phase.
        connections: all of the server, to which those of this port belong.
        tls: with the certificate; None: calls come unencrypted.
    """

    def __init__(
        self,
        application: InProcess,
        context: ServerContext,
        connections: Connections,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._config = context.config
        self._connections = connections
        self._tls = tls
        self._service = Services(application, context.keys, self._config.max_body_bytes)
        self._calls = Calls(
            connections.limits.max_connections,
            self._config.max_body_bytes + _MESSAGE_BYTES,
            self._config.body_timeout,
            context.lifecycle,
        )
        self._open: set[Any] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        """Which it listens on, once it does."""

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            ConfigError: it cannot, at this address.
        """
        host, port = self._config.host, self._config.grpc_port
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen for gRPC on {host}:{port}: {error}") from error
        for listener in self._server.sockets:
            self._connections.overload.watch(listener.fileno())
        self.port = self._server.sockets[0].getsockname()[1]
        _log.info("listening on grpc://%s:%d", host, self.port)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, and ends the others after some seconds."""
        if self._server is None:
            return
        self._server.close()
        for connection in tuple(self._open):
            if isinstance(connection, Connection):
                connection.leave()
        ends = [each.has_ended for each in self._open if isinstance(each, Connection)]
        if ends:
            await asyncio.wait(ends, timeout=grace)
        for connection in tuple(self._open):
            connection.shutdown()

    def _accept(self) -> asyncio.Protocol:
        connection = partial(
            Connection,
            self._connections,
            self._calls,
            self._service,
            self._config.keep_alive_timeout,
            self._open,
        )
        if self._tls is None:
            return connection()
        return Handshake(self._connections, self._tls, connection, self._open)
