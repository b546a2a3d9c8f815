"""create_app: the server as an ASGI application, with its engines' life."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Route

import maskdial
from maskdial.api import (
    bodies,
    classify,
    embed,
    fill_mask,
    generate,
    generate_bodies,
    models,
    question_answering,
    rerank,
    score,
    service,
    token_classify,
    tokenize,
    zero_shot,
)
from maskdial.api.schema import TaskBody
from maskdial.config import Config
from maskdial.errors import BundleError, MaskdialError, NotFoundError
from maskdial.http.guard import Endpoint, RequestMiddleware
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.replies import error_reply, json_reply
from maskdial.metrics import Metrics
from maskdial.models.bundle import Bundle, load_bundles
from maskdial.models.loading import start_model
from maskdial.models.registry import Models, find_bundles

_log = logging.getLogger("maskdial")

_TASK_ROUTERS = (
    fill_mask.router,
    classify.router,
    token_classify.router,
    question_answering.router,
    zero_shot.router,
    rerank.router,
    embed.router,
    generate.router,
    score.router,
    tokenize.router,
)
_TASK_ENDPOINTS: dict[str, Endpoint] = {
    route.path: route.endpoint
    for router in _TASK_ROUTERS
    for route in router.routes
    if isinstance(route, Route)
}
_TASK_ROUTES = (*_TASK_ENDPOINTS, "/models/{name}")


def create_app(
    config: Config, on_load_failure: Callable[[MaskdialError], None] | None = None
) -> FastAPI:
    """The application.

    The models load beside the first requests: ``/health/live`` answers at once, ``/health/ready``
    when the last one is up. ``on_load_failure`` is called if one cannot be served.
    """
    app = FastAPI(
        title="maskdial",
        version=maskdial.__version__,
        summary="Masked and causal language models, one server.",
        lifespan=_lifespan,
    )
    app.state.config = config
    app.state.lifecycle = Lifecycle()
    app.state.metrics = Metrics(_TASK_ROUTES)
    app.state.models = Models()
    app.state.on_load_failure = on_load_failure
    for router in (*_TASK_ROUTERS, models.router, service.router):
        app.include_router(router)
    app.add_middleware(
        RequestMiddleware,
        metrics=app.state.metrics,
        lifecycle=app.state.lifecycle,
        endpoints=_TASK_ENDPOINTS,
        max_body_bytes=config.max_body_bytes,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    loading = asyncio.create_task(_load_models(app))
    try:
        yield
    finally:
        loading.cancel()
        await asyncio.wait({loading})
        # Requests were waited for before this point: what still runs is past its grace period.
        await asyncio.gather(*(asyncio.to_thread(model.stop) for model in app.state.models))


async def _load_models(app: FastAPI) -> None:
    config: Config = app.state.config
    served: Models = app.state.models
    try:
        bundles = await asyncio.to_thread(_read_bundles, config)
        start = partial(start_model, config=config, metrics=app.state.metrics)
        for bundle in bundles:
            model = await asyncio.to_thread(start, bundle, alone=len(bundles) == 1)
            served.add(model)
            await model.engine.warm_up()
    except MaskdialError as error:
        _log.error("%s", error.message)
        _load_failed(app, error)
        return
    except Exception as error:
        # Without this the server would stay in its loading phase for ever.
        _log.exception("loading the models failed")
        _load_failed(app, BundleError(f"loading the models failed: {error!r}"))
        return
    app.state.lifecycle.serve()
    _log.info("ready: %s", ", ".join(model.bundle.label for model in served))


def _read_bundles(config: Config) -> list[Bundle]:
    folders = find_bundles(config)
    return [bundle for name, path in folders.items() for bundle in load_bundles(name, path)]


def _load_failed(app: FastAPI, error: MaskdialError) -> None:
    if app.state.on_load_failure is not None:
        app.state.on_load_failure(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Routing errors (no such path, wrong method) in the API's own form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_reply(NotFoundError(f"no route {request.url.path}; see /docs"))
    content = {"error": str(error.detail), "error_type": "validation"}
    return json_reply(content, status=error.status_code, headers=dict(error.headers or {}))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the schemas of the bodies that the routes read by hand."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        wanted = [
            value
            for value in (*vars(bodies).values(), *vars(generate_bodies).values())
            if isinstance(value, type) and issubclass(value, TaskBody) and value is not TaskBody
        ]
        _, definitions = models_json_schema(
            [(body, "validation") for body in wanted], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
