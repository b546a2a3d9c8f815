"""Whether connections come faster than they are taken, by the system's own queue."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest

from maskdial.http.overload import Overload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells its queue's length")


async def turns(overload: Overload, state: bool) -> bool:
    for _ in range(1000):
        if overload.is_on is state:
            return True
        await asyncio.sleep(0.01)
    return False


def fill(listener: socket.socket, number: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(number)]


def test_connections_that_wait_are_an_overload_until_they_are_taken() -> None:
    async def run() -> None:
        overload, loop = Overload(), asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            quiet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            busy = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=500))
            for listener in (quiet, busy):
                overload.watch(listener.fileno())
            for _ in range(256):
                overload.opened(loop)
            for client in fill(busy, 128):
                stack.enter_context(client)
            await asyncio.sleep(0.2)
            assert not overload.is_on
            for client in fill(busy, 1):
                stack.enter_context(client)
            assert await turns(overload, True)
            stack.enter_context(busy.accept()[0])
            assert await turns(overload, False)
            overload.close()

    asyncio.run(run())


def test_without_a_crowd_nobody_is_refused() -> None:
    async def run() -> None:
        overload, loop = Overload(), asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            busy = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=500))
            overload.watch(busy.fileno())
            for client in fill(busy, 300):
                stack.enter_context(client)
            for _ in range(255):
                overload.opened(loop)
            await asyncio.sleep(0.2)
            assert not overload.is_on
            overload.opened(loop)
            assert await turns(overload, True)
            overload.closed()
            assert not overload.is_on
            overload.close()

    asyncio.run(run())


def test_a_unix_socket_is_not_looked_at(tmp_path: Path) -> None:
    async def run() -> None:
        overload, loop = Overload(), asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            overload.watch(listener.fileno())
            for _ in range(256):
                overload.opened(loop)
            await asyncio.sleep(0.1)
            assert not overload.is_on
        for _ in range(256):
            overload.closed()

    asyncio.run(run())
