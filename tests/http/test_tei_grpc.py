"""text-embeddings-inference's gRPC services: the answers of its routes over HTTP.

The client is made of the project's own proto file: `tests/data/tei_v1.binpb` is what protoc makes
of proto/tei.proto (huggingface/text-embeddings-inference).
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from maskdial.http.in_process import Reply
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.rpc.tei import _add, _metadata
from maskdial.rpc.tei_messages import MODEL_TYPES, message
from tests.http.every_route import make_models

KEY = "sesame"
DATA = Path(__file__).parents[1] / "data"
METADATA = [("authorization", f"Bearer {KEY}")]
TEXTS = ["A warm and funny film.", "A cold, dull film.", "Bread is baked."]
LONG = "good " * 700


class Client:
    """Any call of the project's services."""

    def __init__(self, port: int) -> None:
        pool = descriptor_pool.DescriptorPool()
        described = descriptor_pb2.FileDescriptorSet.FromString(
            (DATA / "tei_v1.binpb").read_bytes()
        )
        for file in described.file:
            pool.Add(file)
        (self.file,) = described.file
        self._pool = pool
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"tei.v1.{name}"))

    def call(self, method: str, *requests: Any, model: str = "", **options: Any) -> Any:
        """The response to a method such as `Embed/EmbedStream`, or what iterates over them.

        Requests are fields by name.
        """
        service_name, name = method.split("/")
        (service,) = (each for each in self.file.service if each.name == service_name)
        (called,) = (each for each in service.method if each.name == name)
        kind = self.message(called.input_type.rpartition(".")[2])
        sends = "stream" if called.client_streaming else "unary"
        answers = "stream" if called.server_streaming else "unary"
        given = [each if isinstance(each, kind) else kind(**each) for each in requests]
        metadata = options.pop("metadata", METADATA) + ([("x-model", model)] if model else [])
        return getattr(self.channel, f"{sends}_{answers}")(
            f"/tei.v1.{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=self.message(called.output_type.rpartition(".")[2]).FromString,
        )(
            iter(given) if called.client_streaming else given[0],
            **({"metadata": metadata, "timeout": 60} | options),
        )


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    made = make_models(tmp_path_factory.mktemp("bundles"))
    names = ("embedder", "sparse", "late", "ranker", "sentiment")
    models = {name: made[name] for name in names}
    running = start_server(models=models, api_keys=[KEY], grpc_port=0, max_body_bytes=20_000)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Client]:
    one = Client(server.server.rpc.port)
    yield one
    one.channel.close()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=dict(METADATA), timeout=60) as one:
        yield one


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: Client, method: str, *requests: Any, **options: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        client.call(method, *requests, **options)
    return caught.value.code(), caught.value.details()


def unit(vectors: Any) -> Any:
    array = np.asarray(vectors, np.float32)
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def test_messages_have_the_fields_of_the_proto(client: Client) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    for wanted in client.file.message_type:
        found = message(wanted.name).DESCRIPTOR.fields_by_name
        assert list(found) == [field.name for field in wanted.field]
        for field in wanted.field:
            ours = found[field.name]
            assert (ours.number, ours.type) == (field.number, field.type), field.name
            assert ours.is_repeated == (field.label == kinds.LABEL_REPEATED), field.name
            assert ours.has_presence == (
                field.proto3_optional or (field.type == kinds.TYPE_MESSAGE and not ours.is_repeated)
            ), field.name
    numbers = {each.name: each.number for each in client.file.enum_type[0].value}
    assert dict(MODEL_TYPES) == {
        "classify": numbers["MODEL_TYPE_CLASSIFIER"],
        "rerank": numbers["MODEL_TYPE_RERANKER"],
    }


