"""Middleware: what happens around every request, as plain ASGI so that disconnects pass through."""

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskdial.errors import InferenceError, MaskdialError, TooLargeError, UnavailableError
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.replies import ClientGoneError, error_reply
from maskdial.metrics import Metrics

_log = logging.getLogger("maskdial.requests")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Endpoint = Callable[[Request], Awaitable[Response]]


class RequestMiddleware:
    """Names, times, counts and bounds each request, and turns errors into replies.

    Task routes (those that a model serves) get 503 while the server is loading or draining; the
    service routes always answer. Endpoints of task routes are called from here: FastAPI's way to
    them adds nothing, and takes a quarter of the event loop's time for a short text.

    Args:
        app: what answers all other requests.
        endpoints: of the task routes, by path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        endpoints: Mapping[str, Endpoint],
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._endpoints = endpoints
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._route(scope["path"])
        if scope["method"] != "POST" or route is None:
            await self._app(scope, receive, self._with_request_id(scope, send))
            return
        exchange = _Exchange(scope, receive, send, self._max_body_bytes)
        self._lifecycle.begin_request()
        try:
            await self._serve(exchange, scope)
        finally:
            self._lifecycle.end_request()
            model = scope["state"].get("model", "")
            self._metrics.requests.labels(route, model, exchange.outcome).inc()
            self._metrics.request_duration.labels(route, model).observe(exchange.elapsed())

    async def _serve(self, exchange: "_Exchange", scope: Scope) -> None:
        try:
            self._lifecycle.check_accepting()
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is None:
                await self._app(scope, exchange.receive, exchange.send)
            else:
                response = await endpoint(Request(scope, exchange.receive))
                await response(scope, exchange.receive, exchange.send)
        except ClientGoneError:
            exchange.outcome = "cancelled"
        except MaskdialError as error:
            await exchange.fail(error)
        except Exception:
            _log.exception("request %s failed", exchange.request_id)
            await exchange.fail(
                InferenceError(
                    f"the server failed on this request; its log names it {exchange.request_id}"
                )
            )
        else:
            exchange.outcome = scope["state"].get("outcome", "ok")

    def _route(self, path: str) -> str | None:
        """The task route of a path, from a closed set, or None for a service route."""
        if path in self._endpoints:
            return path
        return "/models/{name}" if path.startswith("/models/") else None

    @staticmethod
    def _with_request_id(scope: Scope, send: Send) -> Send:
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return send_with_id


class _Exchange:
    """One request and its reply on the wire."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.request_id = _request_id(scope)
        self.outcome = "ok"
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._body_bytes = 0
        self._started = False
        self._start_time = time.perf_counter()
        scope.setdefault("state", {})
        declared = Headers(scope=scope).get("content-length", "")
        self._declared_bytes = int(declared) if declared.isdigit() else 0

    def elapsed(self) -> float:
        """Seconds since the request's headers came."""
        return time.perf_counter() - self._start_time

    async def receive(self) -> Message:
        """The next piece of the body, as long as the body is not too large."""
        if self._declared_bytes > self._max_body_bytes:
            raise self._too_large()
        message = await self._receive()
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > self._max_body_bytes:
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """Passes the reply on, its headers completed."""
        if message["type"] == "http.response.start":
            self._started = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["x-total-time"] = f"{self.elapsed() * 1e3:.3f}"
        await self._send(message)

    async def fail(self, error: MaskdialError) -> None:
        """Replies with an error; after the first byte nothing can be said any more."""
        self.outcome = error.error_type
        if self._started:
            return
        reply = error_reply(error)
        if isinstance(error, TooLargeError | UnavailableError):
            # The rest of the body is not read, so the connection cannot carry another request.
            reply.headers["connection"] = "close"
        await reply(self._scope, self._receive, self.send)

    def _too_large(self) -> TooLargeError:
        size = max(self._declared_bytes, self._body_bytes)
        return TooLargeError(
            f"the body has {size:,} bytes or more; this server takes at most "
            f"{self._max_body_bytes:,} (--max-body-bytes)"
        )


def _request_id(scope: Scope) -> str:
    """The client's own request id where it is a plain one, a new one otherwise."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
