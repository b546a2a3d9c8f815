"""KServe's protocol over gRPC: the answers of HTTP, with its keys, limits, deadlines and drain.

`tests/clients/triton` uses Triton's client.
"""

import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.rpc.messages import SERVICE, message
from maskdial.server import Server

KEY = "sesame"
TEXTS = ["A warm and funny film.", "A cold, dull film."]
METADATA = [("authorization", f"Bearer {KEY}")]
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    models = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    running = start_server(models=models, api_keys=[KEY], grpc_port=0, max_body_bytes=100_000)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    headers = dict(METADATA)
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


class Client:
    """Calls of the service, made of messages by name."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def call(self, name: str, request: Any = None, **options: Any) -> Any:
        """A unary call's response."""
        return self._method("unary_unary", name, f"{name}Response")(
            message(f"{name}Request")() if request is None else request,
            **({"metadata": METADATA, "timeout": 60} | options),
        )

    def stream(self, *requests: Any, **options: Any) -> Any:
        """The responses of a stream."""
        call = self._method("stream_stream", "ModelStreamInfer", "ModelStreamInferResponse")
        return call(iter(requests), **({"metadata": METADATA, "timeout": 60} | options))

    def _method(self, kind: str, name: str, response: str) -> Any:
        return getattr(self.channel, kind)(
            f"/{SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=message(response).FromString,
        )


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Client]:
    one = Client(server.server.rpc.port)
    yield one
    one.channel.close()


