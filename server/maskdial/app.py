"""create_app: the server as an ASGI application, with its engines' life."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

import maskdial
from maskdial import dialects
from maskdial.ask import catalogue
from maskdial.batches import messages as message_batches
from maskdial.batches import routes as batches
from maskdial.batches.service import BatchService
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.config import Config
from maskdial.engine.thread import in_thread
from maskdial.errors import BundleError, MaskdialError, NotFoundError, explain_exhaustion, shortened
from maskdial.http.context import ServerContext
from maskdial.http.guard import Guard
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.openapi import document
from maskdial.http.replies import error_reply, json_reply
from maskdial.http.shared import SharedWork
from maskdial.http.tracing import Tracing
from maskdial.http.watchdog import Watchdog
from maskdial.metrics import Metrics
from maskdial.policy.guard import Policies
from maskdial.receipts.signing import read_signing_key
from maskdial.registry.catalog import find_bundles
from maskdial.registry.loading import start_models
from maskdial.registry.registry import Models
from maskdial.registry.served import ServedModel
from maskdial.responses_store import ResponseStore

_METRICS_SECONDS = 1.0  # so old may a page of metrics be
_DISK_PATIENCE = 10.0  # seconds, until it is known which prefixes the disk has
_DISK_GRACE = 10.0  # seconds, to write what waits

_log = logging.getLogger("maskdial")


def create_app(
    config: Config, on_load_failure: Callable[[MaskdialError], None] | None = None
) -> FastAPI:
    """The application.

    Models load while it already answers: ``/health/live`` at once, ``/health/ready`` when all that
    are configured by name are up. ``on_load_failure`` is called if one of them cannot be served.
    """
    app = FastAPI(
        title="maskdial",
        version=maskdial.__version__,
        summary="Masked and causal language models, one server.",
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from another host
        redoc_url=None,
        # Of newer versions: `Tracing` writes the spans, and asking each time whether there is
        # anything to write takes longer than finding the route.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.router.routes.extend((*dialects.ROUTES, *batches.ROUTES, *message_batches.ROUTES))
    metrics = Metrics()
    disk = None
    if config.prefix_cache_dir is not None:
        disk = DiskStore(config.prefix_cache_dir, config.prefix_cache_disk_bytes, metrics.disk)

    def start(name: str, path: Path) -> tuple[ServedModel, ...]:
        alone = models.num_bases == 1
        return start_models(name, path, config, metrics, alone=alone, disk=disk)

    models = Models(catalogue.LISTED, config, metrics, start)
    watchdog = Watchdog(lambda: (model.engine for model in models), config)
    page = SharedWork(metrics.render, _METRICS_SECONDS)
    tracing = None if config.otlp_endpoint is None else Tracing.to(config.otlp_endpoint)
    responses = None
    if config.responses_store is not None:
        responses = ResponseStore(
            config.responses_store, config.responses_max_age, config.responses_max_bytes
        )
    keys, policies = Keys(config), None
    if config.policy is not None:
        policies = Policies(config.policy, models, config, metrics, lambda: keys.names)
    app.state.context = context = ServerContext(
        config,
        models,
        metrics,
        Lifecycle(),
        keys,
        page,
        watchdog,
        tracing,
        responses,
        disk,
        policies,
        None if config.receipt_key is None else read_signing_key(config.receipt_key),
    )
    app.state.on_load_failure = on_load_failure
    app.state.batches = None if config.batch_dir is None else BatchService(app, config.batch_dir)
    app.add_middleware(
        Guard,
        routes=app.routes,
        config=config,
        metrics=metrics,
        lifecycle=context.lifecycle,
        keys=context.keys,
        error_replies=dialects.ERROR_REPLIES,
        tracing=tracing,
        receipt_key=context.receipt_key,
    )
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServerContext = app.state.context
    if context.disk is not None:
        context.disk.start()
    loading = asyncio.create_task(_load_models(context, app.state.on_load_failure))
    context.watchdog.start()
    service: BatchService | None = app.state.batches
    if service is not None:
        service.start()
    try:
        yield
    finally:
        if service is not None:
            await service.stop()
        await context.watchdog.stop()
        loading.cancel()
        await asyncio.wait({loading})
        # Running requests have had their grace period by now.
        await context.models.close()
        if context.disk is not None:
            await in_thread(partial(context.disk.close, _DISK_GRACE))
        if context.responses is not None:
            await context.responses.close()
        if context.tracing is not None:
            await in_thread(context.tracing.close)


async def _load_models(
    context: ServerContext, on_failure: Callable[[MaskdialError], None] | None
) -> None:
    try:
        with explain_exhaustion():
            catalog = await in_thread(partial(find_bundles, context.config))
            await context.models.open(catalog)
            if context.policies is not None:
                context.policies.check()
            if context.disk is not None:  # or the first prompts would be read for nothing
                await in_thread(partial(context.disk.wait_until_open, _DISK_PATIENCE))
    except Exception as error:
        # Every failure is reported, or the server would be in its loading phase forever.
        if isinstance(error, MaskdialError):
            failure = error
            # The registry has told of a model that cannot be loaded.
            if all(entry.failure is not error for entry in context.models.entries):
                _log.error("%s", error.message)
        else:
            failure = BundleError(f"loading the models failed: {error!r}")
            _log.exception("loading the models failed")
        if on_failure is not None:
            on_failure(failure)
        return
    context.lifecycle.serve()
    labels = [model.bundle.label for model in context.models]
    _log.info("ready: %s", ", ".join(labels) or "models are loaded when they are asked for")


async def _http_error(request: Request, error: Exception) -> Response:
    """Routing errors (no such path, wrong method) in the form of the API that was meant."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"no route {shortened(request.url.path)}; see /docs"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        taken = _methods(request)
        headers["Allow"] = ", ".join(taken)
        message = f"this route takes {' and '.join(taken)}, not {shortened(request.method)}"
    for prefix, http_error_reply in dialects.ROUTING_ERRORS:
        if request.url.path.startswith(prefix):
            return http_error_reply(error.status_code, message, headers)
    if error.status_code == 404:
        return error_reply(NotFoundError(message))
    content = {"error": message, "error_type": "validation"}
    return json_reply(content, status=error.status_code, headers=headers)


def _methods(request: Request) -> list[str]:
    """The methods of all routes with a request's path; Starlette's own error names the first's."""
    matching = (
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    )
    return sorted({method for route in matching for method in route.methods or ()} - {"HEAD"})


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = document(app)
    return app.openapi_schema
