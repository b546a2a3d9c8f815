"""A front end: a process that takes connections, and has the server's process answer.

It is started with the descriptor of its link. It ends when it is told so, or when the link does.
"""

import asyncio
import logging
import os
import pickle
import socket
import sys
from dataclasses import dataclass
from types import FrameType

from maskdial import logs
from maskdial.config import Config
from maskdial.errors import MaskdialError
from maskdial.fronts.forward import Forward
from maskdial.fronts.link import Kind, Link
from maskdial.fronts.reader import Reader
from maskdial.http.http_server import HttpServer
from maskdial.metrics import Metrics

_TICKS_PER_COUNT = 5
_SETUP_LENGTH_BYTES = 4

_log = logging.getLogger("maskdial.fronts")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a front end is told at its start.

    Attributes:
        config: the server's settings without its keys.
        listeners: the descriptors of the sockets on which it takes connections.
        max_connections: its share of those that may be open.
    """

    config: Config
    listeners: tuple[int, ...]
    max_connections: int

    def write(self, link: socket.socket) -> None:
        """Sends it to the process at the other end."""
        content = pickle.dumps(self)
        link.sendall(len(content).to_bytes(_SETUP_LENGTH_BYTES, "big") + content)

    @classmethod
    def read(cls, link: socket.socket) -> "Setup":
        """What the process at the other end has sent."""
        length = int.from_bytes(_read(link, _SETUP_LENGTH_BYTES), "big")
        # From the process that has started this one.
        setup = pickle.loads(_read(link, length))
        assert isinstance(setup, cls)
        return setup


class FrontServer(HttpServer):
    """Takes connections, until it is told to stop.

    Args:
        setup: of the process.
        link: the socket of its link.
    """

    def __init__(self, setup: Setup, link: socket.socket) -> None:
        self._setup = setup
        self._socket = link
        self._opening: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._forward = Forward()
        self._metrics = Metrics()
        self._told: dict[str, int] = {}
        self._num_told = 0
        super().__init__(
            self._forward,
            setup.config,
            self._metrics,
            max_connections=setup.max_connections,
            lifespan="off",
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the link, and then the listeners."""
        loop = asyncio.get_running_loop()
        self._link = self._forward.link = link = Link(self._take, self._lose)
        await loop.create_connection(lambda: link, sock=self._socket)
        if Reader.is_for(self._setup.config):
            self._opening = asyncio.create_task(self._open_reader())
        await super().startup(sockets)

    async def _open_reader(self) -> None:
        reader = Reader(self._setup.config)
        try:
            await reader.open()
        except MaskdialError as error:
            _log.info("requests are read by the server's own process: %s", error.message)
        else:
            self._forward.reader = reader

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listeners and the connections, and then the link."""
        await super().shutdown(sockets)
        if self._link is not None:
            self._tell_counts()
            self._link.close()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % _TICKS_PER_COUNT == 0:
            self._tell_counts()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Leaves signals to the owner: systemd sends them to all processes, and it drains."""

    def _take(self, kind: int, number: int, rest: tuple[object, ...]) -> None:
        if kind == Kind.STOP:
            self.should_exit = True
        elif kind == Kind.RELOAD:
            self.reload_certificate()
        else:
            self._forward.take(kind, number, rest)

    def _lose(self) -> None:
        self._forward.lose()
        self.should_exit = True

    def _tell_counts(self) -> None:
        """Tells the owner of the connections, if there is something new."""
        num_open, ended = self._metrics.of_connections()
        new = {why: num - self._told.get(why, 0) for why, num in ended.items()}
        new = {why: num for why, num in new.items() if num}
        if self._link is not None and (new or num_open != self._num_told):
            self._link.send(Kind.COUNTS, 0, num_open, new)
        self._told, self._num_told = ended, num_open


def _read(link: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = link.recv(num_bytes)
        if not part:
            raise SystemExit(0)  # the server ended before this process had begun
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def main() -> None:
    """Serves until the link ends, of which the command has the descriptor."""
    link = socket.socket(fileno=int(sys.argv[1]))
    setup = Setup.read(link)
    link.setblocking(False)
    logs.configure(setup.config.log_level, setup.config.log_format)
    listeners = [socket.socket(fileno=each) for each in setup.listeners]
    FrontServer(setup, link).run(listeners)
    logging.shutdown()
    os._exit(0)  # threads that read bundles are not waited for
