"""What strangers and clients do to stop the server for everyone, plain and under TLS.

A real server is attacked in its own process; a health check beside the attack is always answered.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.http.process import Process
from tests.page import bundles
from tests.servers import wait_for

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="pipes"), pytest.mark.slow]

MAX_CONNECTIONS = 40
GOOD = {"inputs": "good", "model": "sentiment"}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    ranker = bundles.make_ranker(tmp_path_factory.mktemp("models") / "ranker")
    running = Process(
        *("--model", f"ranker={ranker}", "--max-connections", str(MAX_CONNECTIONS)),
        tls=request.param,
    )
    running.wait_until_ready()
    yield running
    assert running.stop() == 0
    running.close()


def assert_alive(server: Process, times: int = 1) -> None:
    """Each check in a connection of its own."""
    for _ in range(times):
        with server.client() as http:
            assert http.get("/health/live").status_code == 200


@contextlib.contextmanager
def attack(attackers: int, work: Callable[[], None]) -> Iterator[list[int]]:
    """Repeats the work in so many threads while the block runs; gives a list of what was done."""
    done: list[int] = []
    ends = threading.Event()

    def repeat() -> None:
        while not ends.is_set():
            work()
            done.append(1)

    threads = [threading.Thread(target=repeat) for _ in range(attackers)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_connections_that_send_nothing(server: Process) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(5 * MAX_CONNECTIONS):
            with contextlib.suppress(OSError):  # some were closed already to make room
                silent = socket.create_connection(("127.0.0.1", server.port), timeout=60)
                stack.enter_context(silent)
            if number % 20 == 19:
                assert_alive(server)
        lines = server.http.get("/metrics").text.splitlines()
        (num_open,) = (
            line.split()[1] for line in lines if line.startswith("maskdial_connections ")
        )
        assert float(num_open) <= MAX_CONNECTIONS


def test_readers_of_metrics(server: Process) -> None:
    def scrape() -> None:
        with server.client() as http:
            assert http.get("/metrics").status_code == 200

    with attack(2, scrape) as done:
        wait_for(lambda: len(done) > 0)
        for _ in range(10):
            assert_alive(server)
            assert server.http.post("/classify", json=GOOD).status_code == 200
        wait_for(lambda: len(done) > 10)


def test_long_queries(server: Process) -> None:
    body = {"model": "ranker", "query": "a, " * 100_000, "texts": ["a"], "truncate": True}

    def rerank() -> None:
        with server.client() as http:
            assert http.post("/rerank", json=body).status_code == 200

    with attack(3, rerank) as done:
        while not done:
            assert_alive(server)
        assert_alive(server, 5)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_stderr_that_nobody_reads(tls: bool) -> None:
    import fcntl

    read, write = os.pipe()
    server: Process | None = None
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        server = Process("--log-format", "json", tls=tls, stderr=write)
        server.wait_until_ready()
        for _ in range(300):
            assert server.http.post("/classify", json=GOOD).status_code == 200
        assert_alive(server)
        server.process.send_signal(signal.SIGHUP)
        assert_alive(server)
        assert server.stop() == 0
    finally:
        os.close(read)
        os.close(write)
        if server is not None:
            server.close()
