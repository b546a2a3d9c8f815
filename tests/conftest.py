"""What tests of more than one folder share: a real server on a real port."""

import asyncio
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from maskdial.config import Config
from maskdial.server import Server


class RunningServer:
    """A server on its own thread, on a free port."""

    def __init__(self, **settings: object) -> None:
        self.server = Server(Config(port=0, log_level="warning", **settings))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not (self.server.started and self.server.servers):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def _run(self) -> None:
        asyncio.run(self.server.serve())

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while httpx.get(f"{self.url}/health/ready").status_code != 200:
            assert self.server.failure is None, self.server.failure
            assert time.monotonic() < deadline, "the models did not load"
            time.sleep(0.02)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def start_server() -> Callable[..., RunningServer]:
    """Starts a ready server with the given settings; stop it when done."""

    def start(**settings: object) -> RunningServer:
        running = RunningServer(**settings)
        running.wait_until_ready()
        return running

    return start
