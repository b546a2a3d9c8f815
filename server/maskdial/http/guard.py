"""Guard: what happens around every request, as plain ASGI, so that disconnects pass through."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskdial.errors import InternalError, MaskdialError, TooLargeError, UnavailableError
from maskdial.http.disconnect import ClientGoneError
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.http.replies import error_reply
from maskdial.metrics import Metrics

_log = logging.getLogger("maskdial.requests")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorReply = Callable[[MaskdialError], Response]


class TaskRoute(APIRoute):
    """A route that a model answers: POST, with a JSON body that the endpoint parses itself.

    The guard calls its endpoint directly, which takes about a fifth of FastAPI's time, unless the
    route has dependencies, which FastAPI then resolves.

    Args:
        path: as FastAPI writes it.
        endpoint: takes the request.
        body: the schema of the body, for the OpenAPI document.
        error_reply: how the route's dialect writes errors.
        options: FastAPI's own: tags, summary, description, dependencies.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        body: type[BaseModel] | None = None,
        error_reply: ErrorReply = error_reply,
        **options: Any,
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"], openapi_extra=_describe(body), **options)
        self.body = body
        self.error_reply = error_reply
        self.has_dependencies = bool(self.dependant.dependencies)


def _describe(body: type[BaseModel] | None) -> dict[str, Any] | None:
    """What OpenAPI says of a body that is parsed by hand; the schema itself is added later."""
    if body is None:
        return None
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


class Guard:
    """Identifies, times, counts and limits each request, and turns errors into replies.

    Task routes are refused with 503 while the server loads or drains; all others always answer.

    Args:
        app: answers the requests to other routes, and to those with dependencies.
        routes: the application's routing table; read once, so it must be complete.
        metrics: counts the requests to task routes.
        lifecycle: says whether they are accepted.
        max_body_bytes: maximum size of their bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Iterable[BaseRoute],
        metrics: Metrics,
        lifecycle: Lifecycle,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._max_body_bytes = max_body_bytes
        self._routes = [route for route in routes if isinstance(route, TaskRoute)]
        # A dictionary of the paths without parameters is faster than matching route after route.
        self._by_path: Mapping[str, TaskRoute] = {
            route.path: route for route in self._routes if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._find(scope) if scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, self._with_request_id(scope, send))
            return
        exchange = _Exchange(scope, receive, send, self._max_body_bytes, route.error_reply)
        self._lifecycle.begin_request()
        try:
            await self._serve(route, exchange, scope)
        finally:
            self._lifecycle.end_request()
            lease = scope["state"].pop("lease", None)
            if lease is not None:
                lease.release()
            model = scope["state"].get("model", "")
            path = route.path_format
            self._metrics.requests.labels(path, model, exchange.outcome).inc()
            self._metrics.request_duration.labels(path, model).observe(exchange.elapsed())

    async def _serve(self, route: TaskRoute, exchange: "_Exchange", scope: Scope) -> None:
        try:
            self._lifecycle.check_accepting()
            if route.has_dependencies:
                await self._app(scope, exchange.receive, exchange.send)
            else:
                response = await route.endpoint(Request(scope, exchange.receive))
                await response(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if self._lifecycle.phase is not Phase.DRAINING:
                raise
            # The grace period is over, and the client has still not sent all of its body.
            await exchange.fail(
                UnavailableError("the server is shutting down; try another instance")
            )
        except ClientGoneError:
            _log.debug("the client of request %s has left", exchange.request_id)
            exchange.outcome = "cancelled"
        except MaskdialError as error:
            await exchange.fail(error)
        except HTTPException:
            raise  # of a dependency; the application has its handler
        except Exception:
            _log.exception("request %s failed", exchange.request_id)
            await exchange.fail(
                InternalError(
                    f"internal error; search the server log for request {exchange.request_id}"
                )
            )
        else:
            exchange.outcome = scope["state"].get("outcome", exchange.outcome)

    def _find(self, scope: Scope) -> TaskRoute | None:
        """The task route of a request; its path parameters are put into the scope."""
        if not scope.get("root_path"):
            route = self._by_path.get(scope["path"])
            if route is not None:
                return route
        for route in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                return route
        return None

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

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        error_reply: ErrorReply,
    ) -> None:
        self.request_id = _request_id(scope)
        self.outcome = "ok"
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._error_reply = error_reply
        self._body_bytes = 0
        self._body_ended = False
        self._started = False
        self._start_time = time.perf_counter()
        scope.setdefault("state", {})
        declared = Headers(scope=scope).get("content-length", "")
        self._declared_bytes = int(declared) if declared.isdigit() else 0

    def elapsed(self) -> float:
        """Seconds since the request's headers arrived."""
        return time.perf_counter() - self._start_time

    async def receive(self) -> Message:
        """The next part of the body, as long as the body is not too large.

        Raises:
            ClientGoneError: the client left before it had sent all of it.
        """
        if self._declared_bytes > self._max_body_bytes:
            raise self._too_large()
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._body_ended:
            raise ClientGoneError
        self._body_ended = not message.get("more_body", False)
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > self._max_body_bytes:
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """Passes the reply on, with its headers completed."""
        if message["type"] == "http.response.start":
            self._started = True
            if message["status"] >= 400 and self.outcome == "ok":
                self.outcome = _outcome(message["status"])
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["x-total-time"] = f"{self.elapsed() * 1e3:.3f}"
        await self._send(message)

    async def fail(self, error: MaskdialError) -> None:
        """Replies with an error, unless the reply has begun."""
        self.outcome = error.error_type
        if self._started:
            return
        reply = self._error_reply(error)
        if isinstance(error, TooLargeError | UnavailableError):
            # The rest of the body is not read, so the connection cannot carry another request.
            reply.headers["connection"] = "close"
        await reply(self._scope, self._receive, self.send)

    def _too_large(self) -> TooLargeError:
        size = max(self._declared_bytes, self._body_bytes)
        return TooLargeError(
            f"the body has {size:,} bytes or more; this server accepts at most "
            f"{self._max_body_bytes:,} (--max-body-bytes)"
        )


def _outcome(status: int) -> str:
    """The outcome of a reply that is an error but was not raised as one of ours."""
    return "internal" if status >= 500 else "not_found" if status == 404 else "validation"


def _request_id(scope: Scope) -> str:
    """The client's own request id if it is a plain one, otherwise a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