def packed(*texts: str) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def request(model: str, *texts: str, raw: Any = True, **parameters: Any) -> Any:
    asked = message("ModelInferRequest")(model_name=model, id="7")
    tensor = asked.inputs.add(name="inputs", datatype="BYTES", shape=[len(texts)])
    if raw:
        asked.raw_input_contents.append(packed(*texts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for name, value in parameters.items():
        kinds: dict[type, str] = {bool: "bool", int: "int64", float: "double", str: "string"}
        setattr(asked.parameters.add(key=name).value, f"{kinds[type(value)]}_param", value)
    return asked


def refusal(client: Client, name: str, asked: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        client.call(name, asked, **options)
    return caught.value.code(), caught.value.details()


def post(http: httpx.Client, path: str, body: object) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


POLICY = """
[policies.closed]
[[policies.closed.rules]]
name = "all"
on = "input"
model = "sentiment"
labels = {NEGATIVE = 0.0, POSITIVE = 0.0}
action = "refuse"
"""


def test_a_call_asks_for_a_policy(start_server: Callable[..., Any], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    models = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    running = start_server(models=models, grpc_port=0, policy=policy)
    client = Client(running.server.rpc.port)
    try:
        asked = request("hybrid", TEXTS[0], **GREEDY)
        assert client.call("ModelInfer", asked, metadata=()).outputs
        code, told = refusal(client, "ModelInfer", asked, metadata=[("x-policy", "closed")])
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert told.startswith("policy 'closed' refuses the request")
        code, told = refusal(client, "ModelInfer", asked, metadata=[("x-policy", "open")])
        assert (code, told.split(";")[0]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "x-policy: no policy 'open' here",
        )
    finally:
        client.channel.close()
        running.stop()


def test_health_and_metadata(client: Client, http: httpx.Client) -> None:
    assert client.call("ServerLive").live
    assert client.call("ServerReady").ready
    ready = message("ModelReadyRequest")
    assert client.call("ModelReady", ready(name="hybrid", version="1")).ready
    assert client.call("ServerMetadata").extensions[0] == "binary_tensor_data"
    found = client.call("ModelMetadata", message("ModelMetadataRequest")(name="sentiment"))
    wanted = http.get("/v2/models/sentiment").json()
    assert [(each.name, each.datatype) for each in found.outputs] == [
        (each["name"], each["datatype"]) for each in wanted["outputs"]
    ]
    for bad in (ready(name="nobody"), ready(name="hybrid", version="2")):
        code, _ = refusal(client, "ModelReady", bad)
        assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("raw", [True, False])
def test_answers_are_those_of_http(client: Client, http: httpx.Client, raw: bool) -> None:
    found = client.call("ModelInfer", request("sentiment", *TEXTS, raw=raw))
    assert (found.model_name, found.model_version, found.id) == ("sentiment", "1", "7")
    label, score = found.outputs
    wanted = post(http, "/classify", {"inputs": TEXTS, "model": "sentiment"})
    assert (label.name, label.datatype, list(label.shape)) == ("label", "BYTES", [2, 2])
    labels = packed(*(each["label"] for row in wanted for each in row))
    scores = np.array([each["score"] for row in wanted for each in row], "<f4").tobytes()
    assert list(found.raw_output_contents) == [labels, scores]
    assert (score.name, score.datatype) == ("score", "FP32")
    only = request("sentiment", *TEXTS, raw=raw, top_k=1)
    only.outputs.add(name="score")
    (score,) = client.call("ModelInfer", only).outputs
    assert list(score.shape) == [2, 1]


def test_tritons_configuration_and_statistics(client: Client, http: httpx.Client) -> None:
    name = {"name": "sentiment"}
    config = client.call("ModelConfig", message("ModelConfigRequest")(**name)).config
    wanted = http.get("/v2/models/sentiment/config").json()
    assert [each.name for each in config.output] == [each["name"] for each in wanted["output"]]
    assert [each.data_type for each in config.output] == [13, 11]
    client.call("ModelInfer", request("sentiment", *TEXTS))
    (found,) = client.call("ModelStatistics", message("ModelStatisticsRequest")(**name)).model_stats
    assert found.inference_stats.success.count == found.inference_count > 0
    every = client.call("ModelStatistics").model_stats
    assert {each.name for each in every} == {"hybrid", "sentiment"}
    code, _ = refusal(client, "ModelConfig", message("ModelConfigRequest")(name="nobody"))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("written", [True, False])
def test_outputs_come_as_bytes_whatever_http_would_do(client: Client, written: bool) -> None:
    """KServe's and Triton's clients send HTTP's parameters with either port."""
    asked = request("sentiment", *TEXTS, binary_data_output=written)
    for name in ("label", "score"):
        output = asked.outputs.add(name=name)
        output.parameters.add(key="binary_data").value.bool_param = written
    found = client.call("ModelInfer", asked)
    plain = client.call("ModelInfer", request("sentiment", *TEXTS))
    assert found.raw_output_contents == plain.raw_output_contents
    assert found.outputs == plain.outputs


def test_a_stream_has_a_response_for_each_token(client: Client, http: httpx.Client) -> None:
    asked = request("hybrid", "Once upon a time", **GREEDY)
    responses = list(client.stream(asked, request("sentiment", *TEXTS)))
    assert not any(each.error_message for each in responses)
    *tokens, other = [each.infer_response for each in responses]
    texts = [each.raw_output_contents[0][4:].decode() for each in tokens]
    assert len(texts) == 6
    wanted = post(
        http, "/generate", {"model": "hybrid", "inputs": "Once upon a time", "parameters": GREEDY}
    )
    assert "".join(texts) == wanted["generated_text"]
    finals = [each.parameters[0].value.bool_param for each in (*tokens, other)]
    assert finals == [False] * 5 + [True, True]
    assert [each.name for each in other.outputs] == ["label", "score"]


def test_an_error_in_a_stream_is_the_requests_own(client: Client) -> None:
    bad = request("hybrid", "Once", temperature=-1.0)
    nobody = request("nobody", "Once")
    good = request("hybrid", "Once", max_new_tokens=1)
    refused, missing, answered = client.stream(bad, nobody, good)
    assert "parameters.temperature: must be between 0 and 100" in refused.error_message
    assert refused.infer_response.id == "7"
    assert "no model 'nobody' here" in missing.error_message
    assert answered.infer_response.outputs[0].name == "text_output"


def test_bad_requests_have_their_codes(client: Client) -> None:
    infer = "ModelInfer"
    two = request("sentiment", "a")
    two.raw_input_contents.append(packed("b"))
    huge = request("sentiment", "a")
    huge.inputs[0].shape[:] = [2**40, 2**20]
    numbers = request("sentiment", "a")
    numbers.inputs[0].datatype = "FP32"
    invalid, exhausted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    for bad, code, words in (
        (two, invalid, "raw_input_contents has 2 tensors, and inputs has 1"),
        (huge, invalid, "has 1,152,921,504,606,846,976 elements by its shape"),
        (numbers, invalid, "has the datatype 'FP32'"),
        (request("sentiment", "a", top_k="1"), invalid, "parameters.top_k: "),
        (request("sentiment", ""), invalid, "inputs[0] must not be empty"),
        (message("ModelInferRequest")(model_name="sentiment"), invalid, "inputs: must have betw"),
        (request("nobody", "a"), grpc.StatusCode.NOT_FOUND, "no model 'nobody' here"),
        (request("sentiment", "a" * 120_000), exhausted, "accepts at most 100,000"),
        (request("sentiment", "a" * 300_000), exhausted, ""),  # which gRPC itself refuses
    ):
        found = refusal(client, infer, bad)
        assert found[0] is code
        assert words in found[1]


def test_keys(client: Client) -> None:
    asked = request("sentiment", "a")
    for metadata in ([], [("authorization", "Bearer no")], [("x-api-key", "no")]):
        code, words = refusal(client, "ModelInfer", asked, metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert words.startswith("the key is")
    assert client.call("ModelInfer", asked, metadata=[("x-api-key", KEY)]).outputs


def counted(http: httpx.Client, outcome: str, route: str) -> float:
    start = f'maskdial_requests_total{{model="hybrid",outcome="{outcome}",route="{route}"}} '
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_deadlines_and_cancellations_end_the_work(client: Client, http: httpx.Client) -> None:
    long = {"max_new_tokens": 480, "ignore_eos": True}
    asked = request("hybrid", "Once upon a time", **long)
    code, _ = refusal(client, "ModelInfer", asked, timeout=0.01)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    route = "/v2/models/{name}/generate_stream"
    before = counted(http, "cancelled", route)
    responses = client.stream(asked)
    next(responses)
    responses.cancel()
    deadline = time.monotonic() + 30
    while counted(http, "cancelled", route) == before:
        assert time.monotonic() < deadline, "the work goes on"
        time.sleep(0.02)


def test_the_drain_lets_calls_end_and_refuses_others(start_server: Callable[..., Any]) -> None:
    models = {"hybrid": STARTER_FOLDER / "hybrid"}
    running = start_server(models=models, grpc_port=0)
    client = Client(running.server.rpc.port)
    long = request("hybrid", "Once upon a time", max_new_tokens=60, ignore_eos=True)
    responses = client.stream(long)
    next(responses)
    drained = threading.Event()

    def begin() -> None:
        running.server._begin_drain("a test")
        drained.set()

    running.server._loop.call_soon_threadsafe(begin)
    assert drained.wait(10)
    code, words = refusal(client, "ModelInfer", request("hybrid", "Once"))
    assert (code, words) == (
        grpc.StatusCode.UNAVAILABLE,
        "the server is shutting down; try another instance",
    )
    assert len(list(responses)) == 59
    client.channel.close()
    running.stop()


def test_a_server_without_the_extra_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "maskdial.rpc.server", None)
    with pytest.raises(ConfigError, match=re.escape(how_to_install("grpc"))):
        Server(Config(port=0, grpc_port=0))


def test_the_log_says_that_the_port_is_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level("ERROR"):
        server = Server(Config(port=0, grpc_port=other.getsockname()[1], model_dir=tmp_path))
        server.run()
    assert isinstance(server.failure, ConfigError)
    assert "cannot listen for gRPC on 127.0.0.1" in caplog.text
