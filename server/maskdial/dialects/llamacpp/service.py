"""What llama.cpp's, vLLM's and LM Studio's clients ask of a server: `/props`, `/slots`, `/version`,
`/api/v0/models`.
"""

from typing import Any, Literal, NotRequired

from fastapi import Request, Response
from typing_extensions import TypedDict

import maskdial
from maskdial.ask.catalogue import WRITE
from maskdial.causal.model import CausalModel
from maskdial.dialects.call import tell
from maskdial.engine.model import max_length
from maskdial.errors import MaskdialError, NotFoundError
from maskdial.http.context import ServerContext, server_context
from maskdial.http.replies import error_reply, json_reply
from maskdial.http.route import Route
from maskdial.registry.choice import ModelChoice
from maskdial.registry.entry import Entry
from maskdial.registry.served import ServedModel

_KINDS: dict[str, Literal["llm", "embeddings"]] = {"generate": "llm", "embed": "embeddings"}


class GenerationSettings(TypedDict):
    """How texts are generated where a request does not say."""

    n_ctx: int
    params: dict[str, Any]


class Props(TypedDict):
    """A model, as llama.cpp describes the one that it serves."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    """A place for a text in a model's cache."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class VersionReply(TypedDict):
    """The version of the server."""

    version: str


class StudioModel(TypedDict):
    """A model, as LM Studio lists it."""

    id: str
    object: Literal["model"]
    type: Literal["llm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: str
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    loaded_context_length: NotRequired[int]


class StudioModels(TypedDict):
    """The models in the form of LM Studio's list."""

    object: Literal["list"]
    data: list[StudioModel]


async def version(request: Request) -> Response:
    """The version of this server."""
    return json_reply({"version": maskdial.__version__})


async def props(request: Request) -> Response:
    """The model that generates, or the one that `?model=` names."""

    def describe(model: CausalModel) -> Props:
        special, defaults = model.manifest.special_tokens, model.defaults

        def spelled(token_id: int | None) -> str:
            return "" if token_id is None else model.tokenizer.id_to_token(token_id) or ""

        params = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
            "n_predict": defaults.max_new_tokens or -1,
        }
        return {
            "default_generation_settings": {"n_ctx": model.max_length, "params": params},
            "total_slots": model.slots,
            "model_alias": model.name,
            "model_path": model.name,
            "chat_template": model.chat_template.source or "",
            "bos_token": spelled(special.bos),
            "eos_token": spelled(next(iter(special.eos), None)),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"maskdial {maskdial.__version__}",
            "is_sleeping": False,
        }

    return await tell(request, WRITE, lambda model: describe(_causal(model)))


async def slots(request: Request) -> Response:
    """The slots of the model that generates, or of the one that `?model=` names."""

    def describe(model: CausalModel) -> list[Slot]:
        running = model.engine.num_running
        return [
            {
                "id": index,
                "n_ctx": model.max_length,
                "speculative": False,
                "is_processing": index < running,
            }
            for index in range(model.slots)
        ]

    return await tell(request, WRITE, lambda model: describe(_causal(model)))


def _causal(model: ServedModel) -> CausalModel:
    if not isinstance(model, CausalModel):
        raise NotFoundError(f"model {model.name!r} has no slots; it writes whole canvases")
    return model


async def list_models(request: Request) -> Response:
    """The models that write texts or embed them, as LM Studio lists them."""
    server = server_context(request)
    await server.models.refresh()
    found = (_studio_model(entry, server) for entry in server.models.entries)
    return json_reply({"object": "list", "data": [each for each in found if each is not None]})


async def retrieve_model(request: Request) -> Response:
    """`GET /api/v0/models/{name}`: one of these models."""
    server = server_context(request)
    try:
        name = ModelChoice.of(request.path_params["name"]).name
        assert name is not None, "the path has one"
        described = _studio_model(server.models.entry(name), server)
    except MaskdialError as error:
        return error_reply(error)
    if described is None:
        return error_reply(NotFoundError(f"model {name!r} writes no texts and embeds none"))
    return json_reply(described)


def _studio_model(entry: Entry, server: ServerContext) -> StudioModel | None:
    """A model; None for one that LM Studio would have no kind for."""
    manifest = next((each for each in entry.manifests if each.task in _KINDS), None)
    if manifest is None or not (entry.models or server.models.autoloads):
        return None
    loaded = next((each for each in entry.models if each.manifest.mask == manifest.mask), None)
    described: StudioModel = {
        "id": entry.name,
        "object": "model",
        "type": _KINDS[manifest.task],
        "publisher": "maskdial",
        "arch": manifest.architecture,
        "compatibility_type": "onnx",
        "quantization": manifest.precision,
        "state": "not-loaded" if loaded is None else "loaded",
        "max_context_length": max_length(manifest, server.config),
    }
    if loaded is not None:
        described["loaded_context_length"] = loaded.max_length
    return described


ROUTES = (
    *(
        Route(
            path,
            answer,
            methods=["GET"],
            reply=reply,
            statuses=(404, 422, 503, 504),
            queries=("model",),
            tags=["llama.cpp"],
        )
        for path, answer, reply in (("/props", props, Props), ("/slots", slots, list[Slot]))
    ),
    Route("/version", version, methods=["GET"], reply=VersionReply, tags=["service"]),
    Route("/api/v0/models", list_models, methods=["GET"], reply=StudioModels, tags=["lm studio"]),
    Route(
        "/api/v0/models/{name:path}",
        retrieve_model,
        methods=["GET"],
        reply=StudioModel,
        statuses=(404, 422),
        tags=["lm studio"],
    ),
)
