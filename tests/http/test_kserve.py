"""KServe's and Triton's inference: tensors in and out, as JSON and as bytes, and `:predict`."""

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.registry.catalog import STARTER_FOLDER
from tests.page import bundles

TEXTS = ["A warm and funny film.", "A cold, dull film."]
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("kserve")
    models = {
        "hybrid": STARTER_FOLDER / "hybrid",
        "sentiment": STARTER_FOLDER / "sentiment",
        "embedder": bundles.make_embedder(folder / "embedder"),
        "ranker": bundles.make_ranker(folder / "ranker"),
        "reader": bundles.make_reader(folder / "reader"),
        "nli": bundles.make_nli(folder / "nli"),
        "tagger": bundles.make_tagger(folder / "tagger"),
    }
    running = start_server(models=models)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    running.stop()


def tensor(name: str, *texts: str, **others: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)} | others


def post(http: httpx.Client, path: str, body: object) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def infer(http: httpx.Client, model: str, *inputs: Any, **others: Any) -> dict[str, Any]:
    """The outputs by name."""
    reply = post(http, f"/v2/models/{model}/infer", {"inputs": inputs, **others})
    assert reply["model_version"] == "1"
    return {each["name"]: each for each in reply["outputs"]}


def array(output: Any) -> NDArray[Any]:
    kinds = {"FP32": np.float32, "INT64": np.int64, "BYTES": np.str_}
    return np.array(output["data"], kinds[output["datatype"]]).reshape(output["shape"])


def test_labels_and_scores_are_those_of_the_tasks_route(http: httpx.Client) -> None:
    found = infer(http, "sentiment", tensor("inputs", *TEXTS))
    wanted = post(http, "/classify", {"inputs": TEXTS, "model": "sentiment"})
    assert array(found["label"]).tolist() == [[each["label"] for each in row] for row in wanted]
    scores = np.array([[each["score"] for each in row] for row in wanted], np.float32)
    np.testing.assert_array_equal(array(found["score"]), scores)
    top = infer(http, "sentiment", tensor("input-0", *TEXTS), parameters={"top_k": 1})
    assert top["label"]["shape"] == [2, 1]


def test_vectors_are_float32(http: httpx.Client) -> None:
    found = infer(http, "embedder", tensor("inputs", *TEXTS), parameters={"normalize": True})
    body = {"inputs": TEXTS, "model": "embedder", "normalize": True}
    wanted = np.array(post(http, "/embed", body), np.float32)
    np.testing.assert_array_equal(array(found["embedding"]), wanted)


def test_texts_go_on(http: httpx.Client) -> None:
    found = infer(http, "hybrid", tensor("text_input", *TEXTS), parameters=GREEDY)
    body = {"inputs": TEXTS, "model": "hybrid", "parameters": GREEDY}
    texts = [each["generated_text"] for each in post(http, "/generate", body)]
    assert found["text_output"]["data"] == texts
    several = {"n": 3, "max_new_tokens": 4, "temperature": 1.0, "seed": 1}
    found = infer(http, "hybrid", tensor("text_input", *TEXTS), parameters=several)
    assert found["text_output"]["shape"] == [2, 3]


def test_masks_are_filled(http: httpx.Client) -> None:
    texts = ["The [MASK] slept.", "A [MASK] sang."]
    found = infer(http, "hybrid:full", tensor("inputs", *texts), parameters={"top_k": 3})
    wanted = post(http, "/fill-mask", {"inputs": texts, "parameters": {"top_k": 3}})
    assert array(found["token"]).tolist() == [[each["token"] for each in row] for row in wanted]
    assert found["token_str"]["data"] == [each["token_str"] for row in wanted for each in row]
    assert found["score"]["shape"] == [2, 3]
    two = infer(http, "hybrid:full", tensor("inputs", "The [MASK] saw the [MASK]."))
    assert two["token"]["shape"] == [1, 2, 5]
    inputs = [tensor("inputs", "a [MASK]", "[MASK] [MASK]")]
    reply = http.post("/v2/models/hybrid:full/infer", json={"inputs": inputs})
    assert reply.status_code == 400
    assert "different numbers of masks" in reply.json()["error"]


def test_tasks_with_several_inputs(http: httpx.Client) -> None:
    texts = ["red", "a green tree"]
    found = infer(http, "ranker", tensor("query", "tree"), tensor("texts", *texts))
    wanted = post(http, "/rerank", {"query": "tree", "texts": texts, "model": "ranker"})
    assert found["index"]["data"] == [each["index"] for each in wanted]
    question, context = "Who slept?", "The king slept. The queen sang."
    found = infer(http, "reader", tensor("question", question), tensor("context", context))
    body = {"inputs": {"question": question, "context": context}, "model": "reader"}
    (answer,) = map(json.loads, found["output"]["data"])
    assert answer == post(http, "/question-answering", body)
    labels = ["sea", "farming", "war"]
    found = infer(http, "nli", tensor("inputs", *TEXTS), tensor("candidate_labels", *labels))
    assert found["label"]["shape"] == [2, 3]
    assert set(found["label"]["data"]) == set(labels)


