"""Guard: what happens around every request, as plain ASGI, so that disconnects pass through."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from maskdial.config import Config
from maskdial.errors import InternalError, MaskdialError, UnavailableError, exhaustion
from maskdial.http.access_log import log_access
from maskdial.http.disconnect import ClientGoneError
from maskdial.http.exchange import ErrorReply, Exchange, route_path
from maskdial.http.keys import Keys, address_of
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.http.limits import ClientLimits
from maskdial.http.local_only import LocalOnly
from maskdial.http.receipting import Receipting, wants_receipt
from maskdial.http.replies import error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.tracing import Tracing
from maskdial.http.transcript import Transcript
from maskdial.metrics import Metrics
from maskdial.receipts.signing import SigningKey

_log = logging.getLogger("maskdial.requests")


class Guard:
    """Identifies, admits, times, counts and limits each request, and turns errors into replies.

    Task routes are refused with 503 while the server loads or drains; all others always answer. The
    request's ``state`` gets ``key``: the name of its key, empty if it needs none; and ``client``:
    that name, or its address without one.

    Args:
        app: answers the requests to other routes.
        routes: the application's routing table; read once, so it must be complete.
        config: has the limits of bodies, and who may use a server without keys.
        metrics: counts the requests to task routes.
        lifecycle: says whether they are accepted.
        keys: the clients of each route.
        error_replies: how errors are written on other routes, by prefix.
        tracing: makes spans of the requests to task routes, if it is on.
        receipt_key: signs receipts, if there is one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Iterable[BaseRoute],
        config: Config,
        metrics: Metrics,
        lifecycle: Lifecycle,
        keys: Keys,
        error_replies: Sequence[tuple[str, ErrorReply]] = (),
        tracing: Tracing | None = None,
        receipt_key: SigningKey | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._keys = keys
        self._local_only = LocalOnly.of(config)
        self._limits = ClientLimits(config)
        self._error_replies = error_replies
        self._tracing = tracing
        self._logs_texts = config.log_format == "json-texts"
        self._receipt_key = receipt_key
        routes = list(routes)
        self._routes = [route for route in routes if isinstance(route, TaskRoute)]
        # A dictionary of the paths without parameters is faster than matching route after route.
        self._by_path: Mapping[str, TaskRoute] = {
            route.path: route for route in self._routes if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answered as GET; the server itself leaves out the body.
            scope = {**scope, "method": "GET"}
        route = self._find(scope) if scope["method"] == "POST" else None
        exchange = Exchange(
            scope,
            receive,
            send,
            self._error_reply(scope) if route is None else route.error_reply,
            lifecycle=self._lifecycle,
            max_body_bytes=self._config.max_body_bytes,
            max_file_bytes=(
                self._config.batch_max_file_bytes
                if route is not None and route.takes_file
                else None
            ),
            body_timeout=self._config.body_timeout,
            transcript=Transcript() if route is not None and self._logs_texts else None,
        )
        key = None
        scope["state"]["client"] = address_of(scope)
        scope["state"]["request_id"] = exchange.request_id
        try:
            if self._local_only is not None:
                self._local_only.check(scope)
            key = self._keys.check(scope, route_path(scope))
            scope["state"]["key"] = key or ""
            if key is not None:
                scope["state"]["client"] = key
            if route is None:
                # No such route reads a body; those that wait for the client to leave expect a
                # message, not an error.
                with self._lifecycle.replying():
                    await self._app(scope, receive, exchange.send)
            elif self._tracing is None:
                await self._answer(route, exchange, scope, key)
            else:
                with self._tracing.span(route.path_format, exchange, scope):
                    await self._answer(route, exchange, scope, key)
        except asyncio.CancelledError:
            if not await self._tell_of_shutdown(exchange):
                raise
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            self._account(route, exchange, scope, key)

    async def _answer(
        self, route: TaskRoute, exchange: Exchange, scope: Scope, key: str | None
    ) -> None:
        self._lifecycle.begin_request()
        try:
            state = scope["state"]
            unlimited = state.get("unlimited", False)  # which no request from outside can set
            with self._limits.admit(state["client"], key or "", unlimited=unlimited) as usage:
                state["usage"] = usage
                await self._serve(route, exchange, scope)
        except asyncio.CancelledError:
            if not await self._tell_of_shutdown(exchange):
                raise
        except Exception as error:
            await self._fail(exchange, error)
        else:
            exchange.outcome = scope["state"].get("outcome", exchange.outcome)
        finally:
            self._lifecycle.end_request()
            lease = scope["state"].pop("lease", None)
            if lease is not None:
                lease.release()

    async def _serve(self, route: TaskRoute, exchange: Exchange, scope: Scope) -> None:
        self._lifecycle.check_accepting()
        if route.admin:
            self._keys.check_admin(scope)
        receive, send = exchange.receive, exchange.send
        if exchange.receipt and wants_receipt(exchange.receipt):
            state = scope["state"]
            receipting = Receipting(scope, receive, send, self._receipt_key, state.get("seed"))
            state["usage"].provenance = receipting.provenance
            receive, send = receipting.receive, receipting.send
        # What a front end has read of a request (`fronts`), which no client can set.
        around = scope["state"].get("around")
        endpoint = route.endpoint if around is None else partial(around, route.endpoint)
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)

    async def _tell_of_shutdown(self, exchange: Exchange) -> bool:
        """Answers a request whose task is cancelled at the end of the drain; False: it is not."""
        if self._lifecycle.phase is not Phase.DRAINING:
            return False
        await exchange.fail(UnavailableError("the server is shutting down; try another instance"))
        return True

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        """Answers a request that has failed."""
        if isinstance(error, ClientGoneError):
            _log.debug("the client of request %s has left", exchange.request_id)
            exchange.outcome = "cancelled"
        elif isinstance(error, MaskdialError):
            await exchange.fail(error)
        elif (refused := exhaustion(error)) is not None:
            _log.error("request %s failed: %s", exchange.request_id, refused)
            await exchange.fail(UnavailableError(f"{refused}; try again later"))
        else:
            _log.error("request %s failed", exchange.request_id, exc_info=error)
            await exchange.fail(
                InternalError(
                    f"internal error; search the server log for request {exchange.request_id}"
                )
            )

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

    def _error_reply(self, scope: Scope) -> ErrorReply:
        """How errors are written at a path without a task route."""
        path = route_path(scope)
        matching = (reply for prefix, reply in self._error_replies if path.startswith(prefix))
        return next(matching, error_reply)

    def _account(
        self, route: TaskRoute | None, exchange: Exchange, scope: Scope, key: str | None
    ) -> None:
        """Counts and logs a request that has ended."""
        matched = scope.get("route") if route is None else route
        path = matched.path_format if isinstance(matched, APIRoute) else None
        if route is not None:
            model = scope["state"].get("model", "")
            self._metrics.count_request(
                route.path_format, model, exchange.outcome, exchange.elapsed()
            )
        if key is not None and self._keys.counts:
            self._metrics.count_key(key, exchange.outcome)
        log_access(scope, exchange, path, key)
