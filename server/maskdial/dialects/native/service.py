"""The service routes: what is served, how it is doing, and the metrics."""

from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import maskdial
from maskdial.bundle.manifest import CHAT_TEMPLATE, Manifest
from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.dialects.native.replies import Health, ModelDescription, ServerInfo
from maskdial.engine.model import max_length, max_source_length
from maskdial.http.context import ServerContext, server_context
from maskdial.http.lifecycle import Phase
from maskdial.http.replies import json_reply
from maskdial.http.route import Route
from maskdial.masked.model import MaskedModel
from maskdial.registry.entry import Entry
from maskdial.registry.registry import Models
from maskdial.registry.served import ServedModel

_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("mask", "family", "architecture", "precision", "provider", "kernels"), ""),
    **dict.fromkeys(("numerics", "bundle", "kv_cache_dtype"), ""),
    "tasks": [],
    "labels": [],
    "card": [],
    **dict.fromkeys(("batch_invariant", "chat", "ready"), False),
    "max_length": 0,
    "generation_defaults": {},
}


async def list_models(request: Request) -> Response:
    """Name, state, family, tasks, precision, lengths and provider of each model, loaded or not.

    A model that is served under both masks has an item for each, with the same name.
    """
    server = server_context(request)
    await server.models.refresh()
    return json_reply(_describe_all(server))


async def info(request: Request) -> Response:
    """The server's version, phase, limits and models."""
    server = server_context(request)
    config, models = server.config, server.models
    budgets = (m.engine.max_batch_tokens for m in models if isinstance(m, MaskedModel))
    slots = (model.slots for model in models if isinstance(model, CausalModel))
    return json_reply(
        {
            "name": "maskdial",
            "version": maskdial.__version__,
            "phase": server.lifecycle.phase.value,
            "limits": {
                "max_batch_inputs": config.max_batch_inputs,
                "max_batch_tokens": max(budgets, default=0),
                "max_body_bytes": config.max_body_bytes,
                "max_queue": config.max_queue,
                "slots": max(slots, default=0),
            },
            "models": _describe_all(server),
            "policies": server.policy_names,
            **_describe_disk(server),
        }
    )


async def live(request: Request) -> Response:
    """200 as long as the process answers and makes progress; 503 if it should be restarted."""
    stalled = server_context(request).watchdog.stalled
    if stalled:
        return json_reply({"status": "stalled", "error": stalled}, status=503)
    return json_reply({"status": "live"})


async def ready(request: Request) -> Response:
    """200 while the server takes requests; 503 while it starts or drains, or if the engines of all
    loaded models are down. Models that are not loaded do not count.
    """
    server = server_context(request)
    if server.lifecycle.phase is not Phase.SERVING:
        return json_reply({"status": server.lifecycle.phase.value}, status=503)
    if not is_ready(server):
        down = [model.bundle.label for model in server.models]
        return json_reply({"status": "engine down", "models": down}, status=503)
    return json_reply({"status": "ready"})


def is_ready(server: ServerContext) -> bool:
    """Whether the server takes requests, and a model runs if any is loaded."""
    if server.lifecycle.phase is not Phase.SERVING:
        return False
    engines = [model.engine for model in server.models]
    return not engines or any(engine.ready for engine in engines)


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    content = await server_context(request).metrics_page.result()
    return Response(content, media_type=CONTENT_TYPE_LATEST)


def _describe_disk(server: ServerContext) -> dict[str, Any]:
    """The prefix cache on disk, if there is one."""
    disk = server.disk
    if disk is None:
        return {}
    tiers = [
        {"model": model.bundle.name, **asdict(model.engine.prefix_disk.report)}
        for model in server.models
        if isinstance(model, CausalModel) and model.engine.prefix_disk is not None
    ]
    return {
        "prefix_disk": {
            "problem": disk.problem,
            "bytes": disk.num_bytes,
            "max_bytes": disk.max_bytes,
            "blocks": disk.num_blocks,
            "models": tiers,
        }
    }


def _describe_all(server: ServerContext) -> list[dict[str, Any]]:
    return [
        description
        for entry in server.models.entries
        for description in _describe(entry, server.models, server.config)
    ]


def _describe(entry: Entry, models: Models, config: Config) -> list[dict[str, Any]]:
    """A name as `/models` lists it: an item for each mask, or one if its bundle is unreadable.

    What is not known before a model is loaded is empty or 0.
    """
    common = {"name": entry.name, "state": entry.state, "reason": entry.reason}
    if not entry.manifests:
        return [common | _UNKNOWN]
    return [
        common
        | _UNKNOWN
        | {
            "mask": manifest.mask,
            "family": manifest.family,
            "tasks": list(models.tasks_of(manifest)),
            "architecture": manifest.architecture,
            "precision": manifest.precision,
            "batch_invariant": manifest.batch_invariant,
            "max_length": max_length(manifest, config),
            **_source_length(manifest, config),
            "labels": list(manifest.labels),
            "chat": CHAT_TEMPLATE in manifest.files,
        }
        | ({} if model is None else _describe_loaded(model))
        for manifest, model in zip_longest(entry.manifests, entry.models)
    ]


def _source_length(manifest: Manifest, config: Config) -> dict[str, int]:
    """How long source texts may be, for models with an encoder."""
    length = max_source_length(manifest, config)
    return {} if length is None else {"max_source_length": length}


def _describe_loaded(model: ServedModel) -> dict[str, Any]:
    causal: dict[str, Any] = {}
    if isinstance(model, CausalModel):
        causal = {
            "generation_defaults": model.defaults,
            "kv_cache_dtype": model.kv_cache_dtype,
        }
    return causal | {
        "batch_invariant": model.batch_invariant,
        "max_length": model.max_length,
        "provider": model.provider,
        "kernels": model.kernels,
        "numerics": model.numerics,
        "bundle": model.bundle.sha256,
        "card": [each.model_dump(exclude_none=True) for each in model.bundle.card.measured],
        "ready": model.engine.ready,
    }


ROUTES = tuple(
    Route(path, endpoint, methods=["GET"], tags=["service"], summary=summary, **described)
    for path, endpoint, summary, described in (
        ("/models", list_models, "The served models", {"reply": list[ModelDescription]}),
        ("/info", info, "The server", {"reply": ServerInfo}),
        ("/health/live", live, "Liveness", {"reply": Health, "reply_statuses": (503,)}),
        ("/health/ready", ready, "Readiness", {"reply": Health, "reply_statuses": (503,)}),
        ("/health", ready, None, {"include_in_schema": False}),
        ("/ping", ready, None, {"include_in_schema": False}),
        ("/metrics", metrics, "Prometheus metrics", {"media_type": CONTENT_TYPE_LATEST}),
    )
)