def test_every_method_of_the_proto_is_there(client: Client) -> None:
    called = 0
    for service in client.file.service:
        for method in service.method:
            kind = client.message(method.input_type.rpartition(".")[2])
            code = grpc.StatusCode.OK
            try:
                found = client.call(f"{service.name}/{method.name}", kind(), model="nobody")
                if method.server_streaming:
                    list(found)
            except grpc.RpcError as error:
                code = error.code()
            # An empty text is refused before the name of the model is looked up, or after.
            assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT), method
            called += 1
    assert called == 17
    code, words = refusal(client, "Info/Info", {}, metadata=[])
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert words.startswith("the key is")


def test_info(client: Client, http: httpx.Client) -> None:
    told = http.get("/info").json()
    by_name = {each["name"]: each for each in told["models"]}
    for name, kind in (("embedder", 0), ("sparse", 0), ("sentiment", 1), ("ranker", 2)):
        found = client.call("Info/Info", {}, model=name)
        assert (found.model_id, found.model_type) == (name, kind)
        assert found.model_sha == by_name[name]["bundle"]
        assert found.max_input_length == by_name[name]["max_length"] > 0
        assert found.max_client_batch_size == told["limits"]["max_batch_inputs"]
        assert not found.HasField("docker_label")
    code, words = refusal(client, "Info/Info", {})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.startswith("name one of the models in the metadata x-model: ")


def test_embeddings(client: Client, http: httpx.Client) -> None:
    plain = post(http, "/embed", inputs=TEXTS, normalize=False)
    one = client.call("Embed/Embed", {"inputs": TEXTS[0], "normalize": False})
    assert list(one.embeddings) == np.asarray(plain[0], np.float32).tolist()
    assert one.metadata.compute_chars == len(TEXTS[0])
    assert one.metadata.compute_tokens > 0
    assert one.metadata.total_time_ns > one.metadata.inference_time_ns > 0
    streamed = [*client.call("Embed/EmbedStream", *({"inputs": each} for each in TEXTS))]
    np.testing.assert_allclose([each.embeddings for each in streamed], unit(plain), atol=1e-6)
    (short,) = client.call("Embed/EmbedStream", {"inputs": TEXTS[0], "dimensions": 8})
    np.testing.assert_allclose(short.embeddings, unit(plain[0][:8]), atol=1e-6)


def test_truncation(client: Client, http: httpx.Client) -> None:
    code, words = refusal(client, "Embed/Embed", {"inputs": LONG})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "tokens" in words
    begun, ended = "good " * 700 + "bad", "bad " + "good " * 700
    for direction, name in ((0, "right"), (1, "left")):
        for text in (begun, ended):
            asked = {"inputs": text, "truncate": True, "truncation_direction": direction}
            wanted = post(
                http, "/embed", inputs=text, truncate=True, truncation_direction=name,
                normalize=True,
            )  # fmt: skip
            found = client.call("Embed/Embed", asked)
            assert list(found.embeddings) == np.asarray(wanted[0], np.float32).tolist()
    code, words = refusal(client, "Embed/Embed", {"inputs": "a", "truncation_direction": 2})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words == "truncation_direction must be 0 (right) or 1 (left)"


def test_vectors_of_tokens_and_of_the_vocabulary(client: Client, http: httpx.Client) -> None:
    weights = post(http, "/embed-sparse", inputs=TEXTS)
    for text, wanted in zip(TEXTS, weights, strict=True):
        found = client.call("Embed/EmbedSparse", {"inputs": text})
        assert [each.index for each in found.sparse_embeddings] == [w["index"] for w in wanted]
        np.testing.assert_allclose(
            [each.value for each in found.sparse_embeddings], [w["value"] for w in wanted]
        )
    for text in TEXTS:  # one by one: the bundle's rows mean something in a batch of one only
        (rows,) = post(http, "/embed-all", inputs=text)
        (found,) = client.call("Embed/EmbedAllStream", {"inputs": text})
        np.testing.assert_allclose([each.embeddings for each in found.token_embeddings], rows)


def test_a_prompt_that_there_is_not(client: Client) -> None:
    for method in ("Embed/Embed", "Embed/EmbedSparse", "Embed/EmbedAll"):
        code, words = refusal(client, method, {"inputs": "a", "prompt_name": "query"})
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words.startswith("prompt_name: model ")


