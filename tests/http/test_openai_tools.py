"""Tool calls and reasoning of `/v1/chat/completions`, with the unmodified SDK.

The starter knows nothing of tools, but the grammar has it call them correctly.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field

from maskdial.causal.tools import ToolFormat
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle
from tests.unit.causal.reply_forms import HARMONY, HARMONY_TAGS

pytestmark = pytest.mark.slow

FORMATS = ("hermes", "llama", "mistral_old", "mistral_new", "phi4_mini", "qwen3_coder", "lfm2")
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "paint": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "wet": {"type": "boolean"}},
        "required": ["color", "wet"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Go"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}

# A template that tells what it was given.
MIRROR = """\
{{- raise_exception((messages | tojson) ~ ' ' ~ (tools or []) | length ~ ' ' ~ color | default('-')
    ~ ' ' ~ reasoning_effort | default('-') ~ ' ' ~ enable_thinking | default('-')) }}
"""
HERMES = ToolFormat(call='<tool_call>{"name": "$NAME", "arguments": $ARGUMENTS}</tool_call>')
# Tags are added tokens, which files call special or not.
TAGGED = pytest.mark.parametrize("tagged", ["special", "text"])
CALL_TAG = 11999
CLOSE_TAG = 11998


@pytest.fixture(scope="module")
def url(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bundles")

    def make(name: str, template: str, **options: Any) -> Path:
        source = template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text()
        # Indented as by Llama's, the tools would not fit into the context.
        return make_chat_bundle(folder / name, source.replace("(indent=4)", ""), **options)

    short_ids = ToolFormat(call=HERMES.call, short_ids=True, text_arguments=True)
    models = {name: make(name, name) for name in (*FORMATS, "no_tools")}
    for name, special in (("special", True), ("text", False)):
        tags = ["<tool_call>", "</think>"]
        models[name] = make(name, "qwq", tags=tags, special=special)
    models["mirror"] = make("mirror", MIRROR, tool_format=HERMES.to_json())
    models["short"] = make("short", MIRROR, tool_format=short_ids.to_json())
    models["bare"] = make("bare", MIRROR)
    models["channels"] = make("channels", HARMONY, tags=HARMONY_TAGS)
    server = start_server(models=models)
    yield f"{server.url}/v1"
    server.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(url: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}/chat/completions", json=BODY | body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(url: str, **body: Any) -> Any:
    body = {"model": "hermes"} | BODY | body
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def calls_of(reply: ChatCompletion) -> list[tuple[str, Any]]:
    """The calls of a reply, each of which satisfies its schema."""
    (choice,) = reply.choices
    calls = []
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        calls.append((call.function.name, arguments))
    return calls


def test_tokenize_counts_the_prompt_that_describes_the_tools(url: str) -> None:
    body = {key: BODY[key] for key in ("messages", "tools")} | {"model": "hermes"}
    used = post(url, **body, max_tokens=1)["usage"]["prompt_tokens"]
    root = url.removesuffix("/v1")

    def count(**changes: Any) -> int:
        reply = httpx.post(f"{root}/tokenize", json=body | changes, timeout=60)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["count"])

    assert count() == used
    assert count(tools=None) < used
    assert count(add_generation_prompt=False) < used
    for changes, words in (
        ({"model": "no_tools"}, "tools: the chat template of model 'no_tools'"),
        ({"model": "mirror", "chat_template_kwargs": {"color": "red"}}, "2 red"),
    ):
        refused = httpx.post(f"{root}/tokenize", json=body | changes, timeout=60)
        assert refused.status_code == 422
        assert words in refused.json()["error"]


def test_calls_at_once_parse_and_satisfy_their_schemas(url: str) -> None:
    async def ask_all() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=120
        ) as client:

            async def ask(model: str, seed: int) -> ChatCompletion:
                body: dict[str, Any] = BODY | {"tool_choice": "required", "seed": seed}
                body |= {"model": model, "parallel_tool_calls": False}
                if seed % 2:
                    whole: ChatCompletion = await client.chat.completions.create(**body)
                    return whole
                async with client.chat.completions.stream(**body) as stream:
                    return await stream.get_final_completion()

            # Random weights call tools in all formats, seed by seed, in test_tools_grammar.py.
            pairs = [(model, seed) for model in FORMATS for seed in range(6)]
            return await asyncio.gather(*(ask(*pair) for pair in pairs))

    replies = asyncio.run(ask_all())
    called = [calls_of(reply) for reply in replies]
    assert all(len(calls) == 1 for calls in called)
    assert {calls[0][0] for calls in called} == set(SCHEMAS)
    for reply in replies:
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
    ids = [call.id for r in replies for call in r.choices[0].message.tool_calls or []]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("model", FORMATS)
def test_a_streamed_call_is_the_same(client: openai.OpenAI, model: str) -> None:
    body: dict[str, Any] = BODY | {"model": model, "tool_choice": "required", "seed": 3}
    body |= {"parallel_tool_calls": True, "max_tokens": 60}
    expected = client.chat.completions.create(**body)
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(**body, stream_options=options) as stream:
        kinds = {event.type for event in stream}
        snapshot = stream.current_completion_snapshot
    assert "tool_calls.function.arguments.delta" in kinds
    streamed, whole = snapshot.choices[0], expected.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.content == whole.message.content
    assert [
        (call.function.name, call.function.arguments) for call in streamed.message.tool_calls or []
    ] == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
    assert snapshot.usage is not None
    assert snapshot.usage.model_dump() | {"prompt_tokens_details": None} == (
        expected.usage.model_dump() | {"prompt_tokens_details": None}
    )


class Paint(BaseModel):
    """Paints the wall."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=8)
    coats: int = Field(ge=1, le=3)


