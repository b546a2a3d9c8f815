"""Server: uvicorn with a drain before the shutdown."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fastapi import FastAPI

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.errors import ConfigError, MaskdialError, UnavailableError
from maskdial.extras import how_to_install
from maskdial.fronts.crew import Crew
from maskdial.http.connections import Connections
from maskdial.http.context import ServerContext
from maskdial.http.http_server import HttpServer
from maskdial.http.in_process import InProcess
from maskdial.http.lifecycle import Phase
from maskdial.http.listener import listen, listen_in_groups
from maskdial.http.tls import Certificate
from maskdial.http.unix_socket import UnixSocket
from maskdial.runtime.memory import freeze_heap, map_large_blocks

if TYPE_CHECKING:
    from maskdial.rpc.server import RpcServer

_LAST_REPLIES_SECONDS = 1.0
# After the drain. Engines have ten seconds for the pass under way, traces have as long to be sent.
_STOP_SECONDS = 30.0

_log = logging.getLogger("maskdial")


class Server(HttpServer):
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
        if config.front_ends > 1:
            _check_regular(config, "--front-ends")
        app = create_app(config, self._load_failed)
        context: ServerContext = app.state.context
        super().__init__(
            app,
            config,
            context.metrics,
            max_connections=config.max_connections,
            lifespan="on",
        )
        self._app = app
        self.listeners: list[socket.socket] = []
        """The sockets on which the server listens; of several front ends, those of the first."""
        self.crew: Crew | None = None
        """The front ends, if there are several."""
        self.rpc: RpcServer | None = None
        """The listener for gRPC, if there is one."""
        self._rpc_certificate: Certificate | None = None
        if config.grpc_port is not None:
            self._rpc_certificate = _rpc_certificate(config)
            self.rpc = _rpc_server(app, self._connections, self._rpc_certificate)
        self.failure: MaskdialError | None = None
        self._context = context
        context.watchdog.on_death = self._engine_died
        self._ends_process = ends_process
        self._has_settled = False
        self._grace_period = config.grace_period
        self._draining: asyncio.Task[None] | None = None
        self._is_hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

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
        if self.config.uds is not None:
            listener = UnixSocket(Path(self.config.uds))
            try:
                await self._serve_on([listener.socket])
            finally:
                listener.close()
            return
        config, number = self.config, self._context.config.front_ends
        if number == 1 or sockets is not None:
            await self._serve_on(sockets or listen(config.host, config.port, config.backlog))
        else:
            groups = listen_in_groups(config.host, config.port, config.backlog, number)
            await self._serve_on(*groups)

    async def _serve_on(self, *groups: list[socket.socket]) -> None:
        """Serves on sockets; in groups, each front end has one, or all share the only one."""
        self.listeners = groups[0]
        number = self._context.config.front_ends
        if number == 1:
            await super().serve(groups[0])
            return
        if len(groups) < number:
            groups = tuple([each.dup() for each in groups[0]] for _ in range(number))
        self.crew = Crew(self._app, self._context.config, self._context.metrics, groups)
        await super().serve([])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the listener, and logs the address that it got."""
        self._loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.reload)
        if self.crew is not None:
            self.config.port = self.config.port or self.listeners[0].getsockname()[1]
        await super().startup(sockets)
        if self.failure is None and self.crew is not None:
            try:
                await self.crew.start()
            except UnavailableError as error:
                self._start_failed(error)
        for listener in self.listeners if self.failure is None else ():
            name = listener.getsockname()
            where = f"unix:{name}" if isinstance(name, str) else f"//{name[0]}:{name[1]}"
            _log.info("listening on %s:%s", self.scheme, where)
        if self.rpc is not None:
            try:
                await self.rpc.start()
            except ConfigError as error:
                self._start_failed(error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listener and the connections."""
        if self._ends_process:
            stderr = sys.__stderr__ or 2
            with contextlib.suppress(RuntimeError, MemoryError):  # there is no thread left
                faulthandler.dump_traceback_later(_STOP_SECONDS, exit=True, file=stderr)
        if self.rpc is not None:
            await self.rpc.stop(_LAST_REPLIES_SECONDS)
        if self.crew is not None:
            await self.crew.stop()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._ends_process and not self._has_settled:
            self._settle()
        return await super().on_tick(counter)

    def _settle(self) -> None:
        """Freezes the heap as soon as the models are loaded."""
        if self._context.lifecycle.phase is Phase.SERVING:
            freeze_heap()
            self._has_settled = True

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
        self.reload_certificate()
        if self.crew is not None:
            self.crew.reload()

    def reload_certificate(self) -> None:
        """Reads the certificates of both ports again if their files have changed."""
        super().reload_certificate()
        if self._rpc_certificate is not None:
            self._rpc_certificate.reload()

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

    def _start_failed(self, error: MaskdialError) -> None:
        _log.error("%s", error.message)
        self._load_failed(error)

    def _load_failed(self, error: MaskdialError) -> None:
        """Ends the server; the log has the error."""
        self.failure = error
        self.should_exit = True


def _rpc_certificate(config: Config) -> Certificate | None:
    """The certificate, for clients that ask for HTTP/2.

    Raises:
        ConfigError: its files can be read only once.
    """
    if config.ssl_certfile is None:
        return None
    _check_regular(config, "--grpc-port")
    return Certificate(config.ssl_certfile, config.ssl_keyfile, "h2")


def _check_regular(config: Config, flag: str) -> None:
    """Checks that the certificate can be read more than once.

    Raises:
        ConfigError: it cannot.
    """
    for file in (config.ssl_certfile, config.ssl_keyfile):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} is no regular file, which {flag} needs beside HTTPS")


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
