"""`GET /v1/models` and `/v1/models/{id}`, and which model a body of the OpenAI dialect means."""

import time

from fastapi import Request, Response

from maskdial.config import Config
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import ModelReply, ModelsReply, OpenAIError
from maskdial.engine.model import max_length
from maskdial.errors import NotFoundError
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.http.route import Route
from maskdial.registry.choice import ModelChoice
from maskdial.registry.entry import Entry
from maskdial.registry.registry import Models

_STARTED = int(time.time())  # bundles have no date of their own


async def list_models(request: Request) -> Response:
    """The names of the models that requests may ask for, each once, loaded or not."""
    server = server_context(request)
    available = [entry for entry in server.models.entries if _is_available(entry, server.models)]
    data = [_describe(entry, server.config) for entry in available]
    return json_reply({"object": "list", "data": data})


async def retrieve_model(request: Request) -> Response:
    """`GET /v1/models/{id}`: one of these models."""
    server = server_context(request)
    try:
        name = ModelChoice.of(request.path_params["name"]).name
        assert name is not None, "the path has one"
        entry = server.models.entry(name)
    except NotFoundError as error:
        return FORM.reply(error)
    return json_reply(_describe(entry, server.config))


def _is_available(entry: Entry, models: Models) -> bool:
    """What is to be exported first has no manifests yet, and no failure."""
    return bool(entry.models or (models.autoloads and (entry.manifests or not entry.failure)))


def _describe(entry: Entry, config: Config) -> ModelReply:
    lengths = [model.max_length for model in entry.models] or [
        max_length(manifest, config) for manifest in entry.manifests
    ]
    model: ModelReply = {
        "id": entry.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "maskdial",
        "max_model_len": next(iter(lengths), 0),
    }
    if entry.base is not None:
        model["parent"] = entry.base.name
    return model


ROUTES = (
    Route(
        "/v1/models",
        list_models,
        methods=["GET"],
        reply=ModelsReply,
        error=OpenAIError,
        tags=["openai"],
    ),
    Route(
        "/v1/models/{name:path}",
        retrieve_model,
        methods=["GET"],
        reply=ModelReply,
        error=OpenAIError,
        statuses=(400, 404),
        tags=["openai"],
    ),
)
