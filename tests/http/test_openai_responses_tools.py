"""`/v1/responses` with tools and reasoning, in several formats of calls.

The starter knows nothing of tools, but the grammar has it call them correctly.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ToolCallDelta,
    ToolFormat,
)
from maskdial.dialects.body import parse_body
from maskdial.dialects.openai.responses.body import ResponsesBody
from maskdial.dialects.openai.responses.items import conversation
from maskdial.dialects.openai.responses.output import ResponseOutput
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

pytestmark = pytest.mark.slow

FORMATS = ("hermes", "mistral_new", "mistral_old", "phi4_mini", "qwen3_coder")
# A template that tells what it was given.
MIRROR = """\
{{- raise_exception((tools or []) | length ~ ' ' ~ color | default('-')
    ~ ' ' ~ reasoning_effort | default('-') ~ ' ' ~ enable_thinking | default('-')) }}
"""
HERMES = ToolFormat(call='<tool_call>{"name": "$NAME", "arguments": $ARGUMENTS}</tool_call>')
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "name": "get_time",
    "parameters": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}
TOOLS = [WEATHER, CLOCK]
_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def url(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    root = tmp_path_factory.mktemp("bundles")
    sources = {name: (TEMPLATES / f"{name}.jinja").read_text() for name in (*FORMATS, "no_tools")}
    models = {name: make_chat_bundle(root / name, source) for name, source in sources.items()}
    models["mirror"] = make_chat_bundle(root / "mirror", MIRROR, tool_format=HERMES.to_json())
    thinking = (TEMPLATES / "qwq.jinja").read_text()
    tags = ["<tool_call>", "</think>"]
    models["thinker"] = make_chat_bundle(root / "thinker", thinking, tags=tags)
    server = start_server(models=models)
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(**body: Any) -> dict[str, Any]:
    return {"model": "hermes", "input": "What is the weather?", "tools": TOOLS} | body


def respond(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/v1/responses", json=ask(**body))
    assert reply.status_code == 200, reply.text
    return Response.model_validate(reply.json()).model_dump()


def events_of(http: httpx.Client, **body: Any) -> list[Any]:
    """The events of a stream, each checked against the SDK's type."""
    with http.stream("POST", "/v1/responses", json=ask(**body) | {"stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        _EVENTS.validate_python(event)
    return events


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def check_call(item: Any) -> None:
    """A call of one of the tools, with arguments that its schema allows."""
    assert item["type"] == "function_call"
    (schema,) = (tool["parameters"] for tool in TOOLS if tool["name"] == item["name"])
    jsonschema.validate(json.loads(item["arguments"]), schema)


@pytest.mark.parametrize("model", [*FORMATS, "no_tools"])
def test_required_calls_satisfy_their_schemas(http: httpx.Client, model: str) -> None:
    ids = set()
    for seed in range(5):
        response = respond(
            http, model=model, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert response["status"] == "completed"
        (item,) = response["output"]
        check_call(item)
        assert item["status"] == "completed"
        ids |= {item["id"], item["call_id"]}
    assert len(ids) == 10, "ids are unique"


@pytest.mark.parametrize("model", FORMATS)
def test_calls_are_streamed(client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    body = ask(model=model, tool_choice="required", temperature=0, parallel_tool_calls=False)
    whole = respond(http, **body)
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (item,) = final.output
    assert item.type == "function_call"
    (expected,) = whole["output"]
    assert (item.name, item.arguments) == (expected["name"], expected["arguments"])
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert deltas[-1].snapshot == item.arguments
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        *["function_call_arguments.delta"] * len(deltas),
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "get_time"}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            {"get_weather"},
        ),
        ("required", {"get_time", "get_weather"}),
    ],
)
def test_the_choice_says_which_tools(http: httpx.Client, choice: Any, names: set[str]) -> None:
    for seed in range(4):
        response = respond(http, tool_choice=choice, seed=seed, max_output_tokens=60)
        assert {item["name"] for item in response["output"]} <= names
        assert response["tool_choice"] == choice
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "get_time"]


def test_several_calls_have_items_of_their_own(http: httpx.Client) -> None:
    several = 0
    for seed in range(8):
        body = {"tool_choice": "required", "seed": seed, "max_output_tokens": 200}
        response = events_of(http, **body)[-1]["response"]
        calls = response["output"]
        done = calls if response["status"] == "completed" else calls[:-1]
        for item in done:
            check_call(item)
            assert item["status"] == "completed"
        assert len({item["call_id"] for item in calls}) == len(calls)
        several += len(done) > 1
    assert several


def test_without_a_choice_the_model_may_write_text(http: httpx.Client) -> None:
    for choice in ("auto", "none"):
        response = respond(http, tool_choice=choice, max_output_tokens=6, temperature=0)
        (item,) = response["output"]
        assert item["type"] == "message"
        assert item["content"][0]["text"]


