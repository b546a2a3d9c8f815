"""`/v1/embeddings` and `/v1/rerank` with the SDK and InferenceClient, on tiny random models."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from sentence_transformers.util.quantization import quantize_embeddings
from tokenizers import models, pre_tokenizers, processors

from maskdial import Model, cli
from maskdial.ask import embed as embed_pieces
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from tests.held import held
from tests.servers import engine_of, metric, wait_for

pytestmark = pytest.mark.usefixtures("torch")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
TEXTS = ["a b c", "d e f g h", "x"]
LONG = "a " * 100
DIMENSION = 32


def save_checkpoint(model: transformers.PreTrainedModel, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundles of a model that embeds and one that ranks."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": DIMENSION,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    embedder = save_checkpoint(
        transformers.BertModel(transformers.BertConfig(**shape)), folder / "embedder"
    )
    write_pooling(embedder)
    ranker = save_checkpoint(
        transformers.BertForSequenceClassification(
            transformers.BertConfig(**shape, id2label={0: "LABEL_0"})
        ),
        folder / "ranker",
    )
    served = {"embedder": folder / "embedder-bundle", "ranker": folder / "ranker-bundle"}
    text = folder / "text.txt"  # of words that the tokenizer knows
    text.write_text(" ".join(WORDS[5:]))
    for source, bundle in zip((embedder, ranker), served.values(), strict=True):
        export(str(source), bundle, gate=Gate(text=text))
    return served


@pytest.fixture(scope="module")
def url(start_server: Callable[..., Any], served: dict[str, Path]) -> Iterator[str]:
    server = start_server(models=served, max_batch_inputs=8)
    yield server.url
    server.stop()


def write_pooling(folder: Path) -> None:
    """What sentence-transformers keeps beside a model that pools the mean."""
    (folder / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},'
        ' {"idx": 1, "name": "1", "path": "1_Pooling",'
        ' "type": "sentence_transformers.models.Pooling"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        f'{{"word_embedding_dimension": {DIMENSION}, "pooling_mode_mean_tokens": true}}'
    )


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def native(http: httpx.Client, inputs: object, **fields: object) -> Any:
    reply = http.post("/embed", json={"inputs": inputs, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def embed(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/v1/embeddings", json={"model": "embedder"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def vectors_of(reply: Any) -> list[Any]:
    assert [each["index"] for each in reply["data"]] == list(range(len(reply["data"])))
    return [each["embedding"] for each in reply["data"]]


def test_the_sdk_gets_what_embed_gives(url: str, http: httpx.Client) -> None:
    expected = native(http, TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        # It asks for base64, and decodes it, unless a format is named.
        default = client.embeddings.create(model="embedder", input=TEXTS)
        floats = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
        single = client.embeddings.create(model="embedder", input=TEXTS[1])
        short = client.embeddings.create(model="embedder", input=TEXTS, dimensions=5)
    for reply in (default, floats):
        assert [each.embedding for each in reply.data] == expected
    assert [each.index for each in default.data] == [0, 1, 2]
    assert default.model == "embedder"
    assert default.usage.prompt_tokens == default.usage.total_tokens == 9 + 3 * 2
    assert [each.embedding for each in single.data] == [expected[1]]
    np.testing.assert_array_equal(
        [each.embedding for each in short.data], native(http, TEXTS, dimensions=5)
    )


def test_in_process_the_floats_are_those_of_the_server(
    http: httpx.Client, served: dict[str, Path]
) -> None:
    texts = [TEXTS[index % 3] + " y" * (index % 7) for index in range(150)]
    with Model(served["embedder"]) as model:
        vectors = model.embed(texts)
        short = model.embed(TEXTS, dimensions=5, normalize=True)
        none = model.embed([])
        stream = list(model.map(model.embed, iter(texts)))
    expected = [native(http, text)[0] for text in texts]
    assert vectors.dtype == np.float32
    assert vectors.tolist() == expected
    np.testing.assert_array_equal(np.stack(stream), vectors)
    assert short.tolist() == native(http, TEXTS, dimensions=5, normalize=True)
    assert none.shape == (0, DIMENSION)
    with Model(served["ranker"]) as model:
        ranks = model.rerank("a b", TEXTS, raw_scores=True)
    reply = http.post("/rerank", json={"query": "a b", "texts": TEXTS, "raw_scores": True})
    assert [{"index": rank.index, "score": rank.score} for rank in ranks] == reply.json()


def test_in_the_terminal_a_line_is_a_vector(
    http: httpx.Client, served: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["embed", *TEXTS, "--bundle", str(served["embedder"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == native(http, TEXTS)
    assert cli.main(["embed", TEXTS[0], "--dimensions", "3", "--server", str(http.base_url)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_thousands_of_inputs_are_queued_some_at_a_time(http: httpx.Client) -> None:
    """In order, and never more than the eight that one request may queue."""
    texts = [TEXTS[index % 3] + " y" * (index % 7) for index in range(1000)]
    distinct = {text: native(http, text)[0] for text in set(texts)}
    body = {"model": "embedder", "input": texts}
    reply = http.post("/v1/embeddings", json=body)
    assert reply.status_code == 200, reply.text
    assert vectors_of(reply.json()) == [distinct[text] for text in texts]
    num_tokens = sum(len(text.split()) + 2 for text in texts)
    assert reply.json()["usage"]["prompt_tokens"] == num_tokens
    assert reply.headers["x-compute-tokens"] == str(num_tokens)
    assert http.post("/embed", json={"model": "embedder", "inputs": texts[:9]}).status_code == 422
    whole = embed(http, input=["a"] * 2048, encoding_format="base64")
    assert len({each["embedding"] for each in whole["data"]}) == 1


def test_a_long_request_leaves_others_room_in_the_queue(
    start_server: Callable[..., Any], served: dict[str, Path]
) -> None:
    """It queues eight texts at a time, though it has more than the queue holds."""
    server = start_server(models=served, max_batch_inputs=8, max_queue=9)
    body = {"model": "embedder", "input": ["a b c"] * 2000}
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            long = pool.submit(httpx.post, f"{server.url}/v1/embeddings", json=body, timeout=60)
            embed(http, input="x")
            while not long.done():
                embed(http, input="x")
            assert long.result().status_code == 200
    finally:
        server.stop()


def test_a_request_that_has_begun_is_not_refused_for_others(
    start_server: Callable[..., Any], served: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(models=served, max_batch_inputs=2, max_queue=2)
    embed_piece, (begun, go_on) = embed_pieces._embed, (threading.Event(), threading.Event())

    async def embed_later(start: int, *others: Any) -> Any:
        if start == 2:
            begun.set()
            assert await asyncio.to_thread(go_on.wait, 60)
        return await embed_piece(start, *others)

    monkeypatch.setattr(embed_pieces, "_embed", embed_later)
    body = {"model": "embedder", "input": ["a", "b", "c", "d"]}
    try:
        with (
            ThreadPoolExecutor(3) as pool,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            long = pool.submit(httpx.post, f"{server.url}/v1/embeddings", json=body, timeout=60)
            assert begun.wait(60)
            with held(engine_of(server, "embedder")):
                others = [pool.submit(embed, http, input=text) for text in "xy"]
                wait_for(lambda: metric(http, "maskdial_queue_size", model="embedder") == 2)
                go_on.set()
                wait_for(lambda: metric(http, "maskdial_queue_size", model="embedder") == 4)
            assert long.result().status_code == 200
            assert all(each.result() for each in others)
    finally:
        server.stop()


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    (encoded,) = vectors_of(embed(http, input=TEXTS[0], encoding_format="base64"))
    assert isinstance(encoded, str)
    vector = np.frombuffer(base64.b64decode(encoded), "<f4")
    (expected,) = vectors_of(embed(http, input=TEXTS[0]))
    assert vector.tolist() == expected


def test_blank_texts_among_others_are_embedded_as_they_are(http: httpx.Client) -> None:
    data = embed(http, input=["A ship.", " ", ""])["data"]
    alone = embed(http, input="A ship.")["data"][0]["embedding"]
    assert len(data) == 3
    assert data[0]["embedding"] == alone


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("dimensions", [None, 13])
def test_bytes_and_bits_are_those_of_sentence_transformers(
    http: httpx.Client, dtype: Any, dimensions: int | None
) -> None:
    """With ranges from -1 to 1, of vectors that are cut first and have length 1."""
    floats = np.array(native(http, TEXTS, normalize=True, dimensions=dimensions), np.float32)
    ranges = np.array([[-1.0], [1.0]]).repeat(floats.shape[1], axis=1)
    expected: Any = quantize_embeddings(floats, dtype, ranges)
    assert len(np.unique(expected)) > 2
    asked = {"output_dtype": dtype, "dimensions": dimensions}
    assert native(http, TEXTS, **asked) == expected.tolist()
    assert vectors_of(embed(http, input=TEXTS, **asked)) == expected.tolist()
    encoded = [base64.b64encode(row.tobytes()).decode() for row in expected]
    assert native(http, TEXTS, encoding_format="base64", **asked) == encoded
    assert vectors_of(embed(http, input=TEXTS, encoding_format="base64", **asked)) == encoded
    # Alone as among others
    assert native(http, TEXTS[1], **asked) == expected[1:2].tolist()


def test_bytes_need_vectors_of_length_1(http: httpx.Client) -> None:
    body = {"model": "embedder", "inputs": "a", "normalize": False}
    refused = http.post("/embed", json=body | {"output_dtype": "int8"})
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("normalize: integers are of vectors of length 1")
    assert http.post("/embed", json=body | {"output_dtype": "binary"}).status_code == 200


def test_token_ids_are_used_unchanged(http: httpx.Client) -> None:
    ids = [
        [token["id"] for token in tokens]
        for tokens in http.post("/tokenize", json={"inputs": TEXTS, "model": "embedder"}).json()
    ]
    assert vectors_of(embed(http, input=ids)) == native(http, TEXTS)
    assert vectors_of(embed(http, input=ids[0])) == native(http, TEXTS[0])
    assert vectors_of(embed(http, input=ids[0][1:-1])) != native(http, TEXTS[0])


def test_long_inputs_are_cut_only_when_asked(http: httpx.Client) -> None:
    whole = [2, *([5] * 100), 3]
    for value in (LONG, whole):
        reply = http.post("/v1/embeddings", json={"model": "embedder", "input": value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "input"
        assert "the text has 102 tokens" in reply.json()["error"]["message"]
    assert vectors_of(embed(http, input=LONG, truncate=True)) == native(http, LONG, truncate=True)
    cut = embed(http, input=[whole, [2, 5, 3]], truncate=True)
    assert vectors_of(cut)[0] == vectors_of(embed(http, input=whole[:64]))[0]
    left = embed(http, input=whole, truncate=True, truncation_direction="left")
    assert vectors_of(left) == vectors_of(embed(http, input=whole[-64:]))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": [" ", ""]}, "input", "must not be empty"),
        ({"input": ["a", 5]}, "input", "item 1 must be a string"),
        ({"input": [[5], []]}, "input[1]", "no tokens"),
        ({"input": ["a", LONG]}, "input[1]", "the text has 102 tokens"),
        ({"input": [[5], [100_264, 5]]}, "input[1]", "check_embedding_ctx_length=False"),
        ({"input": [9906, 1917]}, "input", "check_embedding_ctx_length=False"),
        ({"input": ["a"] * 2049}, "input", "2049 texts; one request may carry at most 2048"),
        ({"input": [*["a"] * 20, LONG]}, "input[20]", "the text has 102 tokens"),
        ({"input": [[5]] * 17 + [[]]}, "input[17]", "no tokens"),
        ({"input": "a", "dimensions": 33}, "dimensions", "between 1 and 32"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'base64'"),
        ({"input": "a", "output_dtype": "int4"}, "output_dtype", "'ubinary'"),
        ({"input": "a", "model": "ranker"}, "model", "cannot do embed"),
    ],
)
def test_inputs_that_cannot_be_embedded(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    reply = http.post("/v1/embeddings", json={"model": "embedder"} | body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_inference_client(url: str, http: httpx.Client) -> None:
    for path in ("embed", "models/embedder"):
        client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
        np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), native(http, TEXTS[0]))


def rank(http: httpx.Client, path: str = "/v1/rerank", **body: Any) -> Any:
    reply = http.post(path, json={"model": "ranker", "query": "a b", "documents": TEXTS} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_rerank_in_both_dialects(http: httpx.Client) -> None:
    body = {"model": "ranker", "query": "a b", "texts": TEXTS}
    expected = http.post("/rerank", json=body).json()
    reply = rank(http)
    assert reply["model"] == "ranker"
    assert reply["id"].startswith("rerank-")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 9
    assert reply["results"] == [
        {"index": each["index"], "relevance_score": each["score"]} for each in expected
    ]
    for path in ("/v2/rerank", "/rerank"):
        assert rank(http, path)["results"] == reply["results"]
    # litellm sends Cohere's top_n to text-embeddings-inference's route, too.
    assert http.post("/rerank", json=body | {"top_n": 2}).json() == expected[:2]
    objects = [{"text": text} for text in TEXTS]
    best = rank(http, documents=objects, top_n=2, return_documents=True)["results"]
    assert best == [
        each | {"document": {"text": TEXTS[each["index"]]}} for each in reply["results"][:2]
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": []}, "documents", "at least 1"),
        ({"documents": ["a", ""]}, "documents[1]", "must not be empty"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1]", "must be a string"),
        ({"documents": ["a", LONG]}, "documents[1]", "take 105 tokens together"),
        ({"documents": ["a"] * 9}, "documents", "at most 8"),
        ({"query": ""}, "query", "must not be empty"),
        ({"top_n": 0}, "top_n", "at least 1"),
        ({"model": "embedder"}, "model", "cannot do rerank"),
    ],
)
def test_documents_that_cannot_be_ranked(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "ranker", "query": "a b", "documents": TEXTS} | body
    for path in ("/v1/rerank", "/v2/rerank"):
        reply = http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert words in reply.json()["error"]["message"]
    # At the path that it shares, the errors are the native API's.
    reply = http.post("/rerank", json=body)
    assert reply.status_code == 422
    assert words in reply.json()["error"]
