"""`POST /models/load` and `/models/unload`: models come and go while the server runs."""

import math
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from maskdial.bounds import Range, Size
from maskdial.dialects.body import Wire, read_body
from maskdial.dialects.native.replies import ModelChange
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import json_reply
from maskdial.http.route import TaskRoute
from maskdial.registry.entry import Entry

_Name = Annotated[str, Size(1, 256, "characters")]


def _seconds_or_off(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    # Of a union, an error would name the branch of pydantic's that it comes from.
    return math.inf if value == "off" else read(value)


_Seconds = Annotated[float, Range(0)]


class LoadBody(Wire):
    """A model or an adapter to load, or to replace by a new version."""

    model: _Name = Field(description="What requests call it.")
    path: Annotated[str, Size(1, 4096, "characters")] | None = Field(
        None,
        description="Its bundle folder in --model-dir. Default: where the server knows it to be.",
    )
    base: _Name | None = Field(
        None,
        description="Of an adapter, the model to load it for. Default: the one that it was made "
        "for, if the folder is an adapter's.",
    )
    keep_alive: (
        Annotated[
            _Seconds,
            WrapValidator(_seconds_or_off, json_schema_input_type=_Seconds | Literal["off"]),
        ]
        | None
    ) = Field(
        None,
        description="Seconds after which it is unloaded when nobody uses it; off: never. Default: "
        "as before, or --models-keep-alive.",
    )


class UnloadBody(Wire):
    """The name of a model whose memory is to be freed."""

    model: _Name = Field(description="Its name.")


async def load(request: Request) -> Response:
    """Loads a model, or a new version of it, and replies when that takes the requests.

    The version before finishes the requests that it has. A bundle that is loaded already and has
    not changed is left alone.
    """
    body = await read_body(LoadBody, await request.body())
    models = server_context(request).models
    loading = models.load(body.model, body.path, body.keep_alive, base=body.base)
    return _reply(await unless_gone(request, loading))


async def unload(request: Request) -> Response:
    """Unloads a model, and replies when it has finished its requests."""
    body = await read_body(UnloadBody, await request.body())
    models = server_context(request).models
    return _reply(await unless_gone(request, models.unload(body.model)))


def _reply(entry: Entry) -> Response:
    return json_reply({"model": entry.name, "state": entry.state, "reason": entry.reason})


ROUTES = tuple(
    TaskRoute(path, endpoint, body=body, reply=ModelChange, tags=["models"], admin=True)
    for path, endpoint, body in (
        ("/models/load", load, LoadBody),
        ("/models/unload", unload, UnloadBody),
    )
)
