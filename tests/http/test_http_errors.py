"""Bad input: each with its status and a sentence, and the server goes on."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from maskdial.config import Config

FILL = "The old king lived in a [MASK] by the sea."


def fill(**changes: object) -> bytes:
    return json.dumps({"inputs": FILL} | changes).encode()


def generate(**parameters: object) -> bytes:
    return json.dumps({"inputs": "Once upon a time", "parameters": parameters}).encode()


BAD = [
    ("/fill-mask", b'{"inputs": "no blank here"}', 422, "no mask"),
    ("/fill-mask", b'{"inputs": ""}', 422, "must not be empty"),
    ("/fill-mask", b'{"inputs": "  \\n"}', 422, "must not be empty"),
    ("/fill-mask", b'{"inputs": []}', 422, "at least one text"),
    ("/fill-mask", b'{"inputs": ["a [MASK]", "b [MASK]", "none"]}', 422, "inputs[2]"),
    ("/fill-mask", b'{"inputs": ["a [MASK]", 7]}', 422, "inputs[1] must be a string"),
    ("/fill-mask", b'{"inputs": 7}', 422, "must be a string"),
    ("/fill-mask", b"{}", 422, "inputs: this field is required"),
    ("/fill-mask", b"", 422, "not valid JSON"),
    ("/fill-mask", b"[]", 422, "must be a JSON object"),
    ("/fill-mask", b'{"inputs": "a [MASK]"', 422, "not valid JSON"),
    ("/fill-mask", b'{"inputs": "\xff\xfe [MASK]"}', 422, "not valid JSON"),
    ("/fill-mask", fill(surprise=1), 422, "surprise: unknown field"),
    ("/fill-mask", fill(parameters={"topk": 3}), 422, "parameters.topk: unknown field"),
    ("/fill-mask", fill(parameters={"top_k": 0}), 422, "must be at least 1"),
    ("/fill-mask", fill(parameters={"top_k": 10**9}), 422, "between 1 and"),
    (
        "/fill-mask",
        fill(inputs="[MASK] " * 200, parameters={"top_k": 12000}),
        422,
        "2,400,000 answers for 200 masks",
    ),
    ("/fill-mask", b'{"inputs": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 422, "recursion"),
    (
        "/fill-mask",
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        422,
        "more than 30,000",
    ),
    ("/fill-mask", b'{"inputs": "\\ud800 [MASK]"}', 422, "not valid JSON"),
    ("/fill-mask", fill(timeout=0), 422, "timeout: must be between 0.001 and 86400"),
    ("/fill-mask", fill(timeout="soon"), 422, "timeout: "),
    ("/fill-mask", fill(priority=1), 422, "priority: unknown field"),
    ("/classify", b'{"inputs": "a", "timeout": -1}', 422, "timeout: must be between 0.001 and"),
    ("/classify", b'{"inputs": "a", "timeout": 86401}', 422, "between 0.001 and 86400"),
    ("/classify", b"null", 422, "must be a JSON object"),
    ("/fill-mask", fill(parameters={"top_k": "3"}), 422, "parameters.top_k"),
    ("/fill-mask", fill(parameters={"targets": []}), 422, "targets"),
    ("/fill-mask", fill(parameters={"targets": ["antidisestablishmentarianism"]}), 422, "splits"),
    ("/fill-mask", fill(model="nobody"), 404, "no model 'nobody'"),
    ("/fill-mask", fill(model="x" * 1_900_000), 404, f"no model '{'x' * 64}...'"),
    ("/fill-mask", fill(model="sentiment"), 422, "cannot do fill-mask"),
    ("/fill-mask", fill(inputs="word " * 3000 + "[MASK]"), 422, "takes at most"),
    ("/fill-mask", fill(inputs=["a [MASK]"] * 257), 422, "at most 256"),
    ("/classify", b'{"inputs": {"text": "a"}}', 422, "text_pair"),
    ("/classify", b'{"inputs": {"text": "a", "text_pair": 1}}', 422, "pair of strings"),
    (
        "/classify",
        b'{"inputs": "a", "parameters": {"function_to_apply": "relu"}}',
        422,
        "parameters.function_to_apply",
    ),
    ("/generate", generate(temperature=-1), 422, "between 0 and 100"),
    ("/generate", b'{"inputs": "a", "parameters": {"temperature": NaN}}', 422, "temperature"),
    ("/generate", b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 422, "temperature"),
    ("/generate", generate(temperature="hot"), 422, "parameters.temperature"),
    ("/generate", generate(max_new_tokens=0), 422, "at least 1"),
    ("/generate", generate(max_new_tokens=-1), 422, "at least 1"),
    ("/generate", generate(max_new_tokens=1e9), 422, "max_new_tokens"),
    ("/generate", generate(top_p=1.5), 422, "between 0 and 1"),
    ("/generate", generate(top_k=-1), 422, "at least 0"),
    ("/generate", generate(repetition_penalty=0), 422, "between 0.01 and 100"),
    ("/generate", generate(seed=-1), 422, "seed"),
    ("/generate", generate(stop="end"), 422, "parameters.stop"),
    ("/generate", b'{"inputs": ["a", "b"], "stream": true}', 422, "one prompt"),
    ("/generate", b'{"inputs": "%s"}' % (b"word " * 3000), 422, "prompt is too long"),
    ("/generate_stream", generate(max_new_tokens=0), 422, "at least 1"),
    ("/generate", b'{"inputs": "a", "max_new_tokens": 5}', 422, "max_new_tokens: this is one of"),
    ("/generate", b'{"inputs": "a", "parameters": {"n": Infinity}}', 422, "parameters.n"),
    ("/generate", generate(seed=10**400), 422, "parameters.seed: "),
    ("/generate", generate(logit_bias={"1" * 400: 1}), 422, "token id"),
    ("/generate", generate(logit_bias={"\u0665": 1}), 422, "token id"),
    ("/generate", generate(stop=["\ud800"]), 422, "not valid JSON"),
    ("/generate", b'{"inputs": "a", "timeout": 1e-400}', 422, "timeout: must be between 0.001 and"),
    ("/generate", b'{"inputs": "a", "cache_salt": ""}', 422, "between 1 and 256 characters"),
    ("/generate", b'{"messages": [{"role": "user", "content": "a"}]}', 422, "no chat template"),
    ("/generate", b'{"parameters": {}}', 422, "give a prompt as inputs"),
    ("/generate", b'{"inputs": [["a"]]}', 422, "inputs[0] must be a string"),
    ("/models/sentiment", b'{"inputs": "a", "messages": []}', 422, "messages: unknown field"),
    ("/models/hybrid", b'{"inputs": "a", "n": 2}', 422, "n: this is one of the parameters"),
    ("/models/nobody", b'{"inputs": "a"}', 404, "served models"),
    ("/nowhere", b"{}", 404, "no route"),
]


@pytest.mark.parametrize(("route", "body", "status", "words"), BAD)
def test_bad_input(http: httpx.Client, route: str, body: bytes, status: int, words: str) -> None:
    reply = http.post(route, content=body)
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert set(error) == {"error", "error_type"}
    assert words in error["error"]
    assert error["error_type"] == {422: "validation", 404: "not_found"}[status]
    assert "x-request-id" in reply.headers
    assert http.post("/fill-mask", content=fill()).status_code == 200


def test_nulls_are_not_given(http: httpx.Client) -> None:
    body = {"inputs": FILL, "parameters": {"top_k": None, "targets": None}, "model": None}
    assert (
        http.post("/fill-mask", json=body).json() == http.post("/fill-mask", content=fill()).json()
    )


def test_ten_megabytes_are_refused(http: httpx.Client) -> None:
    reply = http.post("/fill-mask", content=fill(inputs="x" * 10_000_000))
    assert reply.status_code == 413
    assert reply.json()["error_type"] == "too_large"
    assert f"{Config().max_body_bytes:,}" in reply.json()["error"]


def test_a_body_without_a_length_is_bounded_too(url: str) -> None:
    """Chunked, and the refusal comes while the client still sends."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(
            b"POST /fill-mask HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(100):
                connection.sendall(chunk)
        except OSError:
            pass  # it hung up on us, which is its right
        status = connection.makefile("rb").readline()
    assert b" 413 " in status


def test_wrong_method_and_authorization_header(http: httpx.Client) -> None:
    assert http.get("/fill-mask").status_code == 405
    headers = {"authorization": "Bearer hf_something"}
    assert http.post("/fill-mask", content=fill(), headers=headers).status_code == 200
