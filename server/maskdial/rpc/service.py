"""InferenceService: KServe's remote procedure calls, as requests to routes of its dialect."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from maskdial.engine.offload import offload
from maskdial.rpc.asker import Asker, error_of, timeout
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError
from maskdial.rpc.infer import (
    HEADER_LENGTH,
    TEXT_OUTPUT,
    InferRequest,
    infer_response,
    mark,
    read_infer,
    text_response,
)
from maskdial.rpc.messages import DATA_TYPES, SERVICE, message, read

_SECONDS_PER_BYTE = 2e-7  # of a message of tiny tensors, the slowest to read

Unary = Callable[[bytes, Call], Awaitable[Any]]


class InferenceService:
    """``GRPCInferenceService``.

    Args:
        asker: asks the application.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    @property
    def methods(self) -> Mapping[str, Callable[[Call], Awaitable[None]]]:
        """What answers a call, by its path."""
        unary: dict[str, Unary] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
        }
        return {
            f"/{SERVICE}/ModelStreamInfer": self._model_stream_infer,
            **{f"/{SERVICE}/{name}": partial(_answer, each) for name, each in unary.items()},
        }

    async def _server_live(self, _: bytes, call: Call) -> Any:
        reply = await self._asker.get("/v2/health/live", call)
        return message("ServerLiveResponse")(live=reply.status == 200)

    async def _server_ready(self, _: bytes, call: Call) -> Any:
        reply = await self._asker.get("/v2/health/ready", call)
        return message("ServerReadyResponse")(ready=reply.status == 200)

    async def _model_ready(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelReadyRequest")
        reply = await self._asker.get(f"{_model_path(request.name, request.version)}/ready", call)
        if reply.status not in (200, 503):
            raise error_of(reply)
        return message("ModelReadyResponse")(ready=reply.status == 200)

    async def _server_metadata(self, _: bytes, call: Call) -> Any:
        return message("ServerMetadataResponse")(**await self._asker.get_json("/v2", call))

    async def _model_metadata(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelMetadataRequest")
        found = await self._metadata(request.name, request.version, call)
        return message("ModelMetadataResponse")(**found)

    async def _metadata(self, name: str, version: str, call: Call) -> dict[str, Any]:
        return await self._asker.get_json(_model_path(name, version), call)

    async def _model_config(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelConfigRequest")
        path = f"{_model_path(request.name, request.version)}/config"
        config = await self._asker.get_json(path, call)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
        return message("ModelConfigResponse")(config=config)

    async def _model_statistics(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelStatisticsRequest")
        path = _model_path(request.name, request.version) if request.name else "/v2/models"
        found = await self._asker.get_json(f"{path}/stats", call)
        for each in found["model_stats"]:
            del each["batch_stats"]  # which are not told
        return message("ModelStatisticsResponse")(**found)

    async def _model_infer(self, content: bytes, call: Call) -> Any:
        return await self._infer(await _read_infer(content, call), call)

    async def _infer(self, request: InferRequest, call: Call) -> Any:
        path = f"{_model_path(request.model, request.version)}/infer"
        length = (HEADER_LENGTH, str(request.header_length))
        reply = await self._asker.post(path, request.body, call, [length])
        return infer_response(reply)

    async def _model_stream_infer(self, call: Call) -> None:
        """Answers requests one after the other; an error ends its own answer only."""
        while (content := await call.read()) is not None:
            request_id = ""
            try:
                request = await _read_infer(content, call)
                request_id = request.id
                async for response in self._responses(request, call):
                    await _write(call, infer_response=response)
            except CallError as error:
                response = message("ModelInferResponse")(id=request_id)
                await _write(call, error_message=error.sentence, infer_response=response)

    async def _responses(self, request: InferRequest, call: Call) -> AsyncGenerator[Any]:
        """Of a model that writes, one response for each token of a single prompt."""
        metadata = await self._metadata(request.model, request.version, call)
        writes = TEXT_OUTPUT in {each["name"] for each in metadata["outputs"]}
        if request.prompt is None or not writes:
            response = await self._infer(request, call)
            mark(response, final=True)
            yield response
            return
        path = f"/v2/models/{request.model}/generate_stream"
        last = None
        async for event in self._asker.events(path, request.generate_body(timeout(call)), call):
            if last is not None:
                yield text_response(request.id, last, final=False)
            last = event
        if last is not None:
            yield text_response(request.id, last, final=True)


async def _answer(unary: Unary, call: Call) -> None:
    response = await unary(await call.read_only(), call)
    await call.write(response.SerializeToString())


async def _read_infer(content: bytes, call: Call) -> InferRequest:
    seconds = timeout(call)
    return await offload(lambda: read_infer(content, seconds), len(content) * _SECONDS_PER_BYTE)


async def _write(call: Call, **fields: Any) -> None:
    await call.write(message("ModelStreamInferResponse")(**fields).SerializeToString())


def _model_path(name: str, version: str) -> str:
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")
