"""A front end and its owner, over a link: what is held for slow clients, and replies that break."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskdial.config import Config
from maskdial.fronts import owner as owner_module
from maskdial.fronts.forward import Forward
from maskdial.fronts.inputs import RESULTS, Asked
from maskdial.fronts.link import Link
from maskdial.fronts.owner import Owner, _answer_asked
from maskdial.fronts.reader import Ask, UnreadError
from maskdial.metrics import Metrics

SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/x",
    "raw_path": b"/x",
    "query_string": b"",
    "root_path": "",
    "headers": [],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


@contextlib.asynccontextmanager
async def _linked(app: ASGIApp) -> AsyncIterator[tuple[Forward, Owner]]:
    """A front end, linked to the owner of an application."""
    loop = asyncio.get_running_loop()
    owner, forward = Owner(app, Metrics()), Forward()
    is_lost = asyncio.Event()

    def lose() -> None:
        forward.lose()
        is_lost.set()

    forward.link = link = Link(forward.take, lose)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    await loop.create_connection(lambda: owner.link, sock=ours)
    await loop.create_connection(lambda: link, sock=theirs)
    try:
        yield forward, owner
    finally:
        owner.link.close()
        await owner.lost.wait()
        await is_lost.wait()
        await asyncio.sleep(0)  # in which the transports close


class Client:
    """A client with a whole body, that takes its reply when it may."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.has_some = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.gone = asyncio.Event()
        self._sent = False

    async def receive(self) -> Message:
        if self._sent:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self._sent = True
        return {"type": "http.request", "body": b"body", "more_body": False}

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.messages.append(message)
        self.has_some.set()


def _run(test: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(timed())


async def _start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})


def test_a_slow_client_has_its_reply_held_up() -> None:
    part, count = bytes(10_000), 200
    num_sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await _start(send)
        for number in range(count):
            body = part + b"%d" % number
            await send({"type": "http.response.body", "body": body, "more_body": True})
            num_sent += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def test() -> None:
        async with _linked(app) as (forward, _):
            client = Client()
            client.may_read.clear()
            answering = asyncio.ensure_future(forward(SCOPE, client.receive, client.send))
            before = -1
            while num_sent != before or not before:  # until it waits
                before = num_sent
                await asyncio.sleep(0.1)
            assert num_sent < count
            client.may_read.set()
            await answering
            assert num_sent == count
            body = b"".join(each["body"] for each in client.messages[1:])
            assert body == b"".join(part + b"%d" % number for number in range(count))

    _run(test)


def test_a_client_that_leaves_is_told_to_the_application() -> None:
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _start(send)
        seen.extend([await receive(), await receive()])

    async def test() -> None:
        async with _linked(app) as (forward, _):
            client = Client()
            answering = asyncio.ensure_future(forward(SCOPE, client.receive, client.send))
            await client.has_some.wait()
            client.gone.set()
            await answering
            assert [each["type"] for each in seen] == ["http.request", "http.disconnect"]
            assert seen[0]["body"] == b"body"

    _run(test)


def test_a_reply_breaks_off_where_the_application_fails() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _start(send)
        raise RuntimeError

    async def test() -> None:
        async with _linked(app) as (forward, _):
            client = Client()
            await forward(SCOPE, client.receive, client.send)
            assert [each["type"] for each in client.messages] == ["http.response.start"]

    _run(test)


class AskingReader:
    """Asks the owner once for each request."""

    def reads(self, scope: Scope, body: bytes) -> bool:
        return True

    async def answer(self, scope: Scope, body: bytes, ask: Ask) -> Response:
        await ask(Asked("m", "", 0.0, []))
        return Response("done")


def test_results_that_break_off_are_no_begun_reply() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if "around" not in scope["state"]:  # it is not read by the front end
            await _start(send)
            await send({"type": "http.response.body", "body": b""})
            return
        headers = [(b"content-type", RESULTS)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"[", "more_body": True})
        raise RuntimeError

    async def test() -> None:
        async with _linked(app) as (forward, _):
            forward.reader = AskingReader()  # type: ignore[assignment]
            statuses = []
            for _ in range(2):
                client = Client()
                await forward(SCOPE, client.receive, client.send)
                statuses.append(client.messages[0]["status"])
            assert statuses == [200, 503]

    _run(test)


def test_a_model_that_was_not_asked_for_is_not_kept_for_the_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The front end has read by another version, or the only model of its time for the task."""
    released: list[bool] = []
    lease = SimpleNamespace(models=(), release=lambda: released.append(True))
    context = SimpleNamespace(
        config=Config(), models=SimpleNamespace(try_lease=lambda choice: lease)
    )
    monkeypatch.setattr(owner_module, "server_context", lambda request: context)

    async def endpoint(request: Request) -> Response:
        assert released
        return Response(str(request.state.lease))

    async def test() -> None:
        request = Request({**SCOPE, "state": {}})
        reply = await _answer_asked(Asked("m", "", 0.0, []), endpoint, request)
        assert reply.body == b"None"

    _run(test)


def test_nothing_is_read_for_keys_that_the_owner_has_not_taken() -> None:
    """Nor after it has refused them, or their client for its limits."""
    statuses = iter([401, 401, 200, 200, 429, 200, 200])
    read: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": next(statuses), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    class Noting:
        """A reader that leaves to the owner what it has read."""

        def reads(self, scope: Scope, body: bytes) -> bool:
            return bool(scope["path"] == "/x")

        async def answer(self, scope: Scope, body: bytes, ask: Ask) -> Response:
            read.append(dict(scope["headers"])[b"x-api-key"])
            raise UnreadError

    async def test() -> None:
        async with _linked(app) as (forward, _):
            forward.reader = Noting()  # type: ignore[assignment]

            async def post(key: bytes, **changes: Any) -> list[bytes]:
                client, count = Client(), len(read)
                scope = {**SCOPE, "headers": [(b"x-api-key", key)], **changes}
                await forward(scope, client.receive, client.send)
                return read[count:]

            assert await post(b"wrong") == []
            assert await post(b"wrong") == []
            assert await post(b"good") == []
            assert await post(b"other", path="/open") == []  # which says nothing of its key
            assert await post(b"good") == [b"good"]  # and is refused: it sends too many
            assert await post(b"good") == []
            assert await post(b"good") == [b"good"]

    _run(test)


def test_without_its_owner_a_front_end_refuses() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        async with _linked(app) as (forward, owner):
            waiting, late = Client(), Client()
            answering = asyncio.ensure_future(forward(SCOPE, waiting.receive, waiting.send))
            await asyncio.sleep(0.1)
            owner.link.close()
            await answering
            await forward(SCOPE, late.receive, late.send)
            for client in (waiting, late):
                assert client.messages[0]["status"] == 503
                assert b"the server has stopped" in client.messages[1]["body"]

    _run(test)