def test_predictions(client: Client, http: httpx.Client) -> None:
    model = "sentiment"
    for inputs, raw in ((TEXTS[0], False), (TEXTS[:1], True), (TEXTS[:2], False)):
        wanted = post(http, "/predict", inputs=inputs, raw_scores=raw, model=model)
        method = "Predict/Predict" if isinstance(inputs, str) else "Predict/PredictPair"
        found = client.call(method, {"inputs": inputs, "raw_scores": raw}, model=model)
        assert [each.label for each in found.predictions] == [each["label"] for each in wanted]
        np.testing.assert_allclose(
            [each.score for each in found.predictions], [each["score"] for each in wanted]
        )
    code, words = refusal(client, "Predict/PredictPair", {"inputs": TEXTS}, model=model)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.startswith("inputs: must be a text, a pair of texts")


def test_ranks(client: Client, http: httpx.Client) -> None:
    query, model = "Which film is good?", "ranker"
    wanted = post(http, "/rerank", query=query, texts=TEXTS, return_text=True, model=model)
    asked = {"query": query, "texts": TEXTS, "return_text": True}
    whole = client.call("Rerank/Rerank", asked, model=model)
    parts = ({"query": query, "text": text, "return_text": True} for text in TEXTS)
    streamed = client.call("Rerank/RerankStream", *parts, model=model)
    for found in (whole, streamed):
        assert [(each.index, each.text) for each in found.ranks] == [
            (each["index"], each["text"]) for each in wanted
        ]
        np.testing.assert_allclose(
            [each.score for each in found.ranks], [each["score"] for each in wanted], rtol=1e-5
        )
        assert found.metadata.compute_chars == len(query) * 3 + sum(map(len, TEXTS))
    assert whole.metadata.compute_tokens == streamed.metadata.compute_tokens > 0
    first, second = (
        {"query": query, "text": text, "raw_scores": raw}
        for text, raw in zip(TEXTS[:2], (True, False), strict=True)
    )
    ranks = client.call("Rerank/RerankStream", first, second, model=model).ranks
    raw = post(http, "/rerank", query=query, texts=TEXTS[:2], raw_scores=True, model=model)
    assert not ranks[0].HasField("text")
    np.testing.assert_allclose(
        [each.score for each in ranks], [each["score"] for each in raw], rtol=1e-4
    )
    assert refusal(client, "Rerank/Rerank", asked, model="embedder")[0] is (
        grpc.StatusCode.INVALID_ARGUMENT
    )
    many = ({"query": query, "text": "good " * 180, "return_text": True} for _ in range(30))
    code, words = refusal(client, "Rerank/RerankStream", *many, model=model)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert words == "the stream has more texts than one reply holds; send fewer"


