"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from typing import Annotated

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from maskdial.bounds import Size
from maskdial.dialects.body import read_body
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import OpenAIError
from maskdial.errors import NotFoundError, ValidationError
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.route import TaskRoute

_Name = Annotated[str, Size(1, 256, "characters")]


class LoadAdapterBody(Lenient):
    """A low-rank adapter to load."""

    lora_name: _Name = Field(description="What requests call it.")
    lora_path: Annotated[str, Size(1, 4096, "characters")] = Field(
        description="Its bundle folder in --model-dir, as maskdial export-adapter writes it."
    )
    base_model_name: _Name | None = Field(
        None, description="The model to load it for. Default: the one that it was made for."
    )
    load_inplace: bool = Field(
        False, description="Whether it may replace an adapter of that name, which is loaded."
    )


class UnloadAdapterBody(Lenient):
    """A low-rank adapter to unload."""

    habits = frozenset({"lora_int_id"})

    lora_name: _Name = Field(description="Its name.")


async def load_lora_adapter(request: Request) -> Response:
    """Loads a low-rank adapter, which requests then name as their model; it stops no request."""
    body = await read_body(LoadAdapterBody, await request.body())
    models, name = server_context(request).models, body.lora_name
    if name in models.adapters and not body.load_inplace:
        raise ValidationError(
            f"adapter {name!r} is loaded already; to replace it, set load_inplace",
            field="lora_name",
        )
    loading = models.load_adapter(name, body.lora_path, body.base_model_name)
    await unless_gone(request, loading)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Unloads a low-rank adapter, and replies when it has finished its requests."""
    body = await read_body(UnloadAdapterBody, await request.body())
    models, name = server_context(request).models, body.lora_name
    if name not in models.adapters:
        raise NotFoundError(f"no adapter {name!r} here")
    await unless_gone(request, models.unload(name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


ROUTES = tuple(
    TaskRoute(
        path,
        endpoint,
        body=body,
        reply=str,
        media_type="text/plain",
        error=OpenAIError,
        error_reply=FORM.reply,
        invalid_status=400,
        tags=["openai"],
        admin=True,
    )
    for path, endpoint, body in (
        ("/v1/load_lora_adapter", load_lora_adapter, LoadAdapterBody),
        ("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterBody),
    )
)
