"""Streams have no character at which a client may see the end of a line, but their own."""

import json
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from maskdial.http.sse import data_frame

ENDS = "\u0085a\u2028\u2029b"
SCHEMA = {"enum": [ENDS]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ends", "schema": SCHEMA}}
CHAT: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Go on."}],
    "stream": True,
}
GRAMMAR = {"type": "json", "value": SCHEMA}
PROMPT: dict[str, Any] = {"model": "hybrid", "inputs": "The king"}
BODIES: dict[str, dict[str, Any]] = {
    "/generate_stream": PROMPT | {"parameters": {"grammar": GRAMMAR}},
    "/generate": PROMPT | {"parameters": {"grammar": GRAMMAR}, "stream": True},
    "/v1/completions": {
        "model": "hybrid",
        "prompt": "The king",
        "stream": True,
        "max_tokens": 60,
        "response_format": FORMAT,
    },
    "/v1/chat/completions": CHAT | {"response_format": FORMAT},
    "/v1/responses": {
        "model": "chat",
        "input": "Go on.",
        "stream": True,
        "text": {"format": {"type": "json_schema", "name": "ends", "schema": SCHEMA}},
    },
    "/v1/messages": CHAT
    | {"max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


def strings_of(content: Any) -> list[str]:
    if isinstance(content, dict):
        return [each for value in content.values() for each in strings_of(value)]
    if isinstance(content, list):
        return [each for value in content for each in strings_of(value)]
    return [content] if isinstance(content, str) else []


@pytest.mark.parametrize("path", BODIES)
def test_every_streams_lines_are_those_of_its_events(openai_http: httpx.Client, path: str) -> None:
    with openai_http.stream("POST", path, json=BODIES[path]) as reply:
        assert reply.status_code == 200, reply.read()
        lines = list(reply.iter_lines())
    assert all(line == "" or line.startswith(("data: ", "event: ")) for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    assert set(ENDS) <= set("".join(strings_of(events)))


def test_an_error_within_a_stream_as_well() -> None:
    frame = data_frame(json.dumps({"error": ENDS}, ensure_ascii=False).encode())
    first, *rest = frame.decode().splitlines()
    assert rest == [""]
    assert json.loads(first.removeprefix("data: ")) == {"error": ENDS}


def test_other_characters_of_the_same_bytes_stay() -> None:
    text = "\u0142\u2027\u202a\u3028\u0105\U0001f385"
    assert data_frame(text.encode()) == b"data: " + text.encode() + b"\n\n"


def test_the_hubs_client_reads_them(openai_server: Any) -> None:
    client = InferenceClient(model=f"{openai_server.url}/models/chat")
    grammar: Any = {"type": "regex", "value": ENDS}
    pieces = client.text_generation("Go on.", stream=True, grammar=grammar, max_new_tokens=40)
    assert "".join(pieces) == ENDS