def test_tokens(client: Client, http: httpx.Client) -> None:
    model = "sentiment"
    for special in (False, True):
        (wanted,) = post(
            http, "/tokenize", inputs=[TEXTS[0]], add_special_tokens=special, model=model
        )
        asked = {"inputs": TEXTS[0], "add_special_tokens": special}
        found = client.call("Tokenize/Tokenize", asked, model=model)
        assert [
            {
                "id": each.id,
                "text": each.text,
                "special": each.special,
                "start": each.start if each.HasField("start") else None,
                "stop": each.stop if each.HasField("stop") else None,
            }
            for each in found.tokens
        ] == wanted
        ids = [each.id for each in found.tokens]
        (text,) = post(http, "/decode", ids=ids, skip_special_tokens=False, model=model)
        (decoded,) = client.call("Tokenize/DecodeStream", {"ids": ids}, model=model)
        assert decoded.text == text
    code, words = refusal(
        client, "Tokenize/Tokenize", {"inputs": "a", "prompt_name": "query"}, model=model
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.startswith("prompt_name: ")


def test_a_stream_answers_while_it_goes_on_and_in_order(client: Client, http: httpx.Client) -> None:
    """Also more messages than are answered at once, and one that waits for the last answer."""
    texts = [f"{'very ' * (i * 7 % 13)}good film {i}" for i in range(80)]
    wanted = post(http, "/embed", inputs=texts, normalize=True)
    answered = threading.Semaphore(0)

    def given() -> Iterator[Any]:
        kind = client.message("EmbedRequest")
        for text in texts:
            yield kind(inputs=text)
        for _ in texts:
            answered.acquire()
        yield kind(inputs=texts[0])

    method = client.channel.stream_stream(
        "/tei.v1.Embed/EmbedStream",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=client.message("EmbedResponse").FromString,
    )
    found = []
    for response in method(given(), metadata=METADATA, timeout=120):
        found.append(list(response.embeddings))
        answered.release()
    np.testing.assert_allclose(found, [*wanted, wanted[0]], atol=1e-5)


def test_a_stream_of_many_small_messages(client: Client) -> None:
    """They come faster than they are answered, each in a frame of its own."""
    ids = [5 + i % 50 for i in range(1500)]
    asked = ({"ids": [each]} for each in ids)
    found = [each.text for each in client.call("Tokenize/DecodeStream", *asked, model="sentiment")]
    words = {each: client.call("Tokenize/Decode", {"ids": [each]}, model="sentiment").text
             for each in set(ids)}  # fmt: skip
    assert found == [words[each] for each in ids]


def test_an_error_ends_a_stream_after_what_came_before(client: Client) -> None:
    good, bad = {"inputs": TEXTS[0]}, {"inputs": " "}
    responses = client.call("Embed/EmbedStream", good, good, bad, good)
    assert next(responses).embeddings == next(responses).embeddings
    with pytest.raises(grpc.RpcError) as caught:
        next(responses)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must not be empty" in caught.value.details()
    assert not list(client.call("Embed/EmbedStream"))
    long = {"inputs": "good " * 20_000}  # no message at all, as it is too large
    texts = [{"inputs": f"film {i}"} for i in range(20)]
    responses, found = client.call("Embed/EmbedStream", *texts, long), []
    with pytest.raises(grpc.RpcError) as caught:
        found.extend(responses)  # which keeps those before the error
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(found) == 20


def test_counts_beyond_a_message() -> None:
    """A long query counts for each text; a whole call failed by it."""
    metadata = _metadata(Reply(headers={"x-compute-tokens": "7"}), 2**32, 1)
    assert metadata.compute_chars == 2**32 - 1
    _add(metadata, metadata)
    assert (metadata.compute_chars, metadata.compute_tokens) == (2**32 - 1, 14)


def test_bytes_that_are_no_message(client: Client) -> None:
    for method, content, words in (
        ("Embed/Embed", b"\x0a\x05ab", "the message is no EmbedRequest"),
        ("Embed/Embed", b"\x0a\x02\xff\xfe", "the message is no EmbedRequest"),
        ("Tokenize/Decode", b"\x08\xff\xff\xff\xff\x0f", "ids"),
    ):
        call = client.channel.unary_unary(f"/tei.v1.{method}")
        with pytest.raises(grpc.RpcError) as caught:
            call(content, metadata=[*METADATA, ("x-model", "embedder")], timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in caught.value.details()


def test_one_model_needs_no_name(start_server: Callable[..., Any]) -> None:
    models = {name: STARTER_FOLDER / name for name in ("sentiment", "hybrid")}
    running = start_server(models=models, grpc_port=0)
    client = Client(running.server.rpc.port)
    try:
        assert client.call("Info/Info", {}, metadata=[]).model_id == "sentiment"
        assert client.call("Predict/Predict", {"inputs": "Good."}, metadata=[]).predictions
        code, words = refusal(client, "Embed/Embed", {"inputs": "Good."}, metadata=[])
        assert code is grpc.StatusCode.NOT_FOUND
        assert words.startswith("no model here does embed")
    finally:
        client.channel.close()
        running.stop()
