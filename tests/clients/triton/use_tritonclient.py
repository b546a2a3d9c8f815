"""tritonclient over HTTP and gRPC: health, metadata, vectors, texts, a stream, an error.

python use_tritonclient.py http://127.0.0.1:8000 MODEL EMBEDDER GRPC_PORT
"""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

TEXTS = ["The ship left at dawn.", "She baked bread.", "A ship sailed in the morning."]
REFUSAL = "input 'inputs' has the datatype 'FP32'; models here read texts, which are BYTES"


def over_grpc(address: str, model: str, embedder: str, vectors: Any, text: bytes) -> None:
    """The answers are those of HTTP."""
    client = triton_grpc.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model, "1")
    assert client.get_server_metadata().name == "maskdial"
    assert client.get_model_metadata(embedder).outputs[0].datatype == "FP32"
    assert client.get_model_config(embedder).config.output[0].name == "embedding"
    assert client.get_inference_statistics(embedder).model_stats[0].inference_count > 0
    given = triton_grpc.InferInput("inputs", [3], "BYTES")
    given.set_data_from_numpy(np.array([each.encode() for each in TEXTS], np.object_))
    reply = client.infer(embedder, [given], request_id="7", client_timeout=60)
    assert reply.get_response().id == "7"
    np.testing.assert_array_equal(reply.as_numpy("embedding"), vectors)

    prompt = triton_grpc.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"Once upon a time"], np.object_))
    replies: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: replies.put((result, error)))
    parameters = {"max_new_tokens": 8, "do_sample": False}
    client.async_stream_infer(model, [prompt], parameters=parameters, request_id="8")
    pieces, is_last = [], False
    while not is_last:
        result, error = replies.get(timeout=60)
        assert error is None, error
        pieces += result.as_numpy("text_output").tolist()
        is_last = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    assert len(pieces) == 8
    assert b"".join(pieces) == text
    print("gRPC: vectors, and a stream of tokens")

    numbers = triton_grpc.InferInput("inputs", [1, 2], "FP32")
    numbers.set_data_from_numpy(np.zeros((1, 2), np.float32))
    refusal = ("", "")
    try:
        client.infer(embedder, [numbers])
    except InferenceServerException as error:
        refusal = error.status(), error.message()
    assert refusal == ("StatusCode.INVALID_ARGUMENT", REFUSAL)
    print("gRPC: a refusal of numbers")


def main(url: str, model: str, embedder: str, grpc_port: str) -> None:
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(embedder)
    assert client.is_model_ready(model, "1")
    metadata = client.get_model_metadata(embedder)
    assert [each["name"] for each in metadata["outputs"]] == ["embedding"]
    assert embedder in {each["name"] for each in client.get_model_repository_index()}
    print("health and metadata")

    texts = np.array([text.encode() for text in TEXTS], np.object_)
    vectors = []
    for in_bytes, out_bytes in ((True, None), (True, True), (True, False), (False, False)):
        given = triton.InferInput("inputs", [3], "BYTES")
        given.set_data_from_numpy(texts, binary_data=in_bytes)
        wanted = None
        if out_bytes is not None:
            wanted = [triton.InferRequestedOutput("embedding", binary_data=out_bytes)]
        reply = client.infer(embedder, [given], outputs=wanted, request_id="7")
        assert reply.get_response()["id"] == "7"
        vectors.append(reply.as_numpy("embedding"))
        assert vectors[-1].shape == (3, 384)
        assert vectors[-1].dtype == np.float32
    for each in vectors:
        np.testing.assert_array_equal(each, vectors[0])
    assert (vectors[0] @ vectors[0][0] > 0.5).tolist() == [True, False, True]
    print("vectors, as bytes and as JSON")

    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"Once upon a time"], np.object_))
    greedy = {"max_new_tokens": 8, "do_sample": False}
    replies = [
        client.infer(model, [prompt], model_version=version, parameters=greedy)
        for version in ("", "1")
    ]
    first, second = (reply.as_numpy("text_output").tolist() for reply in replies)
    assert first == second
    assert first[0]
    pending = client.async_infer(model, [prompt], parameters=greedy)
    assert pending.get_result().as_numpy("text_output").tolist() == first
    print("a text that goes on")

    numbers = triton.InferInput("inputs", [1, 2], "FP32")
    numbers.set_data_from_numpy(np.zeros((1, 2), np.float32))
    refusal = ""
    try:
        client.infer(embedder, [numbers])
    except InferenceServerException as error:
        refusal = error.message()
    assert refusal == REFUSAL
    print("a refusal of numbers")
    over_grpc(f"127.0.0.1:{grpc_port}", model, embedder, vectors[0], first[0])


if __name__ == "__main__":
    main(*sys.argv[1:5])
