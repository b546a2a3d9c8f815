"""`/v1/responses` with tools and reasoning, in several formats of calls."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.dialects.openai_responses_output import ResponseOutput
from maskdial.models import bundle
from maskdial.models.registry import STARTER_FOLDER

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
FORMATS = ("hermes", "function_gemma", "mistral_new", "mistral_old", "qwen3_coder")
# The starter neither thinks nor calls tools by itself. A grammar makes it call; these marks make
# the first sentence of its reply the reasoning, as the prompt ends with the first one.
MARKS = ("assistant", ".")
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


def make_bundle(folder: Path, template: str, marks: tuple[str, str] | None = None) -> Path:
    """The causal starter with a chat template."""
    shutil.copytree(STARTER_FOLDER / "hybrid", folder, ignore=shutil.ignore_patterns("*.full.*"))
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / bundle.CHAT_TEMPLATE)
    manifest = bundle.load_bundle(folder.name, folder).manifest
    files = bundle.hash_files(folder, [*manifest.files, bundle.CHAT_TEMPLATE])
    update = {"files": files, "thinking_marks": marks}
    bundle.write_manifest(folder, manifest.model_copy(update=update))
    return folder


@pytest.fixture(scope="module")
def url(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    root = tmp_path_factory.mktemp("bundles")
    models = {name: make_bundle(root / name, name) for name in (*FORMATS, "no_tools", "qwen3")}
    models["thinker"] = make_bundle(root / "thinker", "hermes", MARKS)
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


def check_call(item: Any) -> None:
    """A call of one of the tools, with arguments that its schema allows."""
    assert item["type"] == "function_call"
    arguments = json.loads(item["arguments"])
    if item["name"] == "get_weather":
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in (1, 2, 3)
    else:
        assert item["name"] == "get_time"
        assert list(map(type, arguments.values())) == [bool]


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


def test_calls_and_results_go_back(client: openai.OpenAI) -> None:
    """As an application does it, with whatever items it was given."""
    conversation: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    for model in (*FORMATS, "thinker"):
        first = client.responses.create(
            **ask(
                model=model, input=conversation, tool_choice="required", parallel_tool_calls=False
            )
        )
        call = first.output[-1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
        again = [*conversation, *(item.model_dump() for item in first.output), result]
        second = client.responses.create(
            **ask(model=model, input=again, tool_choice="none", max_output_tokens=4)
        )
        assert first.usage is not None
        assert second.usage is not None
        # The prompt has the call and its result; without them it is shorter than with the tools.
        alone = client.responses.create(
            **ask(model=model, input=conversation, tool_choice="none", max_output_tokens=4)
        )
        assert alone.usage is not None
        assert second.usage.input_tokens > alone.usage.input_tokens + 8, model


def rendered(http: httpx.Client, model: str, items: list[Any], **body: Any) -> int:
    """How many tokens the prompt of a conversation has."""
    response = respond(http, model=model, input=items, max_output_tokens=1, tools=[], **body)
    return int(response["usage"]["input_tokens"])


def test_a_turn_of_several_items_is_one_message(http: httpx.Client) -> None:
    """It renders as the same message does in chat."""
    call = {"call_id": "call_1", "name": "get_time", "arguments": '{"utc": true}'}
    items = [
        {"role": "user", "content": "What time is it?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I need a clock."}],
            "encrypted_content": None,
        },
        {"role": "assistant", "content": "One moment."},
        {"type": "function_call", "id": "fc_1", "status": "completed", **call},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "noon"}],
        },
        {"role": "user", "content": "Thanks."},
    ]
    function = {"name": call["name"], "arguments": call["arguments"]}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning": "I need a clock.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "user", "content": "Thanks."},
    ]
    body = {"model": "qwen3", "messages": messages, "max_tokens": 1}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert rendered(http, "qwen3", items) == reply.json()["usage"]["prompt_tokens"]


def test_reasoning_comes_before_the_message(client: openai.OpenAI, http: httpx.Client) -> None:
    body = {"model": "thinker", "tools": [], "temperature": 0, "max_output_tokens": 60}
    whole = respond(http, **body)
    reasoning, message = whole["output"]
    assert reasoning["type"] == "reasoning"
    assert (reasoning["summary"], reasoning["status"]) == ([], "completed")
    (thought,) = reasoning["content"]
    assert thought["type"] == "reasoning_text"
    assert thought["text"]
    assert "." not in thought["text"]
    assert message["content"][0]["text"]
    details = whole["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["output_tokens"]
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
        "incomplete",
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought["text"]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == details
    with client.responses.stream(**ask(**body)) as stream:  # the SDK takes these events
        assert list(stream)[-1].type == "response.incomplete"


def test_reasoning_comes_before_a_call(http: httpx.Client) -> None:
    response = respond(
        http, model="thinker", tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    reasoning, call = response["output"]
    assert reasoning["type"] == "reasoning"
    check_call(call)


def test_the_effort_reaches_the_template(http: httpx.Client) -> None:
    """Qwen's template closes the thinking at once where it is turned off."""
    items = [{"role": "user", "content": "Hi"}]
    default = rendered(http, "qwen3", items)
    assert rendered(http, "qwen3", items, reasoning={"effort": "low", "summary": "auto"}) == default
    off = rendered(http, "qwen3", items, reasoning={"effort": "none"})
    assert off > default
    assert rendered(http, "qwen3", items, chat_template_kwargs={"enable_thinking": False}) == off


class GetWeather(BaseModel):
    """The arguments of a tool."""

    days: bool


def test_parsed_arguments(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)["function"]
    response = client.responses.parse(
        model="hermes",
        input="What is the weather?",
        tools=[{"type": "function", **tool}],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["days"] in (True, False)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only tools of type function"),
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
        ({"tools": [{**CLOCK, "name": f"t{i}"} for i in range(200)]}, "tools", "at most 128"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no tool is named 'f'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"model": "no_tools"}, "tools", "knows no tools"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "'medium'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "set by the server"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1"},
                ]
            },
            "input",
            "JSON object",
        ),
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
    output = ResponseOutput()
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
    output = ResponseOutput()
    kinds = [event["type"] for event in output.finish("completed")]
    (message,) = output.items()
    assert message["content"][0]["text"] == ""
    assert kinds[0] == "response.output_item.added"
    assert kinds[-1] == "response.output_item.done"
