"""`GET /v1/models` and `/v1/models/{id}`, and which model a body of the OpenAI dialect means."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from maskdial.dialects.openai_errors import error_reply
from maskdial.errors import NotFoundError, ValidationError
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.models.registry import ServedModel

_STARTED = int(time.time())  # bundles have no date of their own


async def list_models(request: Request) -> Response:
    """The names of the served models. A model that is served under both masks is listed once."""
    named: dict[str, ServedModel] = {}
    for model in server_context(request).models:
        named.setdefault(model.name, model)
    return json_reply({"object": "list", "data": [_describe(model) for model in named.values()]})


async def retrieve_model(request: Request) -> Response:
    """One served model."""
    try:
        models = server_context(request).models.named(request.path_params["name"])
    except NotFoundError as error:
        return error_reply(error)
    return json_reply(_describe(models[0]))


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "maskdial",
        "max_model_len": model.max_length,
    }


@contextlib.contextmanager
def about_model() -> Iterator[None]:
    """Has a ValidationError about the choice of a model name the field."""
    try:
        yield
    except ValidationError as error:
        raise ValidationError(error.message, field="model") from error


ROUTES = (
    APIRoute("/v1/models", list_models, methods=["GET"], tags=["openai"]),
    APIRoute("/v1/models/{name:path}", retrieve_model, methods=["GET"], tags=["openai"]),
)