def test_answers_without_a_shape_are_json(http: httpx.Client) -> None:
    found = infer(http, "tagger", tensor("inputs", *TEXTS))
    wanted = post(http, "/token-classify", {"inputs": TEXTS, "model": "tagger"})
    assert [json.loads(each) for each in found["output"]["data"]] == wanted


def binary(*texts: str) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def in_bytes(name: str, num_texts: int, size: int) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": [num_texts], "datatype": "BYTES", "parameters": parameters}


def send(
    http: httpx.Client, model: str, body: object, content: bytes, length: int | str | None = None
) -> httpx.Response:
    header = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(header) if length is None else length)}
    return http.post(f"/v2/models/{model}/infer", content=header + content, headers=headers)


def test_tensors_as_bytes(http: httpx.Client) -> None:
    content = binary(*TEXTS)
    body = {
        "id": "7",
        "inputs": [in_bytes("inputs", 2, len(content))],
        "outputs": [
            {"name": "score", "parameters": {"binary_data": True}},
            {"name": "label", "parameters": {"binary_data": True}},
        ],
    }
    reply = send(http, "sentiment", body, content)
    assert reply.status_code == 200
    length = int(reply.headers["inference-header-content-length"])
    header = json.loads(reply.content[:length])
    assert header["id"] == "7"
    score, label = header["outputs"]
    as_json = infer(http, "sentiment", tensor("inputs", *TEXTS))
    scores = np.frombuffer(reply.content, "<f4", 4, length)
    np.testing.assert_array_equal(scores.reshape(score["shape"]), array(as_json["score"]))
    assert score["parameters"]["binary_data_size"] == 16
    labels = binary(*as_json["label"]["data"])
    assert reply.content[length + 16 :] == labels
    assert label["parameters"]["binary_data_size"] == len(labels)
    every = body | {"outputs": None, "parameters": {"binary_data_output": True}}
    reply = send(http, "sentiment", every, content)
    assert b'"data"' not in reply.content
    mixed = body | {"outputs": [{"name": "label"}]}
    assert send(http, "sentiment", mixed, content).json()["outputs"] == [as_json["label"]]


