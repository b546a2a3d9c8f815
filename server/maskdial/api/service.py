"""The service routes: what is served, how it is, and the metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import maskdial
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.http.replies import json_reply
from maskdial.models.registry import CausalModel, Models, ServedModel
from maskdial.runtime.providers import find_provider

router = APIRouter(tags=["service"])


def describe_model(model: ServedModel) -> dict[str, Any]:
    """A served model as `/models` lists it."""
    manifest = model.bundle.manifest
    return {
        "name": model.bundle.name,
        "family": manifest.family,
        "tasks": list(model.tasks),
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        # Measured at export, on the CPU.
        "batch_invariant": manifest.batch_invariant
        and find_provider(model.provider).batch_invariant,
        "max_length": (model.max_length if isinstance(model, CausalModel) else manifest.max_length),
        "labels": list(manifest.labels),
        "provider": model.provider,
        "ready": model.engine.ready,
    }


@router.get("/models", summary="The served models")
async def list_models(request: Request) -> Response:
    """Name, family, tasks, precision, lengths and provider of each model.

    A model that is served under both masks has an entry for each, with the same name.
    """
    models: Models = request.app.state.models
    return json_reply([describe_model(model) for model in models])


@router.get("/info", summary="The server")
async def info(request: Request) -> Response:
    """The server's version, phase, limits and models."""
    models: Models = request.app.state.models
    config = request.app.state.config
    lifecycle: Lifecycle = request.app.state.lifecycle
    causal_slots = (model.slots for model in models if isinstance(model, CausalModel))
    return json_reply(
        {
            "name": "maskdial",
            "version": maskdial.__version__,
            "phase": lifecycle.phase.value,
            "limits": {
                "max_batch_inputs": config.max_batch_inputs,
                "max_batch_tokens": config.max_batch_tokens,
                "max_body_bytes": config.max_body_bytes,
                "max_queue": config.max_queue,
                "slots": max(causal_slots, default=0),
            },
            "models": [describe_model(model) for model in models],
        }
    )


@router.get("/health/live", summary="Whether the process answers")
async def live() -> Response:
    """200 as long as the process answers."""
    return json_reply({"status": "live"})


@router.get("/health", include_in_schema=False)
@router.get("/health/ready", summary="Whether requests are taken")
async def ready(request: Request) -> Response:
    """200 when every engine ran a pass; 503 while loading, draining, or after a failure."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    models: Models = request.app.state.models
    if lifecycle.phase is not Phase.SERVING:
        return json_reply({"status": lifecycle.phase.value}, status=503)
    down = [model.bundle.label for model in models if not model.engine.ready]
    if down:
        return json_reply({"status": "engine down", "models": down}, status=503)
    return json_reply({"status": "ready"})


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)