def test_a_call_that_is_cut_off(http: httpx.Client) -> None:
    body = {"tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 14}
    response = events_of(http, **body)[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["output"][-1]["status"] == "incomplete"


def conversation_of(*items: Any, **body: Any) -> list[ChatMessage]:
    parsed = parse_body(ResponsesBody, json.dumps({"input": items} | body).encode())
    return conversation(parsed.instructions, parsed.input)


def test_what_a_response_puts_out_may_be_put_in(http: httpx.Client) -> None:
    body = {"model": "hermes", "tool_choice": "required", "parallel_tool_calls": False}
    response = respond(http, **body, seed=1)
    (item,) = response["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "21"}
    assert conversation_of(USER, item, result, instructions="Be brief.") == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
        ChatMessage(
            "assistant",
            "",
            tool_calls=(ToolCall(item["call_id"], item["name"], item["arguments"]),),
        ),
        ChatMessage("tool", "21", tool_call_id=item["call_id"]),
    ]
    again = respond(http, **body, input=[USER, item, result], seed=2)
    assert again["usage"]["input_tokens"] > response["usage"]["input_tokens"]


USER = {"role": "user", "content": "Hi"}


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts, **fields}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def made(number: int) -> ToolCall:
    return ToolCall(f"c{number}", "f", "{}")


def test_items_of_one_turn_are_one_message() -> None:
    text = {"role": "assistant", "content": "One moment."}
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    parts = [{"type": "input_text", "text": "2"}, {"type": "input_text", "text": "3"}]
    other = {"type": "function_call_output", "call_id": "c2", "output": parts}
    summary = {"content": None, "summary": [{"type": "summary_text", "text": "Clear."}]}
    assert conversation_of(
        USER,
        reasoning("Hm.", encrypted_content=None),
        text,
        call(1),
        call(2),
        output,
        other,
        reasoning("", **summary),
        text,
        text,
        reasoning("So."),
        reasoning("Yes."),
        call(3),
    ) == [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "One moment.", "Hm.", (made(1), made(2))),
        ChatMessage("tool", "1", tool_call_id="c1"),
        ChatMessage("tool", "2\n3", tool_call_id="c2"),
        ChatMessage("assistant", "One moment.", "Clear."),
        ChatMessage("assistant", "One moment."),
        ChatMessage("assistant", "", "So.\nYes.", (made(3),)),
    ]


def test_variables_reach_the_template(http: httpx.Client) -> None:
    for body, words in (
        ({}, "0 - - -"),
        ({"tools": TOOLS}, "2 - - -"),
        ({"tools": TOOLS, "tool_choice": "none"}, "0 - - -"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "0 - low -"),
        ({"reasoning": {"effort": "none"}}, "0 - none False"),
        ({"chat_template_kwargs": {"color": "red"}}, "0 red - -"),
    ):
        reply = http.post("/v1/responses", json=ask(model="mirror", tools=[]) | body)
        error = reply.json()["error"]
        assert error["param"] == "input"
        assert error["message"].endswith(f"fails on them: {words}")


def likely(http: httpx.Client, *tags: str, bias: float = 9.0) -> dict[str, float]:
    """Biases of the model whose prompt opens the reasoning: to end it, to call a tool."""
    biases = {"0": -100.0}
    for tag in tags:
        body = {"model": "thinker", "prompt": tag, "add_special_tokens": False}
        (token_id,) = http.post("/tokenize", json=body).json()["tokens"]
        biases[str(token_id)] = bias
    return biases


def test_reasoning_comes_before_the_message(client: openai.OpenAI, http: httpx.Client) -> None:
    body = {"model": "thinker", "tools": [], "seed": 2, "max_output_tokens": 60}
    body["logit_bias"] = likely(http, "</think>")
    whole = respond(http, **body)
    thoughts, message = whole["output"]
    assert thoughts["type"] == "reasoning"
    assert (thoughts["summary"], thoughts["status"]) == ([], "completed")
    (thought,) = thoughts["content"]
    assert thought["type"] == "reasoning_text"
    assert thought["text"]
    assert "think>" not in thought["text"]
    assert message["content"][0]["text"]
    details = whole["usage"]["output_tokens_details"]
    assert 1 < details["reasoning_tokens"] < whole["usage"]["output_tokens"]
    events = events_of(http, **body)
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        whole["status"],
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought["text"]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == details
    with client.responses.stream(**ask(model="thinker", max_output_tokens=5)) as stream:
        last: Any = list(stream)[-1]
    assert [(item.type, item.status) for item in last.response.output] == [
        ("reasoning", "incomplete")
    ]


@pytest.mark.parametrize("field", [{"thinking_budget": 6}, {"reasoning": {"max_tokens": 6}}])
def test_a_budget_ends_the_reasoning(http: httpx.Client, field: dict[str, Any]) -> None:
    body = {"model": "thinker", "tools": [], "seed": 2, "max_output_tokens": 60}
    body["logit_bias"] = {"0": -100.0}
    whole = respond(http, **body, **field)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][1]["content"][0]["text"]
    # The closing mark counts, and the letters that it consists of here.
    assert 6 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] <= 6 + len("</think>")
    last = events_of(http, **body, **field)[-1]["response"]
    streamed = Response.model_validate(last).model_dump()
    assert list(map(without_ids, streamed["output"])) == list(map(without_ids, whole["output"]))


