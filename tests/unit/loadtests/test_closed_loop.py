"""`loadtests.closed_loop`, and the server and connection that it drives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtests import LoadTestError
from loadtests.closed_loop import Classification, Generation, Throughput, drive
from loadtests.measurement import Section
from loadtests.server import Connection, Reply, post, running_server
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


class _Steps:
    """An engine on a clock of its own, whose steps add a unit to every open request.

    A step takes a second in the company of four, and less in a smaller one.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self.texts: list[str] = []
        self._open: list[asyncio.Future[None]] = []

    async def client(self, text: str) -> int:
        """A request of as many units as the text has letters."""
        self.texts.append(text)
        for _ in text:
            self._open.append(asyncio.get_running_loop().create_future())
            await self._open[-1]
        return len(text)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self._open:
                self.now += 0.5 + len(self._open) / 8
                self.sizes.append(len(self._open))
                ended, self._open = self._open, []
                for future in ended:
                    future.set_result(None)
                for _ in range(3):  # until the clients wait for the next step
                    await asyncio.sleep(0)

    def drive(self, num_clients: int, texts: list[str], seconds: float) -> Throughput:
        async def together() -> Throughput:
            steps = asyncio.create_task(self.run())
            readings = iter([5.0, 7.5])
            try:
                return await drive(
                    [self.client] * num_clients,
                    texts,
                    seconds,
                    lambda: next(readings),
                    lambda: self.now,
                )
            finally:
                steps.cancel()

        return asyncio.run(together())


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    steps = _Steps()
    result = steps.drive(3, ["a", "bb"], 4)
    assert steps.texts[:4] == ["a", "bb", "a", "bb"]
    assert set(steps.sizes[:4]) == {3}
    assert result.seconds == 4.375  # after five steps
    assert result.server_cpu == 2.5


@pytest.mark.parametrize("seconds", range(1, 41, 3))
@pytest.mark.parametrize("lengths", [(7,), (12,), (3, 11, 6), (1, 30), (64, 1, 1, 1, 1)])
def test_the_throughput_does_not_depend_on_where_a_turn_ends(
    lengths: tuple[int, ...], seconds: int
) -> None:
    steps = _Steps()
    result = steps.drive(4, ["x" * length for length in lengths], seconds)
    assert result.seconds >= seconds
    assert result.per_second == pytest.approx(4)  # the units of a step in full company
    if len(lengths) == 1:
        assert result.requests == pytest.approx(result.units / lengths[0])


def test_requests_that_are_answered_at_once_count_as_a_whole() -> None:
    async def client(_: str) -> int:
        await asyncio.sleep(0)
        return 3

    times = iter([0.0, 1.0, 1.0, 2.0, 2.0])
    result = asyncio.run(drive([client], ["a"], 2, clock=lambda: next(times)))
    assert result == Throughput(2, 6, 2.0, result.own_cpu)


def test_incomplete_replies_are_errors() -> None:
    event = b'data: {"index":1}\n\n'
    assert Generation(2).count(Reply(200, event * 2)) == 2
    with pytest.raises(LoadTestError, match="after 1 tokens"):
        Generation(2).count(Reply(200, event + b'data: {"error":"gone"}\n\n'))
    with pytest.raises(LoadTestError, match="429"):
        Generation(0).count(Reply(429, b"{}"))
    assert Classification().count(Reply(200, b"[]")) == 1
    with pytest.raises(LoadTestError, match=r"503 .*later"):
        Classification().count(Reply(503, b"later"))


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
                return await connection.send(Classification().request("Fine."))
            finally:
                connection.close()

        assert asyncio.run(classify()).status == 200
    with (
        pytest.raises(LoadTestError, match=r"has no maskdial\.json"),
        running_server({"m": tmp_path}),
    ):
        pass
