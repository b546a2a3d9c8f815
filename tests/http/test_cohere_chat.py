"""Cohere's `/v2/chat`, by the events and bodies that Cohere documents.

`tests/clients/sdks/use_cohere.py` does the same with its client.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from maskdial.dialects.cohere.errors import error_frame
from maskdial.dialects.cohere.messages import CohereMessage
from maskdial.errors import DeadlineError
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

FORMATS = ("hermes", "llama", "phi4_mini", "mistral_old")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
    },
]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of a king."}]
GREEDY: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
# A template that tells what it was given.
MIRROR = """\
{{- raise_exception((messages | tojson) ~ ' ' ~ safety_mode | default('-')
    ~ ' ' ~ enable_thinking | default('-')) }}
"""
# Its prompt ends within what the manifest calls thoughts.
THINKER = """\
{{- bos_token }}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{{- 'assistant:' }}
"""


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")

    def make(name: str, template: str, **manifest: Any) -> Path:
        # Indented as by Llama's, the tools would not fit into the context.
        return make_chat_bundle(folder / name, template.replace("(indent=4)", ""), **manifest)

    models = {
        name: make(name, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        for name in FORMATS
    }
    models["chat"] = chat_bundle
    models["mirror"] = make("mirror", MIRROR)
    models["thinker"] = make("thinker", THINKER, thinking_marks=("assistant:", "."))
    server = start_server(models=models)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/v2/chat", json=GREEDY | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with the name of its type."""
    with http.stream("POST", "/v2/chat", json=GREEDY | body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        frames = "".join(reply.iter_text()).split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    events = []
    for frame in frames:
        name, _, data = frame.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply that a stream makes, with the order of its events checked on the way."""
    start, *middle, end = events
    assert (start["type"], end["type"]) == ("message-start", "message-end")
    assert start["delta"]["message"]["role"] == "assistant"
    contents: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    plan, is_open = "", None
    for event in middle:
        kind = event["type"]
        part, _, step = kind.rpartition("-")
        change = event.get("delta", {}).get("message", {})
        if kind == "tool-plan-delta":
            assert is_open is None
            plan += change["tool_plan"]
            continue
        parts: list[Any] = contents if part == "content" else calls
        assert event["index"] == len(parts) - (step != "start")
        assert is_open == (None if step == "start" else part)
        is_open = None if step == "end" else part
        if step == "start":
            parts.append(change["content" if part == "content" else "tool_calls"])
        elif kind == "content-delta":
            for name, text in change["content"].items():
                contents[-1][name] += text
        elif kind == "tool-call-delta":
            calls[-1]["function"]["arguments"] += change["tool_calls"]["function"]["arguments"]
    assert is_open is None
    message: dict[str, Any] = {"role": "assistant"}
    message |= {"content": contents} if contents else {}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"tool_plan": plan} if plan else {}
    return {"message": message, **end["delta"]}


def told(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs from one to the next."""
    calls = [call["function"] for call in reply["message"].get("tool_calls", ())]
    message = {name: each for name, each in reply["message"].items() if name != "tool_calls"}
    return {
        "message": message,
        "calls": calls,
        "finish_reason": reply["finish_reason"],
        "tokens": reply["usage"]["tokens"],
    }


def test_a_reply_is_what_generate_writes(http: httpx.Client) -> None:
    expected = http.post(
        "/generate",
        json={
            "model": "chat",
            "messages": MESSAGES,
            "parameters": {"max_new_tokens": 24, "details": True},
        },
    ).json()
    reply = ask(http)
    assert len(reply.pop("id")) == 36
    cached = reply["usage"].pop("cached_tokens")
    num_tokens = {"input_tokens": expected["details"]["input_length"], "output_tokens": 24}
    assert 0 <= cached < num_tokens["input_tokens"]
    assert reply == {
        "finish_reason": "MAX_TOKENS",
        "message": {
            "role": "assistant",
            "content": [{"type": "text", "text": expected["generated_text"]}],
        },
        "usage": {"billed_units": num_tokens, "tokens": num_tokens},
    }


def test_a_stream_makes_the_same_reply(http: httpx.Client) -> None:
    events = stream(http)
    assert told(joined(events)) == told(ask(http))
    assert sum(event["type"] == "content-delta" for event in events) > 10


def test_what_is_thought_comes_first(http: httpx.Client) -> None:
    reply = ask(http, model="thinker", max_tokens=60)
    kinds = [part["type"] for part in reply["message"]["content"]]
    assert kinds == ["thinking", "text"]
    assert told(joined(stream(http, model="thinker", max_tokens=60))) == told(reply)
    short = ask(
        http, model="thinker", max_tokens=60, thinking={"type": "enabled", "token_budget": 2}
    )
    thought = short["message"]["content"][0]["thinking"]
    assert len(thought) < len(reply["message"]["content"][0]["thinking"])


@pytest.mark.parametrize("model", FORMATS)
def test_tool_calls(http: httpx.Client, model: str) -> None:
    body = {"model": model, "tools": TOOLS, "tool_choice": "REQUIRED", "max_tokens": 200}
    reply = ask(http, **body, strict_tools=True)
    # Of Llama's format a reply has one call; the model writes others until it is cut.
    assert reply["finish_reason"] == ("TOOL_CALL" if model == "llama" else "MAX_TOKENS")
    call = reply["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert told(joined(stream(http, **body))) == told(reply)
    document = {"type": "document", "document": {"data": {"sky": "clear"}, "id": "1"}}
    asked = [*MESSAGES, reply["message"]]
    asked += [
        {"role": "tool", "tool_call_id": each["id"], "content": [document]}
        for each in reply["message"]["tool_calls"]
    ]
    answer = ask(http, model=model, tools=TOOLS, messages=asked, tool_choice="NONE")
    assert "tool_calls" not in answer["message"]


def test_json(http: httpx.Client) -> None:
    form = {"type": "json_object", "json_schema": SCHEMA}
    reply = ask(http, response_format=form, max_tokens=100)
    assert reply["finish_reason"] == "COMPLETE"
    jsonschema.validate(json.loads(reply["message"]["content"][0]["text"]), SCHEMA)


def test_stop_sequences(http: httpx.Client) -> None:
    text = ask(http)["message"]["content"][0]["text"]
    stop = " ".join(text.split()[2:4])
    reply = ask(http, stop_sequences=["never said", stop])
    assert reply["finish_reason"] == "STOP_SEQUENCE"
    assert reply["message"]["content"][0]["text"] == text[: text.index(stop)]


def test_sampling(http: httpx.Client) -> None:
    expected = told(ask(http))
    for narrow in ({"k": 1}, {"p": 1e-6}):
        assert told(ask(http, temperature=1.0, **narrow)) == expected
    drawn = {"temperature": 1.0, "seed": 7}
    assert told(ask(http, **drawn)) == told(ask(http, **drawn)) != expected
    penalized = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "max_tokens": 60}
    assert told(ask(http, **penalized)) != told(ask(http, max_tokens=60))


def test_log_probabilities(http: httpx.Client) -> None:
    logprobs = ask(http, logprobs=True)["logprobs"]
    assert len(logprobs) == 24
    assert all(each["logprobs"][0] <= 0 for each in logprobs)
    parts = [event.get("logprobs") for event in stream(http, logprobs=True)]
    streamed = [part for part in parts if part is not None]
    for name in ("token_ids", "logprobs"):
        told = [each for part in streamed for each in part[name]]
        assert told == [each for token in logprobs for each in token[name]]
    text = ask(http)["message"]["content"][0]["text"]
    assert "".join(part["text"] for part in streamed) == text


def test_what_templates_are_told(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = {"model": "mirror", "messages": messages, "safety_mode": "STRICT"}
    reply = http.post("/v2/chat", json=GREEDY | body | {"thinking": {"type": "disabled"}})
    assert reply.status_code == 400
    message = reply.json()["message"]
    assert '{"role": "user", "content": "a\\nb"}' in message
    assert "STRICT False" in message


def test_fields_that_mean_nothing_are_named(http: httpx.Client) -> None:
    body = {"citation_options": {"mode": "FAST"}, "priority": 3, "documents": [], "surprise": 1}
    reply = http.post("/v2/chat", json=GREEDY | body)
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "citation_options, surprise"


def test_documents_are_in_the_prompt(http: httpx.Client) -> None:
    documents = ["The king is old.", {"id": "d", "data": {"title": "Sea", "text": "It is blue."}}]
    documents.append({"data": {"depth": 3}})
    reply = http.post("/v2/chat", json=GREEDY | {"model": "mirror", "documents": documents})
    message = reply.json()["message"]
    told = json.dumps('[1]\nThe king is old.\n\n[2] Sea\nIt is blue.\n\n[3]\n{"depth": 3}')
    assert told[1:] in message
    assert '{"role": "system", "content": "Answer from these documents where they' in message
    assert http.post("/v2/chat", json=GREEDY | {"documents": documents}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages: must have between 1 and"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role: Input should be "),
        ({"messages": [{"role": "user"}]}, "messages[0]: content: this field is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]: is an image, and no model here reads images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages[0]: content: item 0 is a thinking, which belongs to the role assistant",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: tool_call_id: belongs to"),
        ({"tool_choice": "REQUIRED"}, "tool_choice: there are no tools to call"),
        ({"tool_choice": "required"}, "tool_choice: Input should be 'REQUIRED' or 'NONE'"),
        ({"documents": [{"id": "a"}]}, "documents[0]"),
        ({"p": 2}, "p: must be between 0 and 1, not 2"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": [{"role": "user", "content": "king " * 3000}]}, "prompt is too long: "),
        (
            {"response_format": {"type": "json_object", "json_schema": {"type": "song"}}},
            "response_format: ",
        ),
        ({"model": "nobody"}, "no model 'nobody'"),
    ],
)
def test_errors_are_coheres(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = http.post("/v2/chat", json=GREEDY | body)
    assert reply.status_code == (404 if "nobody" in words else 400)
    assert reply.json().keys() == {"id", "message"}
    assert reply.json()["message"].startswith(words)


def test_an_error_ends_a_stream() -> None:
    name, data, _, _ = error_frame(DeadlineError("the time is up")).decode().split("\n")
    assert name == "event: message-end"
    event = json.loads(data.removeprefix("data: "))
    assert event["delta"] == {"error": "the time is up", "finish_reason": "ERROR"}


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "I look it up."), ("Then I say it.", "I look it up.\nThen I say it.")],
)
def test_a_plan_is_the_beginning_of_the_text(content: str | None, text: str) -> None:
    body = {"role": "assistant", "tool_plan": "I look it up.", "content": content}
    assert CohereMessage.model_validate(body).to_message().content == text
