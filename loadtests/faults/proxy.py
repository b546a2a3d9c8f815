"""FaultyProxy: passes connections on to a server, and breaks some of them."""

import asyncio
import contextlib
import random
from collections import Counter
from enum import StrEnum


class Fault(StrEnum):
    """What happens to a connection. Offsets count from its beginning, in bytes."""

    NONE = "none"
    CUT_REQUEST = "cut request"
    """The client's side is closed within the request's line, its headers or its body."""
    CUT_REPLY = "cut reply"
    """Both sides are closed within the reply."""
    HALF_CLOSE = "half close"
    """The client says that it will send nothing more, and still reads."""
    DELAY = "delay"
    """Every piece is held for a while, both ways."""
    DRIBBLE = "dribble"
    """The request arrives in pieces of a few bytes."""
    DUPLICATE = "duplicate"
    """The requests also arrive on a second connection, whose replies nobody reads to the end."""
    RESET = "reset"
    """The connection is reset in place of a close."""


_WEIGHTS = dict.fromkeys(Fault, 1) | {Fault.NONE: 8}
_CHUNK = 65_536


class FaultyProxy:
    """A TCP proxy on localhost.

    Args:
        port: of the server.
        seed: draws the faults.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.port = 0
        """Where it listens."""
        self.num_faults: Counter[Fault] = Counter()
        self.num_repeated = 0
        """Pieces of requests that were sent twice."""
        self._server_port = port
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends all connections."""
        assert self._server is not None, "it was started"
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._connect(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(
            "127.0.0.1", self._server_port
        )
        fault = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        self.num_faults[fault] += 1
        forth = asyncio.create_task(self._forth(fault, reader, upstream_writer))
        back = asyncio.create_task(self._back(fault, upstream_reader, writer))
        try:
            await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
            if fault is Fault.HALF_CLOSE and forth.done() and not forth.exception():
                await back
        finally:
            for way in (forth, back):
                way.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)
            if fault is Fault.RESET:
                upstream_writer.transport.abort()
            upstream_writer.close()

    async def _forth(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        limit = self._rng.choice((20, 150, 300)) if fault is Fault.CUT_REQUEST else None
        second = None
        if fault is Fault.DUPLICATE:
            _, second = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            await self._pass_on(fault, reader, writer, second, limit)
        finally:
            if second is not None:
                second.close()

    async def _pass_on(
        self,
        fault: Fault,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        second: asyncio.StreamWriter | None,
        limit: int | None,
    ) -> None:
        while data := await reader.read(_CHUNK):
            if fault is Fault.DELAY:
                await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            if limit is not None and len(data) > limit:
                writer.write(data[:limit])
                await writer.drain()
                return
            if fault is Fault.DRIBBLE:
                for start in range(0, len(data), 7):
                    writer.write(data[start : start + 7])
                    await writer.drain()
                    await asyncio.sleep(0)
            else:
                writer.write(data)
                await writer.drain()
            if second is not None:
                second.write(data)
                self.num_repeated += 1
            if fault is Fault.HALF_CLOSE:
                writer.write_eof()
                return
            if fault is Fault.RESET:
                await asyncio.sleep(self._rng.uniform(0.0, 0.05))
                return

    async def _back(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        limit = self._rng.choice((1, 50, 250, 700)) if fault is Fault.CUT_REPLY else None
        while data := await reader.read(_CHUNK):
            if fault is Fault.DELAY:
                await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            if limit is not None and len(data) >= limit:
                writer.write(data[:limit])
                await writer.drain()
                return
            writer.write(data)
            await writer.drain()
