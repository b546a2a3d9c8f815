"""InferenceService: remote procedure calls, as requests to the application.

Each call becomes a request to a route of KServe's dialect, so keys, limits, deadlines, drain,
metrics and errors are those of HTTP.
"""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc

from maskdial.http.in_process import InProcess, Reply, headers_of
from maskdial.rpc.messages import SERVICE, message

_HEADER_LENGTH = "inference-header-content-length"
_PASSED_ON = frozenset({"authorization", "x-api-key", "x-request-id", "traceparent", "tracestate"})
_LONGEST_TIMEOUT = 86_400.0  # seconds
_SHORTEST_TIMEOUT = 0.001
_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_ADDRESS = re.compile(r"ipv[46]:(.+):(\d+)")
_FINAL = "triton_final_response"
_TEXT_OUTPUT = "text_output"


class CallError(Exception):
    """A call that cannot be answered: the status and the sentence of its reply."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = _CODES.get(status, grpc.StatusCode.INTERNAL)
        self.sentence = sentence


class InferenceService:
    """``GRPCInferenceService`` over an application.

    Args:
        application: answers the requests.
    """

    def __init__(self, application: InProcess) -> None:
        self._application = application

    def handler(self) -> grpc.GenericRpcHandler:
        """Its calls, for a server of `grpc.aio`."""
        unary = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _told(answer),
                message(f"{name}Request").FromString,
                message(f"{name}Response").SerializeToString,
            )
            for name, answer in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            message("ModelInferRequest").FromString,
            message("ModelStreamInferResponse").SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _server_live(self, _: Any, context: Any) -> Any:
        reply = await self._get("/v2/health/live", context)
        return message("ServerLiveResponse")(live=reply.status == 200)

    async def _server_ready(self, _: Any, context: Any) -> Any:
        reply = await self._get("/v2/health/ready", context)
        return message("ServerReadyResponse")(ready=reply.status == 200)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        path = f"{_model_path(request.name, request.version)}/ready"
        reply = await self._get(path, context)
        if reply.status not in (200, 503):
            raise _error(reply.status, reply.body)
        return message("ModelReadyResponse")(ready=reply.status == 200)

    async def _server_metadata(self, _: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(**_json(await self._get("/v2", context)))

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        content = await self._metadata(request.name, request.version, context)
        return message("ModelMetadataResponse")(**content)

    async def _metadata(self, name: str, version: str, context: Any) -> dict[str, Any]:
        return _json(await self._get(_model_path(name, version), context))

    async def _model_infer(self, request: Any, context: Any) -> Any:
        path = f"{_model_path(request.model_name, request.model_version)}/infer"
        body, header_length = _infer_body(request, context)
        headers = [*_headers(context), (_HEADER_LENGTH, str(header_length))]
        reply = await self._application.ask("POST", path, body, headers, _client(context))
        if reply.status != 200:
            raise _error(reply.status, reply.body)
        context.set_trailing_metadata(_trailing(reply.headers))
        return _infer_response(reply)

    async def _model_stream_infer(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncGenerator[Any]:
        """Answers requests one after the other; an error ends its own answer only."""
        async for request in requests:
            try:
                async for response in self._responses(request, context):
                    yield message("ModelStreamInferResponse")(infer_response=response)
            except CallError as error:
                response = message("ModelInferResponse")(id=request.id)
                yield message("ModelStreamInferResponse")(
                    error_message=error.sentence, infer_response=response
                )

    async def _responses(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Of a model that writes, one response for each token of a single prompt."""
        metadata = await self._metadata(request.model_name, request.model_version, context)
        prompt = _only_prompt(request)
        writes = _TEXT_OUTPUT in {each["name"] for each in metadata["outputs"]}
        if prompt is None or not writes:
            response = await self._model_infer(request, context)
            _mark(response, final=True)
            yield response
            return
        content = {
            "text_input": prompt,
            "parameters": _parameters(request.parameters, _NOT_OF_GENERATE),
            "timeout": _timeout(context),
        }
        path = f"/v2/models/{request.model_name}/generate_stream"
        last = None
        async for event in self._events(path, content, context):
            if last is not None:
                yield _text_response(request, last, final=False)
            last = event
        if last is not None:
            yield _text_response(request, last, final=True)

    async def _events(
        self, path: str, content: object, context: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a reply as they come."""
        body = json.dumps(content).encode()
        status, pending = 0, b""
        messages = self._application.stream("POST", path, body, _headers(context), _client(context))
        try:
            async for each in messages:
                if each["type"] == "http.response.start":
                    status = each["status"]
                    context.set_trailing_metadata(_trailing(headers_of(each)))
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
                raise _error(status, pending)
        finally:
            await messages.aclose()

    async def _get(self, path: str, context: Any) -> Reply:
        return await self._application.ask(
            "GET", path, headers=_headers(context), client=_client(context)
        )


_NOT_OF_GENERATE = frozenset({"triton_enable_empty_final_response", "binary_data_output"})


def _told(answer: Any) -> Any:
    """A call whose errors have a status and a sentence."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await answer(request, context)
        except CallError as error:
            await context.abort(error.code, error.sentence)

    return call


def _model_path(name: str, version: str) -> str:
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def _infer_body(request: Any, context: Any) -> tuple[bytes, int]:
    """The body of `/infer` with binary tensors, and how many bytes of JSON it begins with."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise CallError(
            400,
            f"raw_input_contents has {len(raw)} tensors, and inputs has {len(request.inputs)}; "
            "give all tensors the same way",
        )
    if not raw:
        raw = [_in_bytes(each.contents.bytes_contents) for each in request.inputs]
    parameters = _parameters(request.parameters) | {"binary_data_output": True}
    content: dict[str, Any] = {
        "inputs": [
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": list(each.shape),
                "parameters": {"binary_data_size": len(data)},
            }
            for each, data in zip(request.inputs, raw, strict=True)
        ],
        "outputs": [
            {"name": each.name} | _given_parameters(each.parameters) for each in request.outputs
        ],
        "parameters": parameters,
    }
    if request.id:
        content["id"] = request.id
    if "timeout" not in parameters:
        content["timeout"] = _timeout(context)
    header = json.dumps(content).encode()
    return b"".join([header, *raw]), len(header)


def _given_parameters(entries: Iterable[Any]) -> dict[str, Any]:
    parameters = _parameters(entries)
    return {"parameters": parameters} if parameters else {}


def _in_bytes(texts: Iterable[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in texts)


def _parameters(entries: Iterable[Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        chosen = entry.value.WhichOneof("parameter_choice")
        if chosen is not None and entry.key not in without:
            found[entry.key] = getattr(entry.value, chosen)
    return found


def _infer_response(reply: Reply) -> Any:
    length = int(reply.headers[_HEADER_LENGTH])
    content = json.loads(reply.body[:length])
    raw = []
    for output in content["outputs"]:
        size = output.pop("parameters")["binary_data_size"]
        raw.append(reply.body[length : length + size])
        length += size
    return message("ModelInferResponse")(**content, raw_output_contents=raw)


def _text_response(request: Any, event: Mapping[str, Any], *, final: bool) -> Any:
    """What a token adds, as the output of a model."""
    response = message("ModelInferResponse")(
        model_name=event["model_name"], model_version=event["model_version"], id=request.id
    )
    response.outputs.add(name=_TEXT_OUTPUT, datatype="BYTES", shape=[1])
    response.raw_output_contents.append(_in_bytes([event[_TEXT_OUTPUT].encode()]))
    _mark(response, final=final)
    return response


def _mark(response: Any, *, final: bool) -> None:
    """Says whether it is a request's last response, as Triton does."""
    response.parameters.add(key=_FINAL).value.bool_param = final


def _only_prompt(request: Any) -> str | None:
    """The text of a request that has one input with one text."""
    if len(request.inputs) != 1 or request.inputs[0].datatype != "BYTES":
        return None
    raw = list(request.raw_input_contents) or [_in_bytes(request.inputs[0].contents.bytes_contents)]
    if any(size != 1 for size in request.inputs[0].shape) or len(raw) != 1:
        return None
    content = raw[0]
    if len(content) != 4 + int.from_bytes(content[:4], "little"):
        return None  # which `/infer` refuses, and says why
    try:
        return str(content[4:], "utf-8")
    except UnicodeDecodeError:
        return None


def _timeout(context: Any) -> float | None:
    """Seconds until the call's deadline; None: it has none."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return min(max(float(remaining), _SHORTEST_TIMEOUT), _LONGEST_TIMEOUT)


def _headers(context: Any) -> list[tuple[str, str]]:
    """What a call's metadata says to HTTP."""
    found = context.invocation_metadata() or ()
    return [(key, value) for key, value in found if key in _PASSED_ON and isinstance(value, str)]


def _trailing(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers with a request's id and times, as metadata."""
    return [(name, value) for name, value in headers.items() if name.startswith("x-")]


def _client(context: Any) -> tuple[str, int] | None:
    """The address that a call comes from."""
    match = _ADDRESS.fullmatch(unquote(context.peer()))
    return None if match is None else (match[1].strip("[]"), int(match[2]))


def _json(reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        raise _error(reply.status, reply.body)
    content: dict[str, Any] = json.loads(reply.body)
    return content


def _error(status: int, body: bytes) -> CallError:
    try:
        return CallError(status, str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        return CallError(status, f"the server answered with the status {status}")
