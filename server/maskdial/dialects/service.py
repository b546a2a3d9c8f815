"""The service routes: what is served, how it is doing, and the metrics."""

from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST

import maskdial
from maskdial.http.context import server_context
from maskdial.http.lifecycle import Phase
from maskdial.http.replies import json_reply
from maskdial.models.registry import CausalModel, Models, ServedModel


async def list_models(request: Request) -> Response:
    """Name, family, tasks, precision, lengths and provider of each model.

    A model that is served under both masks has an entry for each, with the same name.
    """
    models = server_context(request).models
    return json_reply([_describe(model, models) for model in models])


async def info(request: Request) -> Response:
    """The server's version, phase, limits and models."""
    server = server_context(request)
    config, models = server.config, server.models
    slots = (model.slots for model in models if isinstance(model, CausalModel))
    return json_reply(
        {
            "name": "maskdial",
            "version": maskdial.__version__,
            "phase": server.lifecycle.phase.value,
            "limits": {
                "max_batch_inputs": config.max_batch_inputs,
                "max_batch_tokens": config.max_batch_tokens,
                "max_body_bytes": config.max_body_bytes,
                "max_queue": config.max_queue,
                "slots": max(slots, default=0),
            },
            "models": [_describe(model, models) for model in models],
        }
    )


async def live() -> Response:
    """200 as long as the process answers."""
    return json_reply({"status": "live"})


async def ready(request: Request) -> Response:
    """200 when every engine has run a pass; 503 while loading, draining, or after a failure."""
    server = server_context(request)
    if server.lifecycle.phase is not Phase.SERVING:
        return json_reply({"status": server.lifecycle.phase.value}, status=503)
    down = [model.bundle.label for model in server.models if not model.engine.ready]
    if down:
        return json_reply({"status": "engine down", "models": down}, status=503)
    return json_reply({"status": "ready"})


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(server_context(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _describe(model: ServedModel, models: Models) -> dict[str, Any]:
    """A served model as `/models` lists it."""
    manifest = model.manifest
    return {
        "name": model.name,
        "family": manifest.family,
        "tasks": list(models.tasks_of(model)),
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        "batch_invariant": model.batch_invariant,
        "max_length": model.max_length,
        "labels": list(manifest.labels),
        "provider": model.provider,
        "ready": model.engine.ready,
    }


ROUTES = tuple(
    APIRoute(path, endpoint, tags=["service"], summary=summary, include_in_schema=bool(summary))
    for path, endpoint, summary in (
        ("/models", list_models, "The served models"),
        ("/info", info, "The server"),
        ("/health/live", live, "Liveness"),
        ("/health/ready", ready, "Readiness"),
        ("/health", ready, None),
        ("/metrics", metrics, "Prometheus metrics"),
    )
)
