"""HttpServer: uvicorn with bounded connections and a certificate that is read again."""

import asyncio
import errno
import logging
import os
import socket
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from maskdial.config import Config
from maskdial.http.connection import Connection
from maskdial.http.connections import ConnectionLimits, Connections
from maskdial.http.handshake import Handshake
from maskdial.http.tls import Certificate
from maskdial.metrics import Metrics

_TICKS_PER_CERTIFICATE_CHECK = 100
_TICKS_PER_DESCRIPTOR_CHECK = 10
_OTHER_FILES = 256  # connections beyond the limit that are refused, weights, pipes

_log = logging.getLogger("maskdial")


class HttpServer(uvicorn.Server):
    """Takes connections for an application: that of the server, or of one of its front ends.

    Args:
        app: answers the requests.
        config: has the address, the certificate, and the limits of connections.
        metrics: counts connections.
        max_connections: that may be open in this process.
        lifespan: whether the application has one; see uvicorn.

    Raises:
        ConfigError: the certificate cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        metrics: Metrics,
        *,
        max_connections: int,
        lifespan: Literal["on", "off"],
    ) -> None:
        limits = ConnectionLimits(
            max_connections=_raise_file_limit(max_connections),
            max_header_bytes=config.max_header_bytes,
            max_unsent_bytes=config.max_unsent_bytes,
            header_timeout=config.header_timeout,
            body_timeout=config.body_timeout,
            write_timeout=config.write_timeout,
        )
        self._certificate = (
            None
            if config.ssl_certfile is None
            else Certificate(config.ssl_certfile, config.ssl_keyfile)
        )
        self._connections = Connections(limits, metrics)
        self._lacks_descriptors = False
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                uds=None if config.uds is None else str(config.uds),
                root_path=config.root_path,
                forwarded_allow_ips=config.forwarded_allow_ips,
                lifespan=lifespan,
                http=self._accept,  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=config.keep_alive_timeout,
                # Its own lines say less than ours, and that it runs when nothing could be served.
                log_level="warning" if config.log_level == "info" else config.log_level,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs, ``https`` with a certificate."""
        return "http" if self._certificate is None else "https"

    def _accept(self, **arguments: Any) -> asyncio.Protocol:
        """The protocol of a connection that was accepted; the arguments are uvicorn's."""
        connection = partial(Connection, self._connections, **arguments)
        if self._certificate is None:
            return connection()
        return Handshake(
            self._connections,
            self._certificate.context,
            connection,
            self.server_state.connections,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the listeners, and watches how many connections wait there."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                self._connections.overload.watch(listener.fileno())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listeners and the connections."""
        self._connections.overload.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % _TICKS_PER_CERTIFICATE_CHECK == 0:
            self.reload_certificate()
        if counter % _TICKS_PER_DESCRIPTOR_CHECK == 0:
            self._look_for_descriptors()
        return await super().on_tick(counter)

    def reload_certificate(self) -> None:
        """Reads the certificate again if its files have changed."""
        if self._certificate is not None:
            self._certificate.reload()

    def _look_for_descriptors(self) -> None:
        """Logs that no file can be opened: the event loop closes new connections then, untold."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            if not self._lacks_descriptors:
                _log.error(
                    "no file can be opened, so that new connections are closed: %s; raise the "
                    "limit (ulimit -n) or lower --max-connections",
                    error.strerror,
                )
            self._lacks_descriptors = True
        else:
            self._lacks_descriptors = False


def _raise_file_limit(max_connections: int) -> int:
    """Lets the process open as many files as it may have connections, as far as the system allows.

    Returns:
        How many connections fit. Beyond that, they could neither be accepted nor refused.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return max_connections
    needed = max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return max_connections
    fitting = max(limit - _OTHER_FILES, limit // 2, 1)
    _log.warning(
        "the system allows %d open files, which is too few for --max-connections %d; it is %d",
        limit,
        max_connections,
        fitting,
    )
    return fitting