ONE = binary("a b")
REFUSED: list[tuple[Any, bytes, int | str | None, str]] = [
    ({"inputs": []}, b"", None, "inputs: must have between 1 and 16 inputs, not 0"),
    ({"inputs": [tensor("a", "b", datatype="FP32")]}, b"", None, "datatype 'FP32'; models here"),
    (
        {"inputs": [tensor("a", "b", shape=[2**40])]},
        b"",
        None,
        "1,099,511,627,776 elements by its shape",
    ),
    (
        {"inputs": [tensor("a", "b", shape=[2**40, 2**40])]},
        b"",
        None,
        "1,208,925,819,614,629,174,706,176 elements by its shape",
    ),
    (
        {"inputs": [tensor("a", "b", shape=[-1])]},
        b"",
        None,
        "shape [-1]; it must have at least one",
    ),
    ({"inputs": [tensor("a", "b", shape=[0])]}, b"", None, "it must have at least one text"),
    ({"inputs": [tensor("a", "b", shape=[])]}, b"", None, "it must have at least one text"),
    ({"inputs": [tensor("a", "b", shape=[1] * 9)]}, b"", None, "shape: must have at most 8"),
    ({"inputs": [tensor("a", "b", shape=[1.5])]}, b"", None, "shape[0]: Input should be a valid"),
    (
        {"inputs": [tensor("a", "b", data=[7])]},
        b"",
        None,
        "element 0 of input 'a' must be a string",
    ),
    ({"inputs": [tensor("a", "b", data=[["b"], "c"])]}, b"", None, "must be a string"),
    ({"inputs": [tensor("a", "b", data=None)]}, b"", None, "must have either data or binary_data"),
    ({"inputs": [tensor("a", "")]}, b"", None, "inputs[0] must not be empty"),
    ({"inputs": [tensor("a", "b"), tensor("a", "b")]}, b"", None, "two inputs have the same name"),
    (
        {"inputs": [tensor("a", "b"), tensor("b", "b", "c")]},
        b"",
        None,
        "as many texts as each other",
    ),
    ({"inputs": [tensor("a", "b")], "outputs": [{"name": "x"}]}, b"", None, "but 'label', 'score'"),
    ({"inputs": [tensor("a", "b")], "parameters": {"timeout": "5"}}, b"", None, "microseconds"),
    ({"inputs": [in_bytes("a", 1, 7)]}, ONE[:-1], None, "has 7 bytes (binary_data_size); the body"),
    ({"inputs": [in_bytes("a", 1, 2**40)]}, ONE, None, "has 1,099,511,627,776 bytes"),
    ({"inputs": [in_bytes("a", 1, 7)]}, ONE + b"x", None, "has 1 bytes beyond its tensors"),
    ({"inputs": [in_bytes("a", 2, 7)]}, ONE, None, "has 1 elements; its shape says 2"),
    ({"inputs": [in_bytes("a", 1, 7)]}, b"\xff" * 7, None, "ends beyond the tensor's 7 bytes"),
    ({"inputs": [in_bytes("a", 1, 3)]}, b"\x03\0\0", None, "ends beyond the tensor's 3 bytes"),
    (
        {"inputs": [in_bytes("a", 1, 5)]},
        b"\1\0\0\0\xff",
        None,
        "element 0 of input 'a' is not UTF-8",
    ),
    ({"inputs": [tensor("a", "b")]}, b"x", None, "1 bytes beyond its tensors"),
    ({"inputs": [tensor("a", "b")]}, b"", 10**6, "at most the body's"),
    ({"inputs": [tensor("a", "b")]}, b"", "-1", "at most the body's"),
    ({"inputs": [tensor("a", "b")]}, b"", "9" * 5000, "at most the body's"),
    ({"inputs": [tensor("a", "b")]}, b"", "0" * 5000, "at most the body's"),
    (
        {"inputs": [in_bytes("a", 2**40, 7)]},
        ONE,
        None,
        "has 1,099,511,627,776 elements by its shape; an input may have 16,384",
    ),
    ({"inputs": [tensor("a", "b", shape=[16_385])]}, b"", None, "16,385 elements by its shape"),
    ({"inputs": [tensor("a", "b", data=["b"] * 9)]}, b"", None, "has 9 elements; its shape says 1"),
    ({"inputs": [in_bytes("a", 1, 14)]}, ONE * 2, None, "has more elements than the 1 of its shap"),
    ({"inputs": [tensor("a", "b")]}, b"", 3, "not valid JSON"),
]


@pytest.mark.parametrize(
    ("body", "content", "length", "words"), REFUSED, ids=[words for *_, words in REFUSED]
)
def test_bad_tensors(
    http: httpx.Client, body: Any, content: bytes, length: int | str | None, words: str
) -> None:
    reply = send(http, "sentiment", body, content, length)
    assert reply.status_code == 400
    assert words in reply.json()["error"]
    assert "\n" not in reply.json()["error"]


def test_what_the_protocol_lets_a_server_ignore_is_named(http: httpx.Client) -> None:
    """KServe's own client repeats the name of the model, which tells nothing new."""
    given = tensor("inputs", *TEXTS, parameters={"content_type": "str"})
    output = {"name": "score", "parameters": {"format": "x"}}
    body = {"model_name": "sentiment", "inputs": [given], "outputs": [output]}
    more = {"headers": "x", "binary_data_output": False, "top_k": 1}
    reply = http.post("/v2/models/sentiment/infer", json=body | {"parameters": more})
    assert reply.status_code == 200, reply.text
    assert reply.json()["outputs"][0]["shape"] == [2, 1]
    assert reply.headers["x-ignored-fields"].split(", ") == [
        "inputs.parameters.content_type",
        "outputs.parameters.format",
        "parameters.headers",
    ]


def test_a_raw_request_is_one_text(http: httpx.Client) -> None:
    """Triton's, without any JSON: the body is the only element of the only input."""
    path, headers = "/v2/models/sentiment/infer", {"inference-header-content-length": "0"}
    reply = http.post(path, content=TEXTS[0].encode(), headers=headers)
    body = {"inputs": [tensor("a", TEXTS[0])], "parameters": {"binary_data_output": True}}
    assert reply.content == http.post(path, json=body).content
    assert reply.headers["inference-header-content-length"] != "0"
    for content, words in ((b"", "must not be empty"), (b"\xff", "is not UTF-8")):
        reply = http.post(path, content=content, headers=headers)
        assert reply.status_code == 400
        assert words in reply.json()["error"]


