"""Requests: what this process asks its own models, through the routes and without a socket."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import Message, Receive, Send

from maskdial import dialects
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import (
    InternalError,
    MaskdialError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from maskdial.http.context import ServerContext
from maskdial.http.in_process import Reply, headers_of, receiving, scope_of
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.http.receipting import Receipting
from maskdial.http.route import TaskRoute
from maskdial.http.sse import EVENTS

_log = logging.getLogger("maskdial.requests")
_IDS = random.Random()  # ids are no secrets
_MAX_OPEN = 64  # what several passes of short texts hold
_MAX_OPEN_BESIDE = 2  # one is prepared while another is computed
_QUIET_SECONDS = 0.25
_STREAMS_ONLY = "/generate_stream"
_LOOK_SECONDS = 0.05
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 15.0  # seconds before a line is asked again
_MAX_TRIES = 40  # of a line that is unavailable and its model is not: eight minutes


@dataclass(slots=True)
class BatchReply(Reply):
    """A reply to a line.

    ``model`` is the name of the one that was meant, empty if that is not known; ``outcome`` is
    ``ok``, or the type of the error. ``comes_later`` says that it is none yet: the server cannot
    answer now.
    """

    model: str = ""
    outcome: str = "ok"
    comes_later: bool = False


class Requests:
    """Asks the models of an application; use it in the application's event loop.

    There is no guard: no key is asked for, and no access log or count of requests applies.

    Args:
        app: the application.
        client: on whose behalf, as the engines' fairness has it.
        key: the name of its key, whose cached prefixes it may use.
        background: whether the engines answer these requests only while nothing else waits;
            otherwise this process waits for its turn, and no limit of clients applies.
    """

    def __init__(
        self, app: FastAPI, client: str = "local", key: str = "", *, background: bool = False
    ) -> None:
        context = app.state.context
        assert isinstance(context, ServerContext)
        self._app = app
        self.context = context
        self._client = client
        self._key = key
        self._background = background
        self._routes = {
            route.path: route
            for route in dialects.ROUTES
            if isinstance(route, TaskRoute) and not route.param_convertors and not route.admin
            if route.path != _STREAMS_ONLY
        }

    @property
    def task_paths(self) -> frozenset[str]:
        """The paths of requests that models answer."""
        return frozenset(self._routes)

    def streams(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether the reply to a body would be a stream, as Ollama's are unless it says no."""
        stream = body.get("stream")
        by_default = self._routes[path].stream_type != EVENTS.media_type
        return bool(stream) or (stream is None and by_default)

    async def post(self, path: str, body: bytes, *, receipt: bool = False) -> BatchReply:
        """The reply to a request with a JSON body, to one of the paths; a stream comes as a whole.

        Errors are replies in the form of the route's dialect. With ``receipt``, the headers of the
        others have one.
        """
        route = self._routes[path]
        request_id = f"{_IDS.getrandbits(128):032x}"
        scope = scope_of("POST", path)
        scope["app"] = self._app
        usage = ClientUsage(
            self._client, self._key, background=self._background, unlimited=not self._background
        )
        state: dict[str, Any] = {
            "client": self._client,
            "key": self._key,
            "request_id": request_id,
            "usage": usage,
        }
        scope["state"] = state
        reply, parts = BatchReply(), []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {"x-request-id": request_id} | headers_of(message)
            else:
                parts.append(message.get("body", b""))

        receive: Receive = receiving(body, asyncio.Event())  # the client never leaves
        sending: Send = send
        if receipt:
            receipting = Receipting(scope, receive, send, self.context.receipt_key)
            usage.provenance = receipting.provenance
            receive, sending = receipting.receive, receipting.send
        token = usage_of_request.set(usage)
        try:
            try:
                self.context.lifecycle.check_accepting()
                response = await route.endpoint(Request(scope, receive))
            except Exception as cause:
                error = cause if isinstance(cause, MaskdialError) else _internal(request_id)
                response, reply.outcome = route.error_reply(error), error.error_type
            await response(scope, receive, sending)
        finally:
            usage_of_request.reset(token)
            if (lease := state.pop("lease", None)) is not None:
                lease.release()
        reply.body, reply.model = b"".join(parts), state.get("model", "")
        reply.comes_later = reply.status == UnavailableError.status
        return reply


class Admission:
    """How many requests of all batches are open.

    The event loop has to read and to write each of them. So while other requests are open, and for
    a moment after them, there are few, and they begin one at a time, with other work of the event
    loop between them.

    Args:
        lifecycle: knows of the other requests.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self._num_open = 0

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Waits until one more may be open, which it is within the block."""
        async with self._turn:
            await asyncio.sleep(0)
            while self._num_open >= self._limit:
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._left.wait()
            self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._left.set()

    @property
    def _limit(self) -> int:
        return _MAX_OPEN if self._lifecycle.idle_seconds > _QUIET_SECONDS else _MAX_OPEN_BESIDE


class BackgroundRequests(Requests):
    """Requests of a batch, for which the engines have what is left.

    One that has to make way, or finds no room, is asked again, after pauses that grow. So is one
    that is unavailable although its model is not, such as one whose template ends its process; in
    the end, that is its answer.

    Args:
        app: the application.
        owner: the name of the key that the batch belongs to; empty without keys.
        admission: of all batches.
    """

    def __init__(self, app: FastAPI, owner: str, admission: Admission) -> None:
        # No name of a key and no address has a space.
        super().__init__(app, f"batch {owner}", owner, background=True)
        self._admission = admission

    async def post(self, path: str, body: bytes, *, receipt: bool = False) -> BatchReply:
        num_tries, pause = 0, _FIRST_PAUSE
        while True:
            async with self._admission.admitted():
                reply = await super().post(path, body, receipt=receipt)
            num_tries += 1
            if reply.comes_later:
                if not self._is_up(reply.model):
                    return reply
                if num_tries == _MAX_TRIES:
                    reply.comes_later = False
                    break
            elif reply.status != OverloadedError.status:
                break
            await _pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self.context.metrics.count_batch_request(reply.model, reply.outcome)
        return reply

    def _is_up(self, model: str) -> bool:
        """Whether a model answers others."""
        if self.context.lifecycle.phase is not Phase.SERVING or not model:
            return False
        try:
            return self.context.models.entry(model).state == "ready"
        except NotFoundError:
            return False


_pause = asyncio.sleep


def _internal(request_id: str) -> InternalError:
    """What a reply says of an exception that is being handled."""
    _log.exception("request %s of a batch failed", request_id)
    return InternalError(f"internal error; search the server log for request {request_id}")
