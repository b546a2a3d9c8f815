"""`/v1/messages`, by the events and bodies that Anthropic documents.

`tests/clients/sdks/use_anthropic.py` does the same with the SDK.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from pydantic_core import from_json

from maskdial.causal.tools import ToolFormat
from maskdial.dialects.anthropic.errors import error_frame
from maskdial.errors import DeadlineError
from tests.held import held
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle
from tests.servers import engine_of

FORMATS = ("hermes", "llama", "mistral_old", "phi4_mini", "lfm2")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "The weather.", "input_schema": SCHEMA},
    {"name": "rest", "input_schema": {"type": "object", "properties": {}}},
]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of a king."}]
GREEDY: dict[str, Any] = {
    "model": "chat",
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 0,
}
# A template that tells what it was given.
MIRROR = """\
{{- raise_exception((messages | tojson) ~ ' ' ~ (tools or []) | length
    ~ ' ' ~ reasoning_effort | default('-') ~ ' ' ~ enable_thinking | default('-')) }}
"""
# Its prompt ends within what the manifest calls thoughts.
THINKER = """\
{{- bos_token }}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{{- 'assistant:' }}
"""
HERMES = ToolFormat(call='<tool_call>{"name": "$NAME", "arguments": $ARGUMENTS}</tool_call>')


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("bundles")

    def make(name: str, template: str, **manifest: Any) -> Path:
        # Indented as by Llama's, the tools would not fit into the context.
        return make_chat_bundle(folder / name, template.replace("(indent=4)", ""), **manifest)

    models = {
        name: make(name, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        for name in (*FORMATS, "no_tools")
    }
    models["chat"] = chat_bundle
    models["mirror"] = make("mirror", MIRROR, tool_format=HERMES.to_json())
    # Its first sentence counts as thoughts: the prompt opens them, and a period ends them.
    models["thinker"] = make("thinker", THINKER, thinking_marks=("assistant:", "."))
    qwq = (TEMPLATES / "qwq.jinja").read_text(encoding="utf-8")
    models["qwq"] = make("qwq", qwq, tags=("</think>", "<think>"))
    server = start_server(models=models)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return f"{server.url}/v1/messages"


def post(url: str, **body: Any) -> Any:
    # As the SDK sends it; the key means nothing here.
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    reply = httpx.post(url, json=GREEDY | body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with the name of its type."""
    with httpx.stream("POST", url, json=GREEDY | body | {"stream": True}, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        frames = "".join(reply.iter_text()).split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, _, data = frame.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes, with the order of its events checked on the way."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping, stop) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    message: dict[str, Any] = start["message"] | {"content": []}
    is_open, inputs = False, ""
    for event in middle:
        kind = event["type"]
        assert event["index"] == len(message["content"]) - (kind != "content_block_start")
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            inputs = ""
            continue
        block = message["content"][-1]
        if kind == "content_block_stop":
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(inputs)
            continue
        change = event["delta"]
        if change["type"] == "input_json_delta":
            inputs += change["partial_json"]
            continue
        field = change["type"].removesuffix("_delta")
        block[field] += change[field]
    assert not is_open
    assert delta["type"] == "message_delta"
    message |= delta["delta"]
    message["usage"] = delta["usage"]
    return message


def told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from one to the next."""
    blocks = [
        {key: value for key, value in block.items() if key != "id"} for block in message["content"]
    ]
    usage = message["usage"]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return message | {"id": "", "content": blocks, "usage": (num_input, usage["output_tokens"])}


def test_a_message_is_what_generate_writes(url: str) -> None:
    reply = post(url)
    body = {"model": "chat", "messages": MESSAGES}
    expected = httpx.post(
        url.replace("/v1/messages", "/generate"),
        json=body | {"parameters": {"max_new_tokens": 24, "details": True}},
        timeout=60,
    ).json()
    assert reply["id"].startswith("msg_")
    assert (
        reply["usage"].pop("input_tokens") + reply["usage"].pop("cache_read_input_tokens")
        == (expected["details"]["input_length"])
    )
    assert {key: value for key, value in reply.items() if key != "id"} == {
        "type": "message",
        "role": "assistant",
        "model": "chat",
        "content": [{"type": "text", "text": expected["generated_text"], "citations": None}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
            "cache_creation_input_tokens": 0,
            "output_tokens": 24,
            "output_tokens_details": {"thinking_tokens": 0},
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": "standard",
        },
    }


def test_a_stream_makes_the_same_message(url: str) -> None:
    events = stream(url)
    message = joined(events)
    assert told(message) == told(post(url))
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 10, "as they are generated"


@pytest.mark.parametrize("model", ["chat", "hermes", "lfm2"])
def test_a_last_message_of_the_assistant_is_continued(url: str, model: str) -> None:
    """As with `continue_final_message`, which is compared with transformers."""
    begun = [{"type": "text", "text": "Once there was"}, {"type": "text", "text": "a king who"}]
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    whole = [*MESSAGES, {"role": "assistant", "content": "Once there was\na king who"}]
    body = {"model": model, "messages": whole, "max_tokens": 24, "temperature": 0}
    expected = httpx.post(
        url.replace("messages", "chat/completions"),
        json=body | {"continue_final_message": True},
        timeout=60,
    ).json()
    reply = post(url, model=model, messages=messages)
    text = expected["choices"][0]["message"]["content"]
    assert [block.get("text") for block in reply["content"]] == [text]
    assert text != post(url, model=model)["content"][0]["text"]
    count = httpx.post(f"{url}/count_tokens", json={"model": model, "messages": messages})
    assert count.json() == {"input_tokens": expected["usage"]["prompt_tokens"]}
    assert told(joined(stream(url, model=model, messages=messages))) == told(reply)


def test_thoughts_that_were_begun_are_continued(url: str) -> None:
    """The mark that ends them is in the message, so that the reply is an answer."""
    messages = [*MESSAGES, {"role": "assistant", "content": "I think. The king"}]
    reply = post(url, model="thinker", messages=messages)
    assert {block["type"] for block in reply["content"]} == {"text"}


def test_a_call_is_not_continued(url: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    messages = [*MESSAGES, {"role": "assistant", "content": [call]}]
    told = refusal(url, messages=messages, tools=TOOLS, model="hermes")
    assert told == "messages: the last message calls a tool; send its result in a user message"


def test_sampling(url: str) -> None:
    texts = {json.dumps(post(url, temperature=1.0)["content"]) for _ in range(4)}
    assert len(texts) > 1
    expected = told(post(url))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        assert told(post(url, temperature=1.0, **narrow)) == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_sequences(url: str, is_stream: bool) -> None:
    whole = post(url)["content"][0]["text"]
    words = whole.split()
    pairs = list(dict.fromkeys(" ".join(words[place : place + 2]) for place in range(9)))
    stop, later = pairs[3], pairs[5]
    assert whole.index(stop) < whole.index(later)
    body = {"stop_sequences": ["never said", later, stop, ""]}
    reply = joined(stream(url, **body)) if is_stream else post(url, **body)
    assert reply["stop_reason"] == "stop_sequence"
    assert reply["stop_sequence"] == stop
    assert reply["content"][0]["text"] == whole[: whole.index(stop)]


def test_why_messages_end(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    output = {"format": {"type": "json_schema", "schema": schema}}
    reply = post(url, output_config=output)
    assert reply["stop_reason"] == "end_turn"
    assert json.loads(reply["content"][0]["text"]) == {"a": 1}
    # Clients send the limit of another model; what ends the text is then the context.
    long = {"role": "user", "content": "a king " * 240}
    reply = post(url, messages=[long], max_tokens=32_000)
    num_input = reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"]
    if reply["stop_reason"] != "end_turn":
        assert reply["stop_reason"] == "model_context_window_exceeded"
        assert num_input + reply["usage"]["output_tokens"] == 512


def test_cached_tokens_are_counted_apart(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "The queen saw the sea. " * 40}]}
    first = post(url, **body)["usage"]
    second = post(url, **body)["usage"]
    assert second["cache_read_input_tokens"] > 100
    assert first["input_tokens"] + first["cache_read_input_tokens"] == (
        second["input_tokens"] + second["cache_read_input_tokens"]
    )
    (start, *_) = stream(url, **body)
    assert start["message"]["usage"]["cache_read_input_tokens"] > 100


@pytest.mark.parametrize("model", FORMATS)
def test_tool_calls(url: str, model: str) -> None:
    body: dict[str, Any] = {
        "model": model,
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "max_tokens": 200,
    }
    reply = post(url, **body)
    assert reply["stop_reason"] == "tool_use"
    (block,) = reply["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    jsonschema.validate(block["input"], SCHEMA)
    assert told(joined(stream(url, **body))) == told(reply)
    asked = [*MESSAGES, {"role": "assistant", "content": reply["content"]}]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "warm"}
    asked.append({"role": "user", "content": [result]})
    answer = post(url, model=model, tools=TOOLS, messages=asked, tool_choice={"type": "none"})
    assert {each["type"] for each in answer["content"]} <= {"text"}


def test_any_tool_even_for_templates_that_know_none(url: str) -> None:
    reply = post(url, model="no_tools", tools=TOOLS, tool_choice={"type": "any"}, max_tokens=200)
    assert reply["content"][0]["type"] == "tool_use"
    assert reply["stop_reason"] in ("tool_use", "max_tokens")


def test_json_beside_tools(url: str) -> None:
    output = {"format": {"type": "json_schema", "schema": {"enum": ["a king"]}}}
    body = {"model": "hermes", "tools": TOOLS, "output_config": output, "max_tokens": 100}
    for temperature in (0, 1, 1):
        (block, *_) = post(url, **body, temperature=temperature)["content"]
        if block["type"] == "text":
            assert json.loads(block["text"]) == "a king"
        else:
            assert block["name"] in ("weather", "rest")


def test_a_call_that_is_cut_is_as_far_as_it_goes(url: str) -> None:
    properties = {"who": {"enum": ["king"]}, "text": {"type": "string", "minLength": 500}}
    schema = {"type": "object", "properties": properties, "required": ["who", "text"]}
    body = {
        "model": "hermes",
        "tools": [{"name": "say", "input_schema": schema}],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
    }
    reply = post(url, **body)
    assert reply["stop_reason"] == "max_tokens"
    (block,) = reply["content"]
    assert block["input"] == {"who": "king"}
    deltas = [event.get("delta", {}) for event in stream(url, **body)]
    written = "".join(delta.get("partial_json", "") for delta in deltas)
    with pytest.raises(json.JSONDecodeError):
        json.loads(written)
    assert '"text"' in written
    assert from_json(written, allow_partial=True) == block["input"]


def test_thinking(url: str) -> None:
    reply = post(url, model="thinker", max_tokens=60)
    thoughts, answer = reply["content"]
    assert thoughts["type"] == "thinking"
    assert thoughts["thinking"]
    assert "." not in thoughts["thinking"]
    assert thoughts["signature"] == ""
    assert answer["type"] == "text"
    num_thinking = reply["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 1 < num_thinking < reply["usage"]["output_tokens"]
    assert told(joined(stream(url, model="thinker", max_tokens=60))) == told(reply)
    hidden: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}}
    bare = post(url, model="thinker", max_tokens=60, **hidden)
    assert [block["type"] for block in bare["content"]] == ["thinking", "text"]
    assert bare["content"][0]["thinking"] == ""
    assert bare["content"][1] == answer
    assert told(joined(stream(url, model="thinker", max_tokens=60, **hidden))) == told(bare)


@pytest.mark.parametrize("budget", [2, 4])
def test_thoughts_end_with_their_budget(url: str, budget: int) -> None:
    """The model's own thoughts are longer; the closing mark, a period, follows."""
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {"model": "thinker", "max_tokens": 60, "temperature": 0}
    reply = post(url, **body, thinking=thinking)
    thoughts, answer = reply["content"]
    assert (thoughts["type"], answer["type"]) == ("thinking", "text")
    num_thinking = reply["usage"]["output_tokens_details"]["thinking_tokens"]
    assert num_thinking == budget + 1
    assert answer["text"]
    free = post(url, **body)
    assert free["usage"]["output_tokens_details"]["thinking_tokens"] > 5
    assert free["content"][0]["thinking"].startswith(thoughts["thinking"])
    assert told(joined(stream(url, **body, thinking=thinking))) == told(reply)
    others: tuple[dict[str, Any], ...] = (
        {"thinking_budget": budget},
        {"reasoning": {"max_tokens": budget}},
    )
    for other in others:
        path = url.replace("messages", "chat/completions")
        content = httpx.post(path, json=body | {"messages": MESSAGES} | other, timeout=60).json()
        message = content["choices"][0]["message"]
        assert message["reasoning"] == thoughts["thinking"]
        assert message["content"] == answer["text"]
        details = content["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_thinking


@pytest.mark.parametrize("schema", [None, {"enum": ["a king"]}])
def test_a_closing_mark_that_is_a_special_token(url: str, schema: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    output = {} if schema is None else {"format": {"type": "json_schema", "schema": schema}}
    body = {"model": "qwq", "max_tokens": 60, "thinking": thinking, "output_config": output}
    reply = post(url, **body)
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert "think>" not in json.dumps(reply["content"])
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] == 5
    if schema is not None:
        assert json.loads(reply["content"][1]["text"]) == "a king"


def test_a_budget_and_a_schema(url: str) -> None:
    schema = {"enum": ["a king"]}
    reply = post(
        url,
        model="thinker",
        max_tokens=60,
        thinking={"type": "enabled", "budget_tokens": 2},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(reply["content"][-1]["text"]) == "a king"
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] == 3


def refusal(url: str, **body: Any) -> str:
    reply = httpx.post(url, json=GREEDY | body, timeout=60)
    assert reply.status_code == 400, reply.text
    content = reply.json()
    assert content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    return str(content["error"]["message"])


def mirrored(url: str, **body: Any) -> tuple[list[Any], str]:
    """The messages that a template is given, and what it sees of the other variables."""
    text = refusal(url, model="mirror", **body).partition("fails on them: ")[2]
    messages, end = json.JSONDecoder().raw_decode(text)
    return messages, text[end:]


USE = {"type": "tool_use", "id": "toolu_1", "name": "rest", "input": {"a": 1}}


def test_conversations_as_templates_read_them(url: str) -> None:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1"}
    failure = {**result, "content": [{"type": "text", "text": "2"}], "is_error": True}
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages, _ = mirrored(
        url,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}],
        messages=[
            {"role": "user", "content": [marked, {"type": "text", "text": "you"}]},
            {"role": "user", "content": "there"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}]},
            {"role": "user", "content": []},
        ],
    )
    assert messages == [
        {"role": "system", "content": "Be\nkind"},
        {"role": "user", "content": "hi\nyou\nthere"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "thinking": "hm",
        },
        {"role": "user", "content": ""},
    ]
    messages, _ = mirrored(
        url,
        messages=[
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [failure, {"type": "text", "text": "and?"}]},
        ],
    )
    function = {"name": "rest", "arguments": {"a": 1}}
    assert messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Error: 2", "tool_call_id": "toolu_1", "name": "rest"},
        {"role": "user", "content": "and?"},
    ]


