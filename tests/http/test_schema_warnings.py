"""`x-schema-warnings`: every route names the constraints of a schema that it does not enforce."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from maskdial.http.replies import warnings_header
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

# OpenAPI's formats, and what no grammar enforces.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 9},
        "key": {"type": "string", "format": "password", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["a"]}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["id", "key", "tags"],
    "additionalProperties": False,
}
WARNINGS = [
    "#/properties/key: format 'password' is not enforced",
    "#/properties/tags: uniqueItems is not enforced",
]
MESSAGES = [{"role": "user", "content": "Go"}]
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "second", "parameters": SCHEMA}},
]
NAMED = {"name": "s", "schema": SCHEMA}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "/generate",
        {
            "inputs": "x",
            "parameters": {
                "grammar": {"type": "json", "value": SCHEMA},
                "max_new_tokens": 100,
            },
        },
    ),
    "completions": ("/v1/completions", {"prompt": "x", "guided_json": SCHEMA, "max_tokens": 100}),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": NAMED},
            "max_tokens": 100,
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", **NAMED}},
            "max_output_tokens": 100,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": 100,
        },
    ),
}
TOOL_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "max_tokens": 5},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "x",
            "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],  # type: ignore[dict-item]
            "max_output_tokens": 16,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "tools": [
                {"name": "first", "input_schema": {"type": "object"}},
                {"name": "second", "input_schema": SCHEMA},
            ],
            "max_tokens": 5,
        },
    ),
}


@pytest.fixture(scope="module")
def served(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")
    models = {
        name: make_chat_bundle(folder / name, (TEMPLATES / f"{name}.jinja").read_text())
        for name in ("hermes", "qwen3_coder")
    }
    server = start_server(models=models | {"hybrid": STARTER_FOLDER / "hybrid"})
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def post(
    served: httpx.Client, path: str, body: dict[str, Any], model: str, stream: bool
) -> httpx.Response:
    """A request's reply, whole."""
    if path == "/generate" and stream:
        path, stream = "/generate_stream", False
    reply = served.post(path, json=body | {"model": model} | ({"stream": True} if stream else {}))
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_what_a_schema_is_not_held_to(served: httpx.Client, route: str, stream: bool) -> None:
    path, body = ROUTES[route]
    reply = post(served, path, body, "hermes", stream)
    assert reply.headers["x-schema-warnings"].split("; ") == WARNINGS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", TOOL_ROUTES)
@pytest.mark.parametrize("model", ["hermes", "qwen3_coder"])
def test_one_such_tool_refuses_no_request(
    served: httpx.Client, model: str, route: str, stream: bool
) -> None:
    """Whether the model writes arguments as JSON, or in a notation of its own."""
    path, body = TOOL_ROUTES[route]
    reply = post(served, path, body, model, stream)
    told = reply.headers["x-schema-warnings"].split("; ")
    assert told == [f"second{warning}" for warning in WARNINGS]


@pytest.mark.parametrize("model", ["hermes", "qwen3_coder"])
def test_the_rest_of_such_a_tool_is_enforced(served: httpx.Client, model: str) -> None:
    choice = {"type": "function", "function": {"name": "second"}}
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    body |= {"parallel_tool_calls": False, "temperature": 0}
    reply = post(served, "/v1/chat/completions", body, model, stream=False).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    held = json.loads(json.dumps(SCHEMA))
    del held["properties"]["tags"]["uniqueItems"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), held)


def test_a_schema_that_is_enforced_has_no_warning(served: httpx.Client) -> None:
    body = {"prompt": "x", "guided_json": {"type": "integer", "maximum": 5}, "max_tokens": 5}
    reply = post(served, "/v1/completions", body, "hybrid", stream=False)
    assert "x-schema-warnings" not in reply.headers
    plain = post(served, "/v1/completions", {"prompt": "x", "max_tokens": 2}, "hybrid", False)
    assert "x-schema-warnings" not in plain.headers


@pytest.mark.parametrize("value", [9007199254740993, 18446744073709551617, -(10**25) - 1])
@pytest.mark.parametrize("route", ROUTES)
def test_a_large_integer_arrives_as_it_was_sent(
    served: httpx.Client, route: str, value: int
) -> None:
    """It is not what a float makes of it that is refused; one that a float holds is written."""
    path, body = ROUTES[route]
    text = json.dumps(body).replace(json.dumps(SCHEMA), f'{{"const": {value}}}')
    refused = served.post(path, json=json.loads(text) | {"model": "hermes"})
    assert refused.status_code in (400, 422)
    assert f"const {value} cannot be enforced exactly" in refused.text
    text = json.dumps(body).replace(json.dumps(SCHEMA), '{"const": 9007199254740994}')
    assert "9007199254740994" in served.post(path, json=json.loads(text) | {"model": "hermes"}).text


@pytest.mark.parametrize("model", ["hermes", "qwen3_coder"])
def test_large_integers_of_tools(served: httpx.Client, model: str) -> None:
    """A notation that is no JSON takes any integer; otherwise it is refused, and the tool named."""
    schema = {
        "type": "object",
        "properties": {"id": {"enum": [9007199254740993]}},
        "required": ["id"],
    }
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 100}
    reply = served.post("/v1/chat/completions", json=body | {"model": model})
    if reply.status_code == 200:
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"id": 9007199254740993}
    else:
        message = reply.json()["error"]["message"]
        assert "tool 'find'" in message
        assert "enum 9007199254740993 cannot be enforced exactly" in message


def test_the_header_is_plain_and_short() -> None:
    told = warnings_header(['#/a;b\n"\x7fé: not is not enforced', "second"])["x-schema-warnings"]
    assert told == r"#/a\u003bb\n\"\u007f\u00e9: not is not enforced; second"
    many = warnings_header([f"#/{'x' * 90}{i}" for i in range(50)])["x-schema-warnings"]
    assert len(many) < 1100
    assert many.endswith("; and 40 more")
    assert warnings_header([]) == {}
