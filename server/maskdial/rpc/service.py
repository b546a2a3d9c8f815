"""InferenceService: remote procedure calls, as requests to the application.

Each call becomes a request to a route of KServe's dialect, so keys, limits, deadlines, drain,
metrics and errors are those of HTTP.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from maskdial.engine.offload import offload
from maskdial.errors import UnauthorizedError, shortened
from maskdial.http.in_process import InProcess, Reply, headers_of, scope_of
from maskdial.http.keys import Keys
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError
from maskdial.rpc.infer import (
    HEADER_LENGTH,
    TEXT_OUTPUT,
    InferRequest,
    infer_response,
    mark,
    read,
    read_infer,
    text_response,
)
from maskdial.rpc.messages import DATA_TYPES, SERVICE, message

_PASSED_ON = frozenset(
    {"authorization", "x-api-key", "x-policy", "x-request-id", "traceparent", "tracestate"}
)
_LONGEST_TIMEOUT = 86_400.0  # seconds
_SHORTEST_TIMEOUT = 0.001
_SECONDS_PER_BYTE = 2e-7  # of a message of tiny tensors, the slowest to read
_METADATA = "/v2"

Unary = Callable[[bytes, Call], Awaitable[Any]]


class InferenceService:
    """``GRPCInferenceService`` over an application.

    Args:
        application: answers the requests.
        keys: which are asked for before a message is taken.
    """

    def __init__(self, application: InProcess, keys: Keys) -> None:
        self._application = application
        self._keys = keys
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
        self._unary = {f"/{SERVICE}/{name}": answer for name, answer in unary.items()}

    async def check(self, call: Call) -> None:
        """Refuses a call without a key.

        Raises:
            CallError: it has none, or a wrong one.
        """
        try:
            self._keys.check(scope_of("POST", _METADATA, _headers(call)), _METADATA)
        except UnauthorizedError:  # which the application counts, logs and words
            raise _error(await self._get(_METADATA, call)) from None

    async def answer(self, call: Call) -> None:
        """Answers a call.

        Raises:
            CallError: it cannot be answered.
        """
        if call.path == f"/{SERVICE}/ModelStreamInfer":
            await self._model_stream_infer(call)
            return
        answer = self._unary.get(call.path)
        if answer is None:
            raise CallError(501, f"there is no method {shortened(call.path)}")
        content = await call.read()
        if content is None:
            raise CallError(400, "the call has no message")
        response = await answer(content, call)
        await call.write(response.SerializeToString())

    async def _server_live(self, _: bytes, call: Call) -> Any:
        reply = await self._get("/v2/health/live", call)
        return message("ServerLiveResponse")(live=reply.status == 200)

    async def _server_ready(self, _: bytes, call: Call) -> Any:
        reply = await self._get("/v2/health/ready", call)
        return message("ServerReadyResponse")(ready=reply.status == 200)

    async def _model_ready(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelReadyRequest")
        reply = await self._get(f"{_model_path(request.name, request.version)}/ready", call)
        if reply.status not in (200, 503):
            raise _error(reply)
        return message("ModelReadyResponse")(ready=reply.status == 200)

    async def _server_metadata(self, _: bytes, call: Call) -> Any:
        return message("ServerMetadataResponse")(**_json(await self._get(_METADATA, call)))

    async def _model_metadata(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelMetadataRequest")
        found = await self._metadata(request.name, request.version, call)
        return message("ModelMetadataResponse")(**found)

    async def _metadata(self, name: str, version: str, call: Call) -> dict[str, Any]:
        return _json(await self._get(_model_path(name, version), call))

    async def _model_config(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelConfigRequest")
        path = f"{_model_path(request.name, request.version)}/config"
        config = _json(await self._get(path, call))
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
        return message("ModelConfigResponse")(config=config)

    async def _model_statistics(self, content: bytes, call: Call) -> Any:
        request = read(content, "ModelStatisticsRequest")
        path = _model_path(request.name, request.version) if request.name else "/v2/models"
        found = _json(await self._get(f"{path}/stats", call))
        for each in found["model_stats"]:
            del each["batch_stats"]  # which are not told
        return message("ModelStatisticsResponse")(**found)

    async def _model_infer(self, content: bytes, call: Call) -> Any:
        return await self._infer(await _read_infer(content, call), call)

    async def _infer(self, request: InferRequest, call: Call) -> Any:
        path = f"{_model_path(request.model, request.version)}/infer"
        headers = [*_headers(call), (HEADER_LENGTH, str(request.header_length))]
        reply = await self._application.ask("POST", path, request.body, headers, call.client)
        if reply.status != 200:
            raise _error(reply)
        call.trailing = _trailing(reply.headers)
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
        async for event in self._events(path, request.generate_body(_timeout(call)), call):
            if last is not None:
                yield text_response(request.id, last, final=False)
            last = event
        if last is not None:
            yield text_response(request.id, last, final=True)

    async def _events(self, path: str, body: bytes, call: Call) -> AsyncGenerator[dict[str, Any]]:
        """The events of a reply as they come."""
        status, pending = 0, b""
        messages = self._application.stream("POST", path, body, _headers(call), call.client)
        try:
            async for each in messages:
                if each["type"] == "http.response.start":
                    status = each["status"]
                    call.trailing = _trailing(headers_of(each))
                    continue
                pending += each.get("body", b"")
                if status != 200:
                    continue
                *frames, pending = pending.split(b"\n\n")
                for frame in frames:
                    if frame.startswith(b"data: "):
                        event = json.loads(frame.removeprefix(b"data: "))
                        if "error" in event:
                            raise CallError(500, event["error"])
                        yield event
            if status != 200:
                raise _error(Reply(status, body=pending))
        finally:
            await messages.aclose()

    async def _get(self, path: str, call: Call) -> Reply:
        return await self._application.ask("GET", path, b"", _headers(call), call.client)


async def _read_infer(content: bytes, call: Call) -> InferRequest:
    timeout = _timeout(call)
    return await offload(lambda: read_infer(content, timeout), len(content) * _SECONDS_PER_BYTE)


async def _write(call: Call, **fields: Any) -> None:
    await call.write(message("ModelStreamInferResponse")(**fields).SerializeToString())


def _model_path(name: str, version: str) -> str:
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def _timeout(call: Call) -> float | None:
    """Seconds until the call's deadline; None: it has none."""
    remaining = call.time_remaining()
    if remaining is None:
        return None
    return min(max(remaining, _SHORTEST_TIMEOUT), _LONGEST_TIMEOUT)


def _headers(call: Call) -> list[tuple[str, str]]:
    """What a call's metadata says to HTTP."""
    return [(name, value) for name, value in call.headers if name in _PASSED_ON]


def _trailing(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers with a request's id and times, as metadata."""
    return [(name, value) for name, value in headers.items() if name.startswith("x-")]


def _json(reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        raise _error(reply)
    content: dict[str, Any] = json.loads(reply.body)
    return content


def _error(reply: Reply) -> CallError:
    try:
        return CallError(reply.status, str(json.loads(reply.body)["error"]))
    except (ValueError, KeyError, TypeError):
        return CallError(reply.status, f"the server answered with the status {reply.status}")
