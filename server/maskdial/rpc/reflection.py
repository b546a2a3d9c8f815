"""ReflectionService: tells clients such as grpcurl what can be called
(https://github.com/grpc/grpc/blob/master/doc/server-reflection.md).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool

from maskdial.errors import shortened
from maskdial.rpc import health, messages, tei_messages
from maskdial.rpc.call import Call
from maskdial.rpc.schema import Schema

_VERSIONS = ("v1", "v1alpha")
_METHOD = "ServerReflectionInfo"
_NOT_FOUND = 5
_ENTRY = "Entry"  # how the names of maps' messages end
Method = tuple[str, str, str]
"""The messages that a method takes and gives, and which of them are streams: "", ">", "<", "<>"."""

_KSERVE: Mapping[str, Method] = {
    **{
        name: (f"{name}Request", f"{name}Response", "")
        for name in (
            *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata"),
            *("ModelInfer", "ModelConfig", "ModelStatistics"),
        )
    },
    "ModelStreamInfer": ("ModelInferRequest", "ModelStreamInferResponse", "<>"),
}


def _with_streams(**methods: tuple[str, str]) -> Mapping[str, Method]:
    """Methods of text-embeddings-inference, each of which a stream has, too."""
    found: dict[str, Method] = {}
    for name, (takes, gives) in methods.items():
        found |= {name: (takes, gives, ""), f"{name}Stream": (takes, gives, "<>")}
    return found


_REFLECTION = Schema(
    "grpc.reflection.v1",
    {
        "ServerReflectionRequest": {
            "host": (1, "string"),
            "file_by_filename": (3, "?string"),
            "file_containing_symbol": (4, "?string"),
            "file_containing_extension": (5, "?ExtensionRequest"),
            "all_extension_numbers_of_type": (6, "?string"),
            "list_services": (7, "?string"),
        },
        "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
        "ServerReflectionResponse": {
            "valid_host": (1, "string"),
            "original_request": (2, "ServerReflectionRequest"),
            "file_descriptor_response": (4, "FileDescriptorResponse"),
            "list_services_response": (6, "ListServiceResponse"),
            "error_response": (7, "ErrorResponse"),
        },
        "FileDescriptorResponse": {"file_descriptor_proto": (1, "*bytes")},
        "ListServiceResponse": {"service": (1, "*ServiceResponse")},
        "ServiceResponse": {"name": (1, "string")},
        "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
    },
)
_SERVICES: Mapping[Schema, Mapping[str, Mapping[str, Method]]] = {
    messages.SCHEMA: {"GRPCInferenceService": _KSERVE},
    tei_messages.SCHEMA: {
        "Info": {"Info": ("InfoRequest", "InfoResponse", "")},
        "Embed": _with_streams(
            Embed=("EmbedRequest", "EmbedResponse"),
            EmbedSparse=("EmbedSparseRequest", "EmbedSparseResponse"),
            EmbedAll=("EmbedAllRequest", "EmbedAllResponse"),
        ),
        "Predict": _with_streams(
            Predict=("PredictRequest", "PredictResponse"),
            PredictPair=("PredictPairRequest", "PredictResponse"),
        ),
        "Rerank": {
            "Rerank": ("RerankRequest", "RerankResponse", ""),
            "RerankStream": ("RerankStreamRequest", "RerankResponse", "<"),
        },
        "Tokenize": _with_streams(
            Tokenize=("EncodeRequest", "EncodeResponse"),
            Decode=("DecodeRequest", "DecodeResponse"),
        ),
    },
    health.SCHEMA: {"Health": {"Check": ("HealthCheckRequest", "HealthCheckResponse", "")}},
}


class ReflectionService:
    """``ServerReflection``, of today and as it was called first; it lists all services but itself.

    A message of the inference protocol or of text-embeddings-inference's has the fields that this
    server reads and writes.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self.services: list[str] = []
        """Their full names."""
        for schema, services in _SERVICES.items():
            file = _described(schema, services)
            self._pool.Add(file)
            self.services += [f"{file.package}.{name}" for name in services]

    @property
    def methods(self) -> Mapping[str, Callable[[Call], Awaitable[None]]]:
        """What answers a call, by its path."""
        paths = (f"/grpc.reflection.{each}.ServerReflection/{_METHOD}" for each in _VERSIONS)
        return dict.fromkeys(paths, self._tell)

    def paths(self) -> set[str]:
        """Those of the methods that it tells of."""
        found = (self._pool.FindServiceByName(each) for each in self.services)
        return {f"/{each.full_name}/{name}" for each in found for name in each.methods_by_name}

    async def _tell(self, call: Call) -> None:
        while (content := await call.read()) is not None:
            request = _REFLECTION.read(content, "ServerReflectionRequest")
            answer = _REFLECTION.message("ServerReflectionResponse")(
                valid_host=request.host, original_request=request, **self._answer(request)
            )
            await call.write(answer.SerializeToString())

    def _answer(self, request: Any) -> dict[str, Any]:
        if request.HasField("list_services"):
            return {
                "list_services_response": {"service": [{"name": each} for each in self.services]}
            }
        try:
            if request.HasField("file_by_filename"):
                file = self._pool.FindFileByName(request.file_by_filename)
            elif request.HasField("file_containing_symbol"):
                name = request.file_containing_symbol
                of_method = f"/{'/'.join(name.rsplit('.', 1))}" in self.paths()
                symbol = name.rpartition(".")[0] if of_method else name
                file = self._pool.FindFileContainingSymbol(symbol)
            else:
                return _error("no message has extensions")
        except KeyError as error:
            return _error(f"there is no {shortened(str(error.args[0]))}")
        return {"file_descriptor_response": {"file_descriptor_proto": [file.serialized_pb]}}


def _error(sentence: str) -> dict[str, Any]:
    return {"error_response": {"error_code": _NOT_FOUND, "error_message": sentence}}


def _described(schema: Schema, services: Mapping[str, Mapping[str, Method]]) -> Any:
    """The file of a schema with its services, and maps as a compiler writes them."""
    file = descriptor_pb2.FileDescriptorProto()
    file.CopyFrom(schema.file)
    entries = {each.name: each for each in schema.file.message_type if each.name.endswith(_ENTRY)}
    kept = [each for each in file.message_type if each.name not in entries]
    for message in kept:
        for field in message.field:
            entry = entries.get(field.type_name.rpartition(".")[2])
            if entry is not None:
                nested = message.nested_type.add()
                nested.CopyFrom(entry)
                nested.options.map_entry = True
                field.type_name = f".{file.package}.{message.name}.{entry.name}"
    del file.message_type[:]
    file.message_type.extend(kept)
    for name, methods in services.items():
        service = file.service.add(name=name)
        for method, (takes, gives, streams) in methods.items():
            service.method.add(
                name=method,
                input_type=f".{file.package}.{takes}",
                output_type=f".{file.package}.{gives}",
                client_streaming="<" in streams,
                server_streaming=">" in streams,
            )
    return file
