"""Replica: a server without a listener, as Ray Serve runs it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayError
from starlette.types import ASGIApp

from maskdial.app import create_app
from maskdial.config import load_config
from maskdial.dialects.native.service import is_ready
from maskdial.errors import MaskdialError
from maskdial.http.context import ServerContext
from maskdial.http.lifecycle import Phase
from maskdial.ray.board import board_of
from maskdial.runtime.memory import freeze_heap, map_large_blocks

_log = logging.getLogger("maskdial")

_POLL_SECONDS = 0.05
_POST_SECONDS = 2.0


class Replica:
    """One replica, in an actor of its own. Ray sends it requests once its models are loaded.

    Args:
        settings: those of the server; ``host`` and ``port`` mean nothing here.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        map_large_blocks()
        config = load_config(settings)
        _log.setLevel(config.log_level.upper())
        for handler in logging.getLogger("ray.serve").handlers:
            _log.addHandler(handler)  # the replica's file, whose lines have the request's id
        self._failure: MaskdialError | None = None
        # The cluster's proxies listen, so it is for more than its own machine.
        self._app = create_app(config.model_copy(update={"host": "0.0.0.0"}), self._load_failed)
        self._context: ServerContext = self._app.state.context
        self._server_lifespan = self._app.router.lifespan_context
        self._app.router.lifespan_context = self._lifespan
        self._app.router.routes[:] = [
            APIRoute(route.path, self._metrics, summary=route.summary, tags=route.tags)
            if isinstance(route, APIRoute) and route.path == "/metrics"
            else route
            for route in self._app.router.routes
        ]
        replica = serve.get_replica_context()
        self._name, self._application = replica.replica_tag, replica.app_name

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Ray Serve hands its requests to."""
        return self._app

    async def check_health(self) -> None:
        """Called every few seconds; Ray replaces a replica that fails three times.

        Raises:
            RuntimeError: an engine died.
        """
        if not is_ready(self._context):
            raise RuntimeError("an engine is down; the replica's log says why")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Begins when the models are loaded. When it ends, Ray has drained the replica already."""
        async with self._server_lifespan(app):
            while self._context.lifecycle.phase is Phase.LOADING:
                if self._failure is not None:
                    raise RuntimeError(self._failure.message)
                await asyncio.sleep(_POLL_SECONDS)
            freeze_heap()
            posting = asyncio.create_task(self._post_metrics())
            yield
            posting.cancel()
            await asyncio.wait({posting})
            await self._context.lifecycle.drain(0)
            with contextlib.suppress(RayError):
                await board_of(self._application).withdraw.remote(self._name)

    async def _post_metrics(self) -> None:
        while True:
            try:
                metrics = list(self._context.metrics.registry.collect())
                await board_of(self._application).post.remote(self._name, metrics)
            except RayError:
                _log.exception("the metrics could not be posted; the next attempt follows")
            await asyncio.sleep(_POST_SECONDS)

    async def _metrics(self, request: Request) -> Response:
        """The metrics of all replicas in Prometheus' text format, with a label ``replica``."""
        text = await board_of(self._application).render.remote()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _load_failed(self, error: MaskdialError) -> None:
        self._failure = error
