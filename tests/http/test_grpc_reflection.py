"""gRPC's own services: health, as Kubernetes' probes ask, and reflection, as grpcurl does."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from maskdial.http.in_process import InProcess
from maskdial.http.keys import Keys
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.rpc import health, reflection
from maskdial.rpc.health import HealthService
from maskdial.rpc.reflection import ReflectionService
from maskdial.rpc.services import Services

KEY = "sesame"
METADATA = [("authorization", f"Bearer {KEY}")]
SERVICES = (
    "inference.GRPCInferenceService",
    *(f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")),
    "grpc.health.v1.Health",
)
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    models = {"sentiment": STARTER_FOLDER / "sentiment"}
    running = start_server(models=models, api_keys=[KEY], grpc_port=0)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def channel(server: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.server.rpc.port}") as opened:
        yield opened


def check(channel: grpc.Channel, service: str) -> Any:
    """The answer to a probe, which has no key."""
    called = channel.unary_unary(
        health.CHECK,
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=health.SCHEMA.message("HealthCheckResponse").FromString,
    )
    return called(health.SCHEMA.message("HealthCheckRequest")(service=service), timeout=60)


def asked(channel: grpc.Channel, version: str, *requests: dict[str, Any], **options: Any) -> Any:
    """The answers to a stream of requests."""
    schema = reflection._REFLECTION
    called = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=schema.message("ServerReflectionResponse").FromString,
    )
    sent = (schema.message("ServerReflectionRequest")(**each) for each in requests)
    return list(called(sent, **({"metadata": METADATA, "timeout": 60} | options)))


def refused(code: grpc.StatusCode, call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() == code
    return str(raised.value.details())


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_a_probe_needs_no_key(channel: grpc.Channel, service: str) -> None:
    assert check(channel, service).status == 1  # SERVING


def test_what_a_probe_is_refused(channel: grpc.Channel) -> None:
    unknown = refused(grpc.StatusCode.NOT_FOUND, lambda: check(channel, "tei.v1.Nothing"))
    assert unknown == "there is no service tei.v1.Nothing"
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    refused(grpc.StatusCode.UNIMPLEMENTED, lambda: next(watch(b"", metadata=METADATA, timeout=60)))
    refused(grpc.StatusCode.UNAUTHENTICATED, lambda: next(watch(b"", timeout=60)))
    broken = channel.unary_unary(health.CHECK)
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: broken(b"\xff", timeout=60))


@pytest.mark.parametrize(("status", "said"), [(200, 1), (503, 2), (500, 2)])
def test_a_server_is_well_if_it_is_ready(status: int, said: int) -> None:
    """As its route says, which turns red while models load, and in a drain."""
    written: list[bytes] = []

    async def read_only() -> bytes:
        return b""

    async def write(content: bytes) -> None:
        written.append(content)

    async def get(path: str, _: Any) -> Any:
        assert path == "/health/ready"
        return SimpleNamespace(status=status)

    asker: Any = SimpleNamespace(get=get)
    call: Any = SimpleNamespace(read_only=read_only, write=write)
    check_health: Any = HealthService(asker, ()).methods[health.CHECK]
    asyncio.run(check_health(call))
    (answer,) = written
    assert health.SCHEMA.message("HealthCheckResponse").FromString(answer).status == said


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_what_can_be_called_is_told(channel: grpc.Channel, version: str) -> None:
    """A client without any proto file calls a method, with maps and enumerations in JSON."""
    listed, *files = asked(
        channel,
        version,
        {"list_services": ""},
        *({"file_containing_symbol": each} for each in SERVICES[:2]),
    )
    assert [each.name for each in listed.list_services_response.service] == list(SERVICES)
    assert listed.original_request.list_services == ""
    pool = descriptor_pool.DescriptorPool()
    for each in files:
        (serialized,) = each.file_descriptor_response.file_descriptor_proto
        pool.AddSerializedFile(serialized)
    method = pool.FindServiceByName(SERVICES[0]).methods_by_name["ModelInfer"]
    request, response = map(
        message_factory.GetMessageClass, (method.input_type, method.output_type)
    )
    content = {
        "modelName": "sentiment",
        "inputs": [
            {
                "name": "text_input",
                "datatype": "BYTES",
                "shape": ["1"],
                "contents": {"bytesContents": ["QSB3YXJtIGZpbG0u"]},
            }
        ],
        "parameters": {"top_k": {"int64Param": "1"}},
    }
    called = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda given: given.SerializeToString(),
        response_deserializer=response.FromString,
    )
    answer = called(json_format.ParseDict(content, request()), metadata=METADATA, timeout=60)
    assert answer.model_name == "sentiment"
    told = pool.FindMessageTypeByName("tei.v1.EmbedRequest")
    direction = told.fields_by_name["truncation_direction"].enum_type
    assert direction.values_by_number[1].name == "TRUNCATION_DIRECTION_LEFT"


def test_what_reflection_does_not_know(channel: grpc.Channel) -> None:
    """An unknown name is an answer of its own, and the stream goes on."""
    extension = {"containing_type": "a", "extension_number": 1}
    answers = asked(
        channel,
        "v1",
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": "tei.v1.Predict.Nothing"},
        {"file_by_filename": "nothing.proto"},
        {"file_containing_extension": extension},
        {"all_extension_numbers_of_type": "inference.ModelInferRequest"},
        {},
        {"file_containing_symbol": "tei.v1.Predict.Predict"},
        {"file_by_filename": "maskdial/inference.proto"},
    )
    assert [each.error_response.error_code for each in answers] == [5, 5, 5, 5, 5, 5, 0, 0]
    assert "inference.Nothing" in answers[0].error_response.error_message
    for metadata in ([], [("authorization", "Bearer other")]):
        ask = partial(asked, channel, "v1", {"list_services": ""}, metadata=metadata)
        refused(grpc.StatusCode.UNAUTHENTICATED, ask)


def test_reflection_tells_of_every_method_and_no_other() -> None:
    told = ReflectionService()
    application: Any = InProcess.__new__(InProcess)
    services = Services(application, Keys.__new__(Keys), 1)
    assert told.paths() | set(told.methods) == set(services._methods)


def test_its_fields_are_those_of_the_project() -> None:
    """Of text-embeddings-inference, whose proto file is there."""
    (theirs,) = descriptor_pb2.FileDescriptorSet.FromString(
        (DATA / "tei_v1.binpb").read_bytes()
    ).file
    pool = ReflectionService()._pool
    for service in theirs.service:
        ours = pool.FindServiceByName(f"tei.v1.{service.name}")
        for method in service.method:
            found = descriptor_pb2.MethodDescriptorProto()
            ours.methods_by_name[method.name].CopyToProto(found)
            found.ClearField("options")
            method.ClearField("options")
            assert found == method
    for enum in theirs.enum_type:
        found_enum = descriptor_pb2.EnumDescriptorProto()
        pool.FindEnumTypeByName(f"tei.v1.{enum.name}").CopyToProto(found_enum)
        assert [(each.name, each.number) for each in found_enum.value] == [
            (each.name, each.number) for each in enum.value
        ]