def test_strict_tools_of_pydantic_models(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Paint)
    with client.chat.completions.stream(
        model="hermes",
        messages=MESSAGES,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    parsed = [call.function.parsed_arguments for call in choice.message.tool_calls or []]
    assert parsed
    assert all(isinstance(each, Paint) for each in parsed)


@pytest.mark.parametrize(
    "tool_choice",
    [
        {"type": "function", "function": {"name": "paint"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "paint"}}],
            },
        },
    ],
)
@pytest.mark.parametrize("model", ["hermes", "no_tools"])
def test_a_chosen_tool(client: openai.OpenAI, model: str, tool_choice: Any) -> None:
    for seed in range(4):
        reply = client.chat.completions.create(
            **BODY, model=model, tool_choice=tool_choice, parallel_tool_calls=False, seed=seed
        )
        ((name, _),) = calls_of(reply)
        assert name == "paint"


def test_a_tool_without_parameters_has_no_arguments(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    reply = post(url, model="hermes", tools=tools, tool_choice="required", seed=2, max_tokens=200)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert all(json.loads(call["function"]["arguments"]) == {} for call in calls)


@TAGGED
def test_the_model_chooses_to_call(client: openai.OpenAI, tagged: str) -> None:
    """Its tag is a token here, made likely: text comes first, then calls."""
    body: dict[str, Any] = BODY | {"model": tagged, "max_tokens": 400}
    body["logit_bias"] = {str(CLOSE_TAG): -100, str(CALL_TAG): 9, "0": -100}
    body["extra_body"] = {"thinking_budget": 4}
    both = 0
    for seed in range(8):
        reply = client.chat.completions.create(**body, seed=seed, parallel_tool_calls=False)
        (choice,) = reply.choices
        assert "<" not in (choice.message.content or "")
        if choice.finish_reason == "tool_calls":
            assert len(calls_of(reply)) == 1
            both += bool(choice.message.content)
        with client.chat.completions.stream(**body, seed=seed, parallel_tool_calls=False) as stream:
            stream.until_done()
            streamed = stream.current_completion_snapshot.choices[0]
        assert streamed.finish_reason == choice.finish_reason
        assert streamed.message.content == choice.message.content
    assert both, "no reply had text before its call"


@TAGGED
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made_follows_the_reasoning(
    client: openai.OpenAI, tagged: str, stream: bool
) -> None:
    body: dict[str, Any] = BODY | {"model": tagged, "tool_choice": "required", "max_tokens": 400}
    body |= {"parallel_tool_calls": False, "extra_body": {"thinking_budget": 5}}
    for seed in range(3):
        if stream:
            with client.chat.completions.stream(**body, seed=seed) as events:
                reply: ChatCompletion = events.get_final_completion()
        else:
            reply = client.chat.completions.create(**body, seed=seed)
        assert len(calls_of(reply)) == 1
        assert reply.choices[0].finish_reason == "tool_calls"


@TAGGED
def test_none_may_be_called(url: str, tagged: str) -> None:
    body = {"model": tagged, "max_tokens": 30, "seed": 1}
    bias = {str(CLOSE_TAG): 9, str(CALL_TAG): 9}
    (choice,) = post(url, **body, tool_choice="none", logit_bias=bias)["choices"]
    assert "tool_calls" not in choice["message"]
    without = post(url, **body, tools=None, logit_bias=bias)["choices"]
    assert without == [choice]


def test_a_call_that_is_cut(url: str) -> None:
    for n, stream in ((1, False), (1, True), (3, True)):
        body = {"model": "hermes", "tool_choice": "required", "max_tokens": 14, "seed": 5, "n": n}
        if not stream:
            (choice,) = post(url, **body)["choices"]
            assert choice["finish_reason"] == "length"
            continue
        with httpx.stream(
            "POST", f"{url}/chat/completions", json=BODY | body | {"stream": True}, timeout=60
        ) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
        finishes = [c["finish_reason"] for c in chunks if c["finish_reason"]]
        assert finishes == ["length"] * n
        roles = [chunk["index"] for chunk in chunks if "role" in chunk["delta"]]
        assert sorted(roles) == list(range(n)), "a role once for each choice"


def test_log_probabilities_of_calls(url: str) -> None:
    body = {"model": "hermes", "tool_choice": "required", "seed": 4, "logprobs": True}
    reply = post(url, **body, max_tokens=60)
    num_tokens = reply["usage"]["completion_tokens"]
    assert len(reply["choices"][0]["logprobs"]["content"]) == num_tokens


@TAGGED
def test_reasoning_is_told_from_the_answer(client: openai.OpenAI, url: str, tagged: str) -> None:
    """The prompt opens the reasoning, which a special token ends."""
    body: dict[str, Any] = BODY | {"model": tagged, "seed": 3, "max_tokens": 60}
    body["logit_bias"] = {str(CLOSE_TAG): 9, str(CALL_TAG): -100, "0": -100}
    reply = client.chat.completions.create(**body)
    message: Any = reply.choices[0].message
    assert message.reasoning
    assert message.reasoning_content == message.reasoning
    assert message.content
    assert "think" not in message.reasoning
    # As text, the mark that is made likely comes again.
    assert tagged == "text" or "think" not in message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    num_reasoning = reply.usage.completion_tokens_details.reasoning_tokens
    assert num_reasoning is not None
    assert 1 < num_reasoning < 60
    with client.chat.completions.stream(**body) as stream:
        deltas: list[Any] = [e.chunk.choices[0].delta for e in stream if e.type == "chunk"]
        snapshot: Any = stream.current_completion_snapshot.choices[0].message
    assert snapshot.reasoning == snapshot.reasoning_content == message.reasoning
    assert snapshot.content == message.content
    assert deltas[0].role == "assistant"
    never = {"logit_bias": {str(CLOSE_TAG): -100, "0": -100}, "max_tokens": 12, "tools": None}
    cut = post(url, **body | never)
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12


@TAGGED
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_in_reasoning_ends_nothing(url: str, stream: bool, tagged: str) -> None:
    body: dict[str, Any] = BODY | {"model": tagged, "seed": 3, "max_tokens": 60}
    body |= {"logit_bias": {str(CALL_TAG): -100, "0": -100}, "thinking_budget": 20}
    message = post(url, **body)["choices"][0]["message"]
    reasoning, content = message["reasoning"], message["content"]
    # A letter of both, so that it ends the reply where it is content.
    letter = next(each for each in content[1:] if each.isalpha() and each in reasoning)
    stops = [reasoning[:20], reasoning[-5:] + "</think>", letter]
    assert not any(stop in content for stop in stops[:2])
    body |= {"stop": stops, "stream": stream}
    if not stream:
        (choice,) = post(url, **body)["choices"]
        told = choice["message"]
    else:
        told = {"reasoning": "", "content": ""}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        for line in lines[:-1]:
            (choice,) = json.loads(line)["choices"]
            for name in told:
                told[name] += choice["delta"].get(name) or ""
    assert choice["finish_reason"] == "stop"
    assert told["reasoning"] == reasoning
    assert told["content"] == content[: content.index(letter)]


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_an_answer_on_a_channel_goes_on(url: str, tools: Any) -> None:
    """With its text in pieces, and stop strings in it."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The old king"}]
    body: dict[str, Any] = {"model": "channels", "messages": messages, "tools": tools, "seed": 1}
    body |= {"continue_final_message": True, "max_tokens": 12, "logit_bias": {"0": -100}}
    (choice,) = post(url, **body)["choices"]
    content = choice["message"]["content"]
    assert len(content) > 12
    assert choice["finish_reason"] == "length"
    with httpx.stream("POST", f"{url}/chat/completions", json=body | {"stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines[:-1]]
    assert "".join(filter(None, deltas)) == content
    assert len([*filter(None, deltas)]) > 6
    stop = content[5:8]
    (choice,) = post(url, **body, stop=stop)["choices"]
    assert choice["message"]["content"] == content[: content.index(stop)]
    assert choice["finish_reason"] == "stop"


def mirrored(url: str, **body: Any) -> tuple[list[Any], str]:
    """The messages that a template is given, and what it sees of the other variables."""
    error = refusal(url, **{"model": "mirror"} | body)
    text = error["message"].partition("fails on them: ")[2]
    messages, end = json.JSONDecoder().raw_decode(text)
    return messages, text[end:]


def test_variables_reach_the_template(url: str) -> None:
    for body, words in (
        ({}, " 2 - - -"),
        ({"tools": TOOLS[:1]}, " 1 - - -"),
        ({"tool_choice": "none"}, " 0 - - -"),
        ({"reasoning_effort": "low"}, " 2 - low -"),
        ({"reasoning_effort": "none"}, " 2 - none False"),
        ({"chat_template_kwargs": {"color": "red", "enable_thinking": True}}, " 2 red - True"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            " 2 - none True",
        ),
    ):
        assert mirrored(url, **body)[1] == words


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_calls_of_the_history_as_templates_read_them(url: str) -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    messages, _ = mirrored(url, messages=[ASSISTANT, RESULT])
    assert messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"},
    ]


def test_ids_and_arguments_as_a_template_wants_them(url: str) -> None:
    messages, _ = mirrored(url, model="short", messages=[ASSISTANT, RESULT])
    (call,) = messages[0]["tool_calls"]
    assert len(call["id"]) == 9
    assert messages[1]["tool_call_id"] == call["id"]
    assert call["function"]["arguments"] == '{"a": 1}'


def test_a_template_without_tools_gets_calls_as_text(url: str) -> None:
    messages, _ = mirrored(url, model="bare", tools=None, messages=[ASSISTANT])
    assert messages == [{"role": "assistant", "content": '{"name": "f", "arguments": {"a": 1}}'}]


def test_reasoning_of_the_history(url: str) -> None:
    said = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    messages, _ = mirrored(url, messages=[said])
    assert messages == [
        {"role": "assistant", "content": "Hi"}
        | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm")
    ]


@pytest.mark.parametrize("model", ["hermes", "mistral_old", "phi4_mini", "qwen3_coder", "lfm2"])
def test_a_conversation_with_two_rounds_of_tools(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = list(MESSAGES)
    tools = TOOLS[1:]
    sizes = []
    for round_number in range(2):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=round_number,
        )
        assert calls_of(reply)
        messages.append(reply.choices[0].message)
        for call in reply.choices[0].message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "fine"})
        assert reply.usage is not None
        sizes.append(reply.usage.prompt_tokens)
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.tool_calls is None
    assert sizes[1] > sizes[0]


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ENDLESS = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "required": ["next"],
        }
    },
}
HUGE = {"type": "object", "properties": {f"key_{i}": {"type": "string"} for i in range(20_000)}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1]", "two tools are named 'a'"),
        ({"tools": [tool("a b")]}, "tools[0]", "1 to 128 letters"),
        ({"tools": [tool(f"t{i}") for i in range(1025)]}, "tools", "1025 tools; it may have at"),
        ({"tools": [tool("a"), tool("b", type="string")]}, "tools[1]", "of type object"),
        ({"tools": [tool("a", **ENDLESS)]}, "tools[0]", "the schema of tool 'a' cannot be used"),
        ({"tools": [tool("a", **HUGE)]}, "tools[0]", "bytes; the limit is"),
        ({"tools": [tool("a", properties={"x": {"type": "gold"}})]}, "tools", ""),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools to call"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sing"}}},
            "tool_choice",
            "no tool is named 'sing'; the tools are weather, paint",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice.type", "'auto'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "this field is required"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
            "required",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                }
            },
            "tool_choice",
            "name at least one",
        ),
        ({"model": "no_tools"}, "tools", "set tool_choice to required"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id", "role tool"),
        (
            {"messages": [{**ASSISTANT, "role": "user", "content": "a"}]},
            "messages[0].tool_calls",
            "role assistant",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"reasoning_effort": ""}, "reasoning_effort", "between 1 and 64 characters"),
    ],
)
def test_tools_that_cannot_be_used(url: str, body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(url, **body)
    assert error["param"] == param, error
    assert words in error["message"]


def test_as_many_tools_as_allowed(url: str) -> None:
    tools = [tool(f"tool_{i}", properties={"x": {"type": "boolean"}}) for i in range(128)]
    body = {"model": "no_tools", "tools": tools, "tool_choice": "required", "max_tokens": 400}
    (call,) = post(url, **body, seed=1)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"].startswith("tool_")


def test_a_recursive_schema(url: str) -> None:
    tree = {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#"}},
        "required": ["leaf"],
        "additionalProperties": False,
    }
    for seed in range(4):
        choice = post(
            url, model="hermes", tools=[tool("grow", **tree)], tool_choice="required", seed=seed
        )["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), tree)


@pytest.mark.parametrize("arguments", ["", " ", "\n", "[1]", "{", "nonsense", '{"a": "\\ud800"}'])
def test_past_calls_that_are_no_json_are_text(url: str, arguments: str) -> None:
    """They are in the conversation for good: refused once, it could never go on."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    post(url, model="hermes", **body, max_tokens=1)


ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@TAGGED
def test_a_schema_describes_what_follows_the_reasoning(url: str, tagged: str) -> None:
    body: dict[str, Any] = {"model": tagged, "tools": None, "response_format": RESPONSE_FORMAT}
    body |= {"logit_bias": {str(CLOSE_TAG): 9}, "seed": 4}
    message = post(url, **body)["choices"][0]["message"]
    assert message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), ANSWER)
    # A Lark grammar, as also choices are, leaves no room for reasoning.
    for grammar in ({"guided_choice": ["yes"]}, {"guided_grammar": 'start: "yes"'}):
        message = post(url, model=tagged, tools=None, **grammar)["choices"][0]["message"]
        assert message["content"] == "yes"
        assert "reasoning" not in message


@pytest.mark.parametrize("model", ["hermes", "llama", "mistral_old"])
def test_a_schema_beside_tools(client: openai.OpenAI, model: str) -> None:
    """The reply is a call or satisfies the schema, as agents with an output type expect."""
    body: dict[str, Any] = BODY | {"model": model, "response_format": RESPONSE_FORMAT}
    kinds = set()
    for seed in range(8):
        reply = client.chat.completions.create(**body, seed=seed, parallel_tool_calls=False)
        (choice,) = reply.choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert len(calls_of(reply)) == 1
        else:
            jsonschema.validate(json.loads(choice.message.content or ""), ANSWER)
    assert kinds <= {"stop", "tool_calls"}
    must = client.chat.completions.create(
        **body, tool_choice="required", seed=1, parallel_tool_calls=False
    )
    assert calls_of(must)


def test_a_lark_grammar_beside_tools_is_refused(url: str) -> None:
    error = refusal(url, guided_choice=["yes", "no"])
    assert error["param"] == "guided_choice"
    assert "cannot be combined with tools" in error["message"]
    error = refusal(url, response_format={"type": "regex", "value": "("})
    assert error["param"] == "response_format"
