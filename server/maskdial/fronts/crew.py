"""Crew: the front ends of a server, each started anew when it dies."""

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

from starlette.types import ASGIApp

from maskdial.config import Config
from maskdial.engine.child import child_environment
from maskdial.engine.thread import in_thread
from maskdial.errors import UnavailableError, io_reason
from maskdial.fronts.front import Setup
from maskdial.fronts.owner import Owner
from maskdial.metrics import Metrics

_SECRETS = ("api_keys", "api_key_file", "admin_key", "metrics_key", "receipt_key")
# After this time, a front end that dies is started anew at once.
_RESTART_SECONDS = 1.0
_STOP_SECONDS = 5.0

_log = logging.getLogger("maskdial.fronts")


class Crew:
    """Front ends, one for each group of listening sockets.

    The sockets stay open here: those that connect while a front end is started anew wait.

    Args:
        app: answers their requests.
        config: of the server.
        metrics: count their connections.
        listeners: the sockets of each front end.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        metrics: Metrics,
        listeners: Sequence[Sequence[socket.socket]],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._listeners = listeners
        open_config = config.model_copy(
            update={name: type(config).model_fields[name].get_default() for name in _SECRETS}
        )
        share = -(-config.max_connections // len(listeners))
        self._setups = [
            Setup(open_config, tuple(each.fileno() for each in sockets), share)
            for sockets in listeners
        ]
        self._owners: dict[int, Owner] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self) -> None:
        """Starts all front ends; they take connections a moment later.

        Raises:
            UnavailableError: a process cannot be started.
        """
        await asyncio.gather(*map(self._begin, range(len(self._setups))))
        self._keepers = [
            asyncio.create_task(self._keep(place)) for place in range(len(self._setups))
        ]

    def reload(self) -> None:
        """Has them read the certificate again."""
        for owner in self._owners.values():
            owner.reload()

    async def stop(self) -> None:
        """Has them take no further connections, and waits until they have ended."""
        self._is_stopping = True
        for owner in self._owners.values():
            owner.stop()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=_STOP_SECONDS)
        for keeper in self._keepers:
            keeper.cancel()
        for process in self._processes.values():
            if process.poll() is None:
                _log.warning("a front end has not ended within %g s; it is killed", _STOP_SECONDS)
                process.kill()
            await in_thread(process.wait)
        for sockets in self._listeners:
            for each in sockets:
                each.close()

    async def _keep(self, place: int) -> None:
        while True:
            began = time.monotonic()
            await self._owners[place].lost.wait()
            status = await in_thread(self._processes[place].wait)
            if self._is_stopping:
                return
            _log.error("a front end has ended with status %d; another one is started", status)
            await asyncio.sleep(max(0.0, began + _RESTART_SECONDS - time.monotonic()))
            await self._begin_again(place)

    async def _begin_again(self, place: int) -> None:
        while not self._is_stopping:
            try:
                await self._begin(place)
            except UnavailableError as error:
                _log.error("%s", error.message)
                await asyncio.sleep(_RESTART_SECONDS)
            else:
                return

    async def _begin(self, place: int) -> None:
        ours, theirs = socket.socketpair()
        setup = self._setups[place]
        try:
            with theirs:
                process = await in_thread(partial(_spawn, setup, theirs.fileno()))
            await in_thread(partial(setup.write, ours))
        except OSError as error:
            ours.close()
            raise UnavailableError(
                f"a front end could not be started ({io_reason(error)}); the machine may be short "
                "of memory or processes"
            ) from error
        ours.setblocking(False)
        owner = Owner(self._app, self._metrics)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: owner.link, sock=ours)
        self._owners[place], self._processes[place] = owner, process
        if self._is_stopping:
            owner.stop()


def _spawn(setup: Setup, link: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "maskdial.fronts", str(link)],
        stdin=subprocess.DEVNULL,
        env=child_environment(),
        pass_fds=(link, *setup.listeners),
        # Ctrl-C in the terminal must reach the server only.
        start_new_session=True,
    )