def test_reasoning_text_and_a_call(http: httpx.Client) -> None:
    """The model itself chooses to call: the tag of calls is made likely."""
    body = {"model": "thinker", "max_output_tokens": 400, "parallel_tool_calls": False}
    body["logit_bias"] = likely(http, "</think>", "<tool_call>")
    kinds = set()
    for seed in range(8):
        whole = respond(http, **body, seed=seed)
        kinds.add(tuple(item["type"] for item in whole["output"]))
        last = events_of(http, **body, seed=seed)[-1]["response"]
        streamed = Response.model_validate(last).model_dump()
        assert list(map(without_ids, streamed["output"])) == list(map(without_ids, whole["output"]))
        if whole["status"] == "completed" and whole["output"][-1]["type"] == "function_call":
            check_call(whole["output"][-1])
    assert ("reasoning", "message", "function_call") in kinds


PLACE: dict[str, Any] = {
    "type": "json_schema",
    "name": "place",
    "schema": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize(
    ("model", "tools"), [("hermes", TOOLS), ("phi4_mini", TOOLS), ("thinker", [])]
)
def test_a_format_holds_beside_tools_and_reasoning(
    http: httpx.Client, model: str, tools: list[Any]
) -> None:
    """As an agent with tools and an output type needs it."""
    body: dict[str, Any] = {"model": model, "tools": tools, "text": {"format": PLACE}}
    # Otherwise the model would hardly ever begin an answer, or end its reasoning.
    tag, bias = ("</think>", 9.0) if model == "thinker" else ("{", 12.0)
    body["logit_bias"] = likely(http, tag, bias=bias)
    texts = 0
    for seed in range(4):
        response = respond(http, **body, parallel_tool_calls=False, seed=seed)
        for item in response["output"]:
            if item["type"] == "message" and item["status"] == "completed":
                jsonschema.validate(json.loads(item["content"][0]["text"]), PLACE["schema"])
                texts += 1
            elif item["type"] == "function_call" and item["status"] == "completed":
                check_call(item)
    assert texts


class GetWeather(BaseModel):
    """The arguments of a tool."""

    days: bool


def test_strict_tools_of_pydantic_models(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="hermes",
        input="What is the weather?",
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, GetWeather)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{}]}, "tools[0].type", "required"),
        ({"tools": [WEATHER, 3]}, "tools[1]", "be an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0]", "letters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "two tools are named"),
        ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0]", "of type object"),
        ({"tools": [WEATHER | {"parameters": 3}]}, "tools[0].parameters", "be an object"),
        (
            {
                "tools": [
                    CLOCK,
                    WEATHER | {"parameters": {"properties": {"a": {"$ref": "#/$defs/none"}}}},
                ]
            },
            "tools[1]",
            "cannot be used",
        ),
        ({"tools": [{**CLOCK, "name": f"t{i}"} for i in range(1025)]}, "tools", "at most 1024"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "does not run web_search itself"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no tool is named 'f'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"model": "no_tools"}, "tools", "does not support tools"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "'medium'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "the server sets"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id", "requ"),
        (
            {"input": [{"type": "reasoning", "summary": [{"type": "x", "text": ""}]}]},
            "input[0].summary[0].type",
            "'summary_text'",
        ),
    ],
)
def test_tools_that_cannot_be_used(
    http: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    reply = http.post("/v1/responses", json=ask(max_output_tokens=4) | change)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_every_channel_is_an_item() -> None:
    """Also in an order that the grammars of these models do not give."""
    deltas: list[ReplyDelta] = [
        ContentDelta("I will "),
        ContentDelta("look."),
        ToolCallDelta(0, "", "call_a", "f"),
        ToolCallDelta(0, '{"a": 1}'),
        ToolCallDelta(1, "{}", "call_b", "g"),
        ReasoningDelta("Hm."),
        ContentDelta("Done."),
    ]
    output = ResponseOutput({})
    events = [event for delta in deltas for event in output.push(delta)]
    events += output.finish("completed")
    items = output.items()
    assert [item["type"] for item in items] == [
        "message",
        "function_call",
        "function_call",
        "reasoning",
        "message",
    ]
    assert {item["status"] for item in items} == {"completed"}
    assert [item["content"][0]["text"] for item in items if "content" in item] == [
        "I will look.",
        "Hm.",
        "Done.",
    ]
    assert [(each["call_id"], each["arguments"]) for each in items[1:3]] == [
        ("call_a", '{"a": 1}'),
        ("call_b", "{}"),
    ]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == items
    assert [event["output_index"] for event in done] == list(range(5))
    assert len({item["id"] for item in items}) == 5
    for event in events:
        _EVENTS.validate_python(event | {"sequence_number": 0})


def test_a_reply_without_any_text_is_an_empty_message() -> None:
    output = ResponseOutput({})
    kinds = [event["type"] for event in output.finish("completed")]
    (message,) = output.items()
    assert message["content"][0]["text"] == ""
    assert kinds[0] == "response.output_item.added"
    assert kinds[-1] == "response.output_item.done"