def test_variables_reach_the_template(url: str) -> None:
    for body, words in (
        ({}, " 0 - -"),
        ({"tools": TOOLS}, " 2 - -"),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, " 0 - -"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, " 0 - True"),
        ({"thinking": {"type": "disabled"}}, " 0 - False"),
        ({"output_config": {"effort": "low"}}, " 0 low -"),
    ):
        assert mirrored(url, **body)[1] == words


def test_count_tokens(url: str) -> None:
    body: dict[str, Any] = {"system": "Be kind.", "tools": TOOLS}
    usage = post(url, model="hermes", **body, max_tokens=1)["usage"]
    count = {"model": "hermes", "messages": MESSAGES, **body}
    reply = httpx.post(f"{url}/count_tokens", json=count, timeout=60)
    assert reply.status_code == 200
    assert reply.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }
    refused = httpx.post(f"{url}/count_tokens", json=count | {"messages": []}, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": []}, "messages: must have between 1"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "blocks of type 'image' are not"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: this field is re"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "a tool_use, which no message of ro"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
                ]
            },
            "message 0 has a tool_result without a tool_use before it",
        ),
        ({"system": [USE]}, "system: must be text"),
        ({"temperature": -1}, "temperature: must be between 0 and"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: this field is required"),
        ({"tools": [TOOLS[0], TOOLS[0]], "model": "hermes"}, "two tools are named 'weather'"),
        ({"tools": TOOLS}, "set tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools to call"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool"}},
            "tool_choice: name: belongs to the type",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool is named 'x'"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management: compact_20260112 is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 600}]},
            "prompt is too long: 609 tokens > 511 maximum",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "gold"}}}},
            "output_config.format",
        ),
    ],
)
def test_what_cannot_be_answered(url: str, body: dict[str, Any], words: str) -> None:
    assert words in refusal(url, **body)
    if body != {"max_tokens": None}:
        assert words in refusal(url, **body, stream=True)


def test_fields_that_clients_send_by_habit(url: str) -> None:
    habits = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "container": None,
    }
    assert told(post(url, **habits)) == told(post(url))


def test_other_errors(server: Any, url: str) -> None:
    reply = httpx.post(url, json=GREEDY | {"model": "claude"}, timeout=60)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"
    assert "no model 'claude' here" in reply.json()["error"]["message"]
    with held(engine_of(server, "chat")):
        reply = httpx.post(url, json=GREEDY | {"timeout": 1e-3}, timeout=60)
    assert reply.status_code == 504
    assert reply.json()["error"]["type"] == "timeout_error"
    assert reply.headers["x-should-retry"] == "false"
    reply = httpx.get(url)
    assert reply.status_code == 405
    assert reply.json()["type"] == "error"
    reply = httpx.post(f"{url}/others", json={})
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_says_so_in_an_event() -> None:
    frame = error_frame(DeadlineError("too late"))
    name, data, *rest = frame.decode().split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "timeout_error", "message": "too late"},
    }
