"""Server: uvicorn with a drain before the shutdown."""

import asyncio
import contextlib
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.errors import ConfigError, MaskdialError, UnavailableError
from maskdial.extras import how_to_install
from maskdial.http.connection import Connection
from maskdial.http.connections import ConnectionLimits, Connections
from maskdial.http.context import ServerContext
from maskdial.http.handshake import Handshake
from maskdial.http.in_process import InProcess
from maskdial.http.lifecycle import Phase
from maskdial.http.listener import listen
from maskdial.http.tls import Certificate
from maskdial.http.unix_socket import UnixSocket
from maskdial.runtime.memory import freeze_heap, map_large_blocks

if TYPE_CHECKING:
    from maskdial.rpc.server import RpcServer

_LAST_REPLIES_SECONDS = 1.0
# After the drain. Engines have ten seconds for the pass under way, traces have as long to be sent.
_STOP_SECONDS = 30.0
_TICKS_PER_CERTIFICATE_CHECK = 100
_TICKS_PER_DESCRIPTOR_CHECK = 10
_OTHER_FILES = 256  # connections beyond the limit that are refused, weights, pipes

_log = logging.getLogger("maskdial")


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT.

    The first signal turns readiness red and refuses new requests with 503 while the running ones
    finish, for the grace period at most; a second one refuses the running ones as well.

    Args:
        config: what to serve, and where.
        ends_process: whether the process ends with the server. If something hangs then, it is ended
            after half a minute, and the log gets the stacks of all threads.
    """

    def __init__(self, config: Config, *, ends_process: bool = False) -> None:
        map_large_blocks()
        max_connections = _raise_file_limit(config.max_connections)
        app = create_app(config, self._load_failed)
        context: ServerContext = app.state.context
        limits = ConnectionLimits(
            max_connections=max_connections,
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
        self._connections = Connections(limits, context.metrics)
        self.rpc: RpcServer | None = None
        """The listener for gRPC, if there is one."""
        self._rpc_certificate: Certificate | None = None
        if config.grpc_port is not None:
            self._rpc_certificate = _rpc_certificate(config)
            self.rpc = _rpc_server(app, self._connections, self._rpc_certificate)
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                uds=None if config.uds is None else str(config.uds),
                root_path=config.root_path,
                forwarded_allow_ips=config.forwarded_allow_ips,
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
        self.failure: MaskdialError | None = None
        self._context = context
        context.watchdog.on_death = self._engine_died
        self._ends_process = ends_process
        self._has_settled = False
        self._lacks_descriptors = False
        self._grace_period = config.grace_period
        self._draining: asyncio.Task[None] | None = None
        self._is_hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is stopped."""
        try:
            super().run(sockets)
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves within a running event loop.

        Raises:
            ConfigError: the address is in use, or cannot be had; no model is loaded then.
        """
        if self.config.uds is None:
            config = self.config
            await super().serve(sockets or listen(config.host, config.port, config.backlog))
            return
        listener = UnixSocket(Path(self.config.uds))
        try:
            await super().serve([listener.socket])
        finally:
            listener.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the listener, and logs the address that it got."""
        self._loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.reload)
        await super().startup(sockets)
        for server in self.servers if self.failure is None else ():
            for listener in server.sockets:
                name = listener.getsockname()
                where = f"unix:{name}" if isinstance(name, str) else f"//{name[0]}:{name[1]}"
                _log.info("listening on %s:%s", self.scheme, where)
                self._connections.overload.watch(listener.fileno())
        if self.rpc is not None:
            try:
                await self.rpc.start()
            except ConfigError as error:
                self._load_failed(error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listener and the connections."""
        if self._ends_process:
            stderr = sys.__stderr__ or 2
            with contextlib.suppress(RuntimeError, MemoryError):  # there is no thread left
                faulthandler.dump_traceback_later(_STOP_SECONDS, exit=True, file=stderr)
        self._connections.overload.close()
        if self.rpc is not None:
            await self.rpc.stop(_LAST_REPLIES_SECONDS)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % _TICKS_PER_CERTIFICATE_CHECK == 0:
            self._reload_certificate()
        if counter % _TICKS_PER_DESCRIPTOR_CHECK == 0:
            self._look_for_descriptors()
        if self._ends_process and not self._has_settled:
            self._settle()
        return await super().on_tick(counter)

    def _settle(self) -> None:
        """Freezes the heap as soon as the models are loaded."""
        if self._context.lifecycle.phase is Phase.SERVING:
            freeze_heap()
            self._has_settled = True

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

    def reload(self) -> None:
        """Reads the files again that may change while the server runs."""
        try:
            self._context.keys.reload()
        except ConfigError as error:
            _log.error("the keys remain as they were: %s", error.message)
        else:
            names = self._context.keys.names
            self._context.metrics.forget_other_keys(names)
            _log.info("keys: %s", ", ".join(names) or "none")
        policies = self._context.policies
        if policies is not None:
            try:
                policies.reload()
            except ConfigError as error:
                _log.error("the policies remain as they were: %s", error.message)
            else:
                _log.info("policies: %s", ", ".join(each.name for each in policies.policies))
        self._reload_certificate()

    def _reload_certificate(self) -> None:
        for certificate in (self._certificate, self._rpc_certificate):
            if certificate is not None:
                certificate.reload()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain. uvicorn's own handler would end the process by the signal again."""
        if self._loop is None:
            self.should_exit = self.force_exit = True
        elif self._draining is not None:
            self._loop.call_soon_threadsafe(self._is_hurried.set)
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, why: str) -> None:
        if self._draining is None:
            _log.info("%s: draining for up to %g s", why, self._grace_period)
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        lifecycle = self._context.lifecycle
        hurried = asyncio.create_task(self._is_hurried.wait())
        drained = asyncio.create_task(lifecycle.drain(self._grace_period))
        await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if lifecycle.num_requests:
            why = "a second signal" if hurried.done() else "the grace period is over"
            _log.warning("%s: %d running requests are refused", why, lifecycle.num_requests)
            # They are told so, in replies and at the ends of streams.
            closed = asyncio.create_task(self._context.models.close())
            await asyncio.wait({closed, hurried}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({closed}, timeout=_LAST_REPLIES_SECONDS)
            await lifecycle.drain(_LAST_REPLIES_SECONDS)
        hurried.cancel()
        self.should_exit = True

    def _engine_died(self, cause: str) -> None:
        """Begins the drain of the server; called in the thread of the engine that died."""
        assert self._loop is not None, "engines run while the server does"
        self.failure = UnavailableError(cause)
        self._loop.call_soon_threadsafe(self._begin_drain, cause)

    def _load_failed(self, error: MaskdialError) -> None:
        self.failure = error
        self.should_exit = True


def _rpc_certificate(config: Config) -> Certificate | None:
    """The certificate, for clients that ask for HTTP/2.

    Raises:
        ConfigError: its files can be read only once.
    """
    if config.ssl_certfile is None:
        return None
    for file in (config.ssl_certfile, config.ssl_keyfile):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} is no regular file, which --grpc-port needs beside HTTPS")
    return Certificate(config.ssl_certfile, config.ssl_keyfile, "h2")


def _rpc_server(
    app: FastAPI, connections: Connections, certificate: Certificate | None
) -> "RpcServer":
    try:
        from maskdial.rpc.server import RpcServer  # an extra
    except ImportError as error:
        raise ConfigError(
            f"--grpc-port needs the extra grpc ({error}): {how_to_install('grpc')}"
        ) from error
    tls = None if certificate is None else certificate.context
    return RpcServer(InProcess(app), app.state.context, connections, tls)


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
