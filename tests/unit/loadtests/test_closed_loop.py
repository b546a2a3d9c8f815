"""`loadtests.closed_loop`, and the server and connection that it drives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtests import LoadTestError, closed_loop
from loadtests.closed_loop import Work
from loadtests.measurement import Section
from loadtests.server import Connection, Reply, post, running_server
from maskdial.bundle.bundle import load_bundle, load_bundles
from maskdial.registry.catalog import STARTER_FOLDER

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"
STREAM = (
    b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n15\r\ndata: {"index":1,...}\r\n0\r\n\r\n'
)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Connection]:
    """A connection to a server that answers as given and then closes it."""
    answered = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        await writer.wait_closed()
        answered.set()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        yield connection
        connection.close()
        await answered.wait()


@pytest.mark.parametrize("reply", [PLAIN, STREAM])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_reply_is_whole_however_it_is_cut(reply: bytes, size: int) -> None:
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            requests.append(await reader.readexactly(len(post("/p", b"{}"))))
            for start in range(0, len(reply), size):
                writer.write(reply[start : start + size])
                await writer.drain()

    async def ask() -> list[Reply]:
        async with serving(answer) as connection:
            return [await connection.send(post("/p", b"{}")) for _ in range(2)]

    first, second = asyncio.run(ask())
    assert first == second
    assert first.status == 200
    assert first.body in (b"body", b'data: {"index":1,...}')
    assert requests[0].startswith(b"POST /p HTTP/1.1\r\n")
    assert requests[0].endswith(b"Content-Length: 2\r\n\r\n{}")


@pytest.mark.parametrize("sent", [b"", PLAIN[:-1], STREAM[:-5]])
def test_a_connection_that_ends_early_is_an_error(sent: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(sent)

    async def ask() -> None:
        async with serving(answer) as connection:
            with pytest.raises(LoadTestError, match="closed a connection"):
                await connection.send(post("/p", b"{}"))

    asyncio.run(ask())


def test_a_closed_connection_takes_no_request() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(PLAIN)
        await reader.read()

    async def ask_again() -> None:
        async with serving(answer) as connection:
            await connection.send(post("/p", b"{}"))
            connection.close()
            with pytest.raises(LoadTestError, match="before the request was sent"):
                await connection.send(post("/p", b"{}"))

    asyncio.run(ask_again())


def test_the_capacity_counts_the_answers_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, which advances by a second with every second reply."""
    sent: list[bytes] = []

    class Even(Connection):
        @classmethod
        async def open(cls, port: int) -> Connection:
            return cls()

        async def send(self, request: bytes, on_body: object = None) -> Reply:
            sent.append(request)
            await asyncio.sleep(0)
            return Reply(200, b"")

        def close(self) -> None:
            pass

    monkeypatch.setattr(closed_loop, "Connection", Even)
    clock = SimpleNamespace(perf_counter=lambda: float(len(sent) // 2))
    monkeypatch.setattr(closed_loop, "time", clock)
    assert asyncio.run(closed_loop.capacity(0, [b"a", b"b", b"c"], 2, 5.0)) == pytest.approx(2)
    assert sent[:4] == [b"a", b"b", b"c", b"a"]
    assert len(sent) == 10


def test_incomplete_replies_are_errors() -> None:
    event = b'data: {"index":1}\n\n'
    Work(2).check(Reply(200, event * 2))
    with pytest.raises(LoadTestError, match="after 1 tokens"):
        Work(2).check(Reply(200, event + b'data: {"error":"gone"}\n\n'))
    Work(0).check(Reply(200, b"[]"))
    with pytest.raises(LoadTestError, match=r"503 .*later"):
        Work(0).check(Reply(503, b"later"))


def test_work_is_chosen_by_the_task() -> None:
    hybrid, full = load_bundles("hybrid", STARTER_FOLDER / "hybrid")
    assert Work.of(hybrid, 3) == Work(3)
    assert Work.of(load_bundle("sentiment", STARTER_FOLDER / "sentiment"), 3) == Work(0)
    with pytest.raises(LoadTestError, match="is fill-mask; this needs generate or classify"):
        Work.of(full, 3)


def test_a_section_as_markdown() -> None:
    @dataclass(frozen=True, slots=True)
    class Row:
        model: str
        p99_ms: float | None

    section = Section(
        "load", "what it is", 1, (Row("m", 1234.5), Row("n", None)), ("so",), ("but",)
    )
    assert section.as_markdown().splitlines() == [
        "### load",
        "",
        "What it is.",
        "",
        "| model | p99 ms |",
        "| --- | --- |",
        "| m | 1234 |",
        "| n | - |",
        "",
        "- so",
        "- but",
    ]


def test_a_server_process_and_one_that_does_not_start(tmp_path: Path) -> None:
    with running_server({"feeling": STARTER_FOLDER / "sentiment"}, threads=1) as server:
        assert 0 < server.start_seconds < server.ready_seconds
        assert server.cpu_seconds() > 0
        assert server.resident_bytes() > 10_000_000

        async def classify() -> Reply:
            connection = await Connection.open(server.port)
            try:
                return await connection.send(Work(0).request("Fine."))
            finally:
                connection.close()

        assert asyncio.run(classify()).status == 200
    with (
        pytest.raises(LoadTestError, match=r"has no maskdial\.json"),
        running_server({"m": tmp_path}),
    ):
        pass
