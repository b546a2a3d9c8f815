"""KServe's and Triton's `/v2`: health, metadata, and the model repository."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from pydantic import Field
from typing_extensions import TypedDict

import maskdial
from maskdial.dialects.body import Wire, read_body
from maskdial.dialects.kserve.answers import Signature, signature
from maskdial.dialects.native.service import is_ready
from maskdial.errors import MaskdialError, NotFoundError, shortened
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import error_reply, json_reply
from maskdial.http.route import Route, TaskRoute
from maskdial.metrics import ModelState
from maskdial.registry.choice import ModelChoice
from maskdial.registry.entry import Entry

VERSION = "1"
"""Of every model: a name serves one version at a time."""

VERSION_PATHS = ("/versions/{version}", "")
"""How paths name it, or do not."""

_STATES: Mapping[ModelState, str] = {
    "unloaded": "UNAVAILABLE",
    "loading": "LOADING",
    "ready": "READY",
    "draining": "UNLOADING",
    "failed": "UNAVAILABLE",
}


class RepositoryIndexBody(Wire):
    """Whether to list all models, or those that are loaded."""

    ready: bool | None = Field(None, description="Only those that are ready. Default: all.")


class LoadParameters(Wire):
    """Parameters of a load: none of Triton's."""


class RepositoryLoadBody(Wire):
    """The parameters of a load."""

    parameters: LoadParameters | None = None


class UnloadParameters(Wire):
    """What an unload may say of models that depend on this one."""

    unload_dependents: bool | None = Field(None, description="No model depends on another.")


class RepositoryUnloadBody(Wire):
    """The parameters of an unload."""

    parameters: UnloadParameters | None = None


class ServerMetadata(TypedDict):
    """The server's name, version and extensions of the protocol."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(TypedDict):
    """Whether the process answers at all."""

    live: bool


class ServerReady(TypedDict):
    """Whether all models are loaded and requests are taken."""

    ready: bool


class ModelReady(ServerReady):
    """Whether a model takes requests."""

    name: str


class Tensor(TypedDict):
    """An input or an output."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model's name and platform, and the tensors that it takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class RepositoryModel(TypedDict):
    """A model of the repository."""

    name: str
    version: str
    state: str
    reason: str


class Nothing(TypedDict):
    """An empty object."""


async def server_metadata() -> Response:
    """The server's name, version and extensions."""
    return json_reply(
        {
            "name": "maskdial",
            "version": maskdial.__version__,
            "extensions": [
                "binary_tensor_data",
                "model_configuration",
                "statistics",
                "model_repository",
                "model_repository(unload_dependents)",
            ],
        }
    )


async def live() -> Response:
    """200 as long as the process answers."""
    return json_reply({"live": True})


async def ready(request: Request) -> Response:
    """200 when the server takes requests and every loaded model runs, otherwise 503."""
    answer = is_ready(server_context(request))
    return json_reply({"ready": answer}, status=200 if answer else 503)


async def model_metadata(request: Request) -> Response:
    """A model's name, platform and version, and the tensors of its main task."""
    try:
        entry = entry_of(request)
    except MaskdialError as error:
        return error_reply(error)
    tensors, _ = tensors_of_main_task(request, entry)
    return json_reply(
        {
            "name": entry.name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [_described(*each) for each in tensors.inputs],
            "outputs": [_described(*each) for each in tensors.outputs],
        }
    )


async def model_ready(request: Request) -> Response:
    """200 when the model is loaded and runs, otherwise 503."""
    try:
        entry = entry_of(request)
    except MaskdialError as error:
        return error_reply(error)
    answer = entry.state == "ready"
    return json_reply({"name": entry.name, "ready": answer}, status=200 if answer else 503)


async def index(request: Request) -> Response:
    """The models that there are, loaded or not, with their state and why it is so."""
    content = await request.body()
    body = await read_body(RepositoryIndexBody, content) if content else RepositoryIndexBody()
    models = server_context(request).models
    await models.refresh()
    return json_reply(
        [
            {
                "name": entry.name,
                "version": VERSION,
                "state": _STATES[entry.state],
                "reason": entry.reason or ("unloaded" if entry.state == "unloaded" else ""),
            }
            for entry in models.entries
            if not body.ready or entry.state == "ready"
        ]
    )


async def load(request: Request) -> Response:
    """Loads a model, or a new version of it, and replies when that takes the requests."""
    return await _change(request, RepositoryLoadBody, server_context(request).models.load)


async def unload(request: Request) -> Response:
    """Unloads a model, and replies when it has finished its requests."""
    return await _change(request, RepositoryUnloadBody, server_context(request).models.unload)


async def _change(
    request: Request, body: type[Wire], change: Callable[[str], Coroutine[Any, Any, Entry]]
) -> Response:
    if content := await request.body():
        await read_body(body, content)
    await unless_gone(request, change(request.path_params["name"]))
    return json_reply({})


def _described(name: str, datatype: str) -> Tensor:
    return {"name": name, "datatype": datatype, "shape": [-1]}


def tensors_of_main_task(request: Request, entry: Entry) -> tuple[Signature, list[str]]:
    """The tensors of the first task that a model does, and all of its tasks."""
    models = server_context(request).models
    tasks = [task for each in entry.manifests for task in models.tasks_of(each)]
    return signature(tasks[0] if tasks else ""), tasks


def check_version(request: Request) -> None:
    """Refuses a path with a version that no model has.

    Raises:
        NotFoundError: it has one.
    """
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise NotFoundError(
            f"models have the version {VERSION} only, which is the current one, not "
            f"{shortened(version)!r}"
        )


def entry_of(request: Request) -> Entry:
    """The model that a path names.

    Raises:
        NotFoundError: there is none, or not in the version.
    """
    check_version(request)
    name = ModelChoice.of(request.path_params["name"]).name
    assert name is not None, "the path has one"
    return server_context(request).models.entry(name)


_MODEL = "/v2/repository/models/{name:path}"
ROUTES = (
    TaskRoute(
        "/v2/repository/index",
        index,
        body=RepositoryIndexBody,
        body_is_optional=True,
        reply=list[RepositoryModel],
        tags=["kserve"],
    ),
    *(
        TaskRoute(
            f"{_MODEL}/{verb}",
            endpoint,
            body=body,
            body_is_optional=True,
            reply=Nothing,
            tags=["kserve"],
            admin=True,
        )
        for verb, endpoint, body in (
            ("load", load, RepositoryLoadBody),
            ("unload", unload, RepositoryUnloadBody),
        )
    ),
    *(
        Route(path, endpoint, methods=["GET"], reply=reply, tags=["kserve"])
        for path, endpoint, reply in (
            ("/v2", server_metadata, ServerMetadata),
            ("/v2/health/live", live, ServerLive),
        )
    ),
    Route(
        "/v2/health/ready",
        ready,
        methods=["GET"],
        reply=ServerReady,
        reply_statuses=(503,),
        tags=["kserve"],
    ),
    *(
        Route(
            f"/v2/models/{{name:path}}{version}{last}",
            endpoint,
            methods=["GET"],
            reply=reply,
            statuses=(404, 422),
            reply_statuses=statuses,
            tags=["kserve"],
        )
        for version in VERSION_PATHS
        for last, endpoint, reply, statuses in (
            ("/ready", model_ready, ModelReady, (503,)),
            ("", model_metadata, ModelMetadata, ()),
        )
    ),
)
