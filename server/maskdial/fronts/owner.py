"""Owner: what answers the requests of one front end, in the process with the engines."""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.types import ASGIApp, Message

from maskdial.engine.timing import Deadline
from maskdial.errors import MaskdialError
from maskdial.fronts.inputs import Asked, results_reply
from maskdial.fronts.link import Kind, Link
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.route import Endpoint
from maskdial.masked.model import MaskedModel
from maskdial.metrics import Metrics
from maskdial.registry.choice import ModelChoice

_log = logging.getLogger("maskdial.fronts")


class _Forwarded:
    """A request that came through a front end, as an ASGI application sees it.

    Args:
        number: of the request among those of its front end.
        link: to the front end.
        body: its first part.
        more: whether more of it follows.
    """

    def __init__(self, number: int, link: Link, body: bytes, more: bool) -> None:
        self._number = number
        self._link = link
        self._parts: list[Message] = []
        self._needs = False
        self._is_gone = False
        self._arrived = asyncio.Event()
        self._writable: asyncio.Event | None = None
        self.has_begun = self.has_ended = False
        if body or not more:
            self.take_body(body, more)

    def take_body(self, body: bytes, more: bool) -> None:
        """Takes a part of the body."""
        self._parts.append({"type": "http.request", "body": body, "more_body": more})
        self._needs = False
        self._arrived.set()

    def leave(self) -> None:
        """The client has left."""
        self._is_gone = True
        self._arrived.set()
        self.resume()

    def pause(self) -> None:
        """The client is slower than its reply."""
        if not self._is_gone:
            self._writable = asyncio.Event()

    def resume(self) -> None:
        """The client has caught up."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def receive(self) -> Message:
        """As in ASGI."""
        while not self._parts and not (self._is_gone or self.has_ended):
            if not self._needs:
                self._needs = True
                self._link.send(Kind.NEED, self._number)
            self._arrived.clear()
            await self._arrived.wait()
        return self._parts.pop(0) if self._parts else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """As in ASGI. Waits for a client that is slow."""
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            self._link.send(Kind.START, self._number, message["status"], headers)
            return
        more = message.get("more_body", False)
        self._link.send(Kind.PART, self._number, message.get("body", b""), more)
        if not more:
            self.has_ended = True
            self._arrived.set()
        elif self._writable is not None:
            await self._writable.wait()
        await self._link.drained()


class Owner:
    """Answers a front end's requests, and counts its connections.

    Args:
        app: the application.
        metrics: have the number of connections.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.link = Link(self._take, self._lose)
        self._app = app
        self._metrics = metrics
        self._requests: dict[int, _Forwarded] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_connections = 0
        self.lost = asyncio.Event()
        """Set when the front end is gone."""

    def stop(self) -> None:
        """Has the front end take no further connections, and end."""
        self.link.send(Kind.STOP, 0)

    def reload(self) -> None:
        """Has the front end read its certificate again."""
        self.link.send(Kind.RELOAD, 0)

    def _take(self, kind: int, number: int, rest: tuple[Any, ...]) -> None:
        if kind == Kind.REQUEST:
            head, body, more, asked = rest
            request = self._requests[number] = _Forwarded(number, self.link, body, more)
            answering = self._answer(number, head, request, asked)
            task = asyncio.get_running_loop().create_task(answering)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        if kind == Kind.COUNTS:
            self._count(*rest)
            return
        known = self._requests.get(number)
        if known is None:  # it has its reply
            return
        if kind == Kind.BODY:
            known.take_body(*rest)
        elif kind == Kind.GONE:
            known.leave()
        elif kind == Kind.PAUSE:
            known.pause()
        elif kind == Kind.RESUME:
            known.resume()

    def _lose(self) -> None:
        for request in self._requests.values():
            request.leave()
        self._count(0, {})
        self.lost.set()

    async def _answer(
        self,
        number: int,
        head: tuple[Any, ...],
        request: _Forwarded,
        asked: tuple[Any, ...] | None,
    ) -> None:
        scope = _scope_of(head)
        if asked is not None:
            scope["state"]["around"] = partial(_answer_asked, Asked.unpacked(asked))
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:
            _log.exception("a request failed outside of the guard")
        finally:
            del self._requests[number]
            if not request.has_ended:
                self.link.send(Kind.BROKEN, number)

    def _count(self, num_connections: int, ended: dict[str, int]) -> None:
        self._metrics.connections.inc(num_connections - self._num_connections)
        self._num_connections = num_connections
        for reason, number in ended.items():
            self._metrics.connections_ended.labels(reason).inc(number)


async def _answer_asked(asked: Asked, endpoint: Endpoint, request: Request) -> Response:
    """Answers a request whose texts a front end has read: with the results of passes.

    If it has read them by another bundle than the one that is served, the route's ``endpoint``
    reads them.
    """
    server, state = server_context(request), request.state
    deadline = Deadline(None, server.config)
    lease = model = None
    with contextlib.suppress(MaskdialError):  # the route knows the sentence that fits its body
        lease = state.lease = server.models.try_lease(ModelChoice(asked.model, "full"))
        for each in () if lease is None else lease.models:
            if isinstance(each, MaskedModel) and each.bundle.sha256 == asked.sha256:
                model = each
    if model is None or model.adapter is not None:
        if lease is not None:  # on another version, or a model that the body does not mean
            state.lease = None
            lease.release()
        return await endpoint(request)
    state.model = model.name
    model.metrics.tokenization_duration.observe(asked.seconds)
    with deadline.explained():
        work = model.engine.submit_many(asked.inputs, deadline.remaining())
        return results_reply(await unless_gone(request, work))


def _scope_of(head: tuple[Any, ...]) -> dict[str, Any]:
    method, path, raw_path, query, headers, client, server, scheme, version, root_path = head
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method,
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        "client": client,
        "server": server,
        "scheme": scheme,
        "root_path": root_path,
        "state": {},
    }
