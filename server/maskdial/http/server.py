"""Server: uvicorn with a drain before the shutdown."""

import asyncio
import logging
import signal
import threading
from types import FrameType

import uvicorn

from maskdial.config import Config
from maskdial.errors import ConfigError, MaskdialError
from maskdial.http.app import create_app
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.metrics import Metrics
from maskdial.models.registry import Models
from maskdial.runtime.memory import map_large_blocks

_LAST_REPLIES_SECONDS = 1.0

_log = logging.getLogger("maskdial")


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT.

    The first signal turns readiness red and refuses new requests with 503 while the running ones
    finish, for the grace period at most; a second one stops at once.
    """

    def __init__(self, config: Config) -> None:
        map_large_blocks()
        app = create_app(config, self._load_failed)
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.failure: MaskdialError | None = None
        self._lifecycle: Lifecycle = app.state.context.lifecycle
        self._models: Models = app.state.context.models
        self._keys: Keys = app.state.context.keys
        self._metrics: Metrics = app.state.context.metrics
        self._grace_period = config.grace_period
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: object = None) -> None:
        """Opens the listener, and logs the address that it got."""
        self._loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.reload)
        await super().startup()
        for server in self.servers:
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                _log.info("listening on http://%s:%s", host, port)

    def reload(self) -> None:
        """Reads the files again that may change while the server runs."""
        try:
            self._keys.reload()
        except ConfigError as error:
            _log.error("the keys remain as they were: %s", error.message)
        else:
            self._metrics.declare_keys(self._keys.names)
            _log.info("keys: %s", ", ".join(self._keys.names) or "none")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain. uvicorn's own handler would end the process by the signal again."""
        if self._loop is None or self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, why: str) -> None:
        if self._draining is None:
            _log.info("%s: draining for up to %g s", why, self._grace_period)
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        num_left = await self._lifecycle.drain(self._grace_period)
        if num_left:
            _log.warning("the grace period is over: %d running requests are refused", num_left)
            await self._models.close()  # they are told so, in replies and at the ends of streams
            await self._lifecycle.drain(_LAST_REPLIES_SECONDS)
        self.should_exit = True

    def _load_failed(self, error: MaskdialError) -> None:
        self.failure = error
        self.should_exit = True