def test_tritons_configuration_and_statistics(http: httpx.Client) -> None:
    config = http.get("/v2/models/embedder/config").json()
    assert config["name"] == "embedder"
    assert config["input"] == [{"name": "inputs", "data_type": "TYPE_STRING", "dims": [-1]}]
    assert config["output"] == [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1]}]
    assert config["model_transaction_policy"] == {"decoupled": False}
    assert http.get("/v2/models/hybrid/config").json()["model_transaction_policy"]["decoupled"]

    def statistics(path: str) -> dict[str, Any]:
        found = http.get(path).json()["model_stats"]
        return {each["name"]: each for each in found}

    before = statistics("/v2/models/ranker/stats")["ranker"]
    infer(http, "ranker", tensor("query", "tree"), tensor("texts", "red", "a tree"))
    bad = {"inputs": [tensor("query", "tree"), tensor("texts", "")]}
    assert http.post("/v2/models/ranker/infer", json=bad).status_code == 400
    after = statistics("/v2/models/ranker/versions/1/stats")["ranker"]
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["execution_count"] > before["execution_count"]
    for name in ("success", "queue", "compute_infer"):
        then, now = before["inference_stats"][name], after["inference_stats"][name]
        assert now["count"] > then["count"]
        assert now["ns"] > then["ns"]
    everything = statistics("/v2/models/stats")
    assert everything.keys() >= {"hybrid", "sentiment", "ranker"}
    assert everything["ranker"] == after
    for path in ("/v2/models/nobody/config", "/v2/models/nobody/stats"):
        assert http.get(path).status_code == 404


def test_versions_and_metadata(http: httpx.Client) -> None:
    body = {"inputs": [tensor("inputs", TEXTS[0])]}
    versioned = post(http, "/v2/models/sentiment/versions/1/infer", body)
    assert versioned == post(http, "/v2/models/sentiment/infer", body)
    reply = http.post("/v2/models/sentiment/versions/2/infer", json=body)
    assert reply.status_code == 404
    assert "version 1 only" in reply.json()["error"]
    for name in ("sentiment", "embedder", "hybrid", "ranker", "reader", "tagger"):
        metadata = http.get(f"/v2/models/{name}/versions/1").json()
        assert metadata == http.get(f"/v2/models/{name}").json()
        inputs = [tensor(each["name"], "The king slept.") for each in metadata["inputs"]]
        found = infer(http, name, *inputs)
        named = {each["name"]: each["datatype"] for each in metadata["outputs"]}
        assert {each["name"]: each["datatype"] for each in found.values()} == named
    assert http.get("/v2/models/hybrid/versions/2").status_code == 404
    assert http.get("/v2/models/hybrid/versions/1/ready").json()["ready"]
    assert http.post("/v2/models/nobody/infer", json=body).status_code == 404


def test_a_timeout_of_triton_is_in_microseconds(http: httpx.Client) -> None:
    body = {"inputs": [tensor("inputs", TEXTS[0])], "parameters": {"timeout": 1}}
    reply = http.post("/v2/models/sentiment/infer", json=body)
    assert reply.status_code == 504


def test_prompts_go_on_as_in_tritons_generate_extension(http: httpx.Client) -> None:
    body = {"text_input": TEXTS[0], "parameters": GREEDY, "id": "3"}
    reply = post(http, "/v2/models/hybrid/generate", body)
    wanted = post(http, "/generate", {"inputs": TEXTS[0], "parameters": GREEDY})
    header = {"model_name": "hybrid", "model_version": "1", "id": "3"}
    assert reply == header | {"text_output": wanted["generated_text"]}
    streamed = http.post("/v2/models/hybrid/generate_stream", json=body)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
    assert [each | {"text_output": ""} for each in events] == [header | {"text_output": ""}] * 6
    assert "".join(each["text_output"] for each in events) == reply["text_output"]


def test_predictions(http: httpx.Client) -> None:
    instances: list[Any] = [TEXTS[0], {"inputs": TEXTS[1], "parameters": {"top_k": 1}}]
    reply = post(http, "/v1/models/sentiment:predict", {"instances": instances})
    wanted = [
        post(http, "/models/sentiment", {"inputs": TEXTS[0]}),
        post(http, "/models/sentiment", instances[1]),
    ]
    assert reply == {"predictions": wanted}
    instance = {"inputs": TEXTS[0], "parameters": GREEDY}
    (prediction,) = post(http, "/v1/models/hybrid:predict", {"instances": [instance]})[
        "predictions"
    ]
    assert prediction == post(http, "/models/hybrid", instance)
    for bad, words in (
        ([], "instances: must have at least 1 instances, not 0"),
        ([7], "instances[0]"),
        ([{"inputs": "a"}, {"inputs": ""}], "instances[1]: inputs: must not be empty"),
        ([{"inputs": "a", "stream": True}], "instances[0]: stream: predictions come as a whole"),
        (["a"] * 257, "256"),
    ):
        reply = http.post("/v1/models/sentiment:predict", json={"instances": bad})
        assert reply.status_code == 400
        assert words in reply.json()["error"]
