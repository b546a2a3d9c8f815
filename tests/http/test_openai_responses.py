"""`/v1/responses`: the unmodified SDK gets what chat completions would, as items and events."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from maskdial.dialects.openai.responses import compact
from tests.held import HOUR, HeldTimers, held
from tests.servers import engine_of

KING = "Tell me of a king."
RULE = "You tell stories."
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
SEED = {"seed": 7}
_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def respond(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/v1/responses", json={"model": "chat", "input": KING} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(http: httpx.Client, messages: Sequence[Any], **body: Any) -> Any:
    body = {"model": "chat", "messages": messages} | body
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(
    http: httpx.Client, on_line: Callable[[str], object] = lambda line: None, **body: Any
) -> list[Any]:
    """The events of a stream, each checked against the SDK's type."""
    lines = []
    body = {"model": "chat", "input": KING, "stream": True} | body
    with http.stream("POST", "/v1/responses", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            on_line(line)
            if line and not line.startswith(":"):
                lines.append(line)
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        _EVENTS.validate_python(event)
    return events


def text_of(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"])


def error_of(reply: httpx.Response, status: int = 400) -> Any:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_response_is_what_chat_writes(
    openai_client: openai.OpenAI, openai_http: httpx.Client
) -> None:
    messages = [{"role": "system", "content": RULE}, {"role": "user", "content": KING}]
    expected = chat(openai_http, messages, max_tokens=12, **SAMPLING, **SEED)
    response = openai_client.responses.create(
        model="chat",
        instructions=RULE,
        input=KING,
        max_output_tokens=12,
        metadata={"case": "7"},
        store=True,
        extra_body=SEED,
        **SAMPLING,
    )
    Response.model_validate(response.model_dump())
    assert response.output_text == expected["choices"][0]["message"]["content"]
    assert response.id.startswith("resp_")
    assert response.object == "response"
    assert response.model == "chat"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert response.usage is not None
    assert response.usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == expected["usage"]["total_tokens"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.instructions == RULE
    assert response.max_output_tokens == 12
    assert response.metadata == {"case": "7"}
    assert (response.temperature, response.top_p) == (0.8, 0.95)


def test_a_text_that_ends_by_itself_is_completed(openai_http: httpx.Client) -> None:
    response = respond(openai_http, text={"format": {"type": "json_schema", **SCHEMA}})
    assert response["status"] == "completed"
    assert response["incomplete_details"] is None
    assert response["output"][0]["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]


@pytest.mark.parametrize(
    "asked",
    [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 3}],
    ids=["include", "top_logprobs"],
)
def test_log_probabilities_are_those_of_chat(
    openai_client: openai.OpenAI, openai_http: httpx.Client, asked: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": KING}]
    top = asked.get("top_logprobs", 0)
    choice = chat(
        openai_http, messages, max_tokens=12, temperature=0, logprobs=True, top_logprobs=top
    )["choices"][0]
    expected = choice["logprobs"]["content"]
    assert len(expected) == 12
    body: dict[str, Any] = {"max_output_tokens": 12, "temperature": 0} | asked
    events = list(openai_client.responses.create(model="chat", input=KING, stream=True, **body))
    last = events[-1]
    assert last.type == "response.incomplete"
    whole = openai_client.responses.create(model="chat", input=KING, **body)
    for response in (whole, last.response):
        (message,) = response.output
        assert isinstance(message, ResponseOutputMessage)
        (part,) = message.content
        assert isinstance(part, ResponseOutputText)
        assert part.logprobs is not None
        # The last token may end within a character, whose text is then not part of the reply.
        described = [each.model_dump() for each in part.logprobs]
        assert described == expected[: len(described)]
        assert len(described) >= 11
        assert response.top_logprobs == top
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == len(described)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert len(done.logprobs) == len(described)


def test_cached_tokens_are_reported(openai_http: httpx.Client) -> None:
    body = {"input": "Tell me of a queen. " * 20, "max_output_tokens": 1}
    first = respond(openai_http, **body)["usage"]
    second = respond(openai_http, **body)["usage"]
    assert second["input_tokens"] == first["input_tokens"]
    cached = second["input_tokens_details"]["cached_tokens"]
    assert first["input_tokens_details"]["cached_tokens"] < cached < second["input_tokens"]


def test_a_conversation_takes_every_form_of_text(openai_http: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": RULE},
        {"role": "user", "content": KING},
        {"role": "assistant", "content": "There was a king."},
        {"role": "user", "content": "And a queen?\nTell me."},
    ]
    expected = chat(openai_http, messages, max_tokens=6, temperature=0)
    past = {"type": "output_text", "text": "There was a king.", "annotations": [], "logprobs": []}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": KING}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [past],
        },
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "And a queen?"},
                {"type": "input_text", "text": "Tell me."},
            ],
        },
    ]
    for body in (
        {"input": messages},
        {"input": [messages[0], *items]},
        {"instructions": RULE, "input": items},
    ):
        response = respond(openai_http, **body, max_output_tokens=6, temperature=0)
        assert text_of(response) == expected["choices"][0]["message"]["content"]
        assert response["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_output_goes_back_as_input(openai_client: openai.OpenAI) -> None:
    first = openai_client.responses.create(model="chat", input=KING, max_output_tokens=5)
    conversation: list[Any] = [{"role": "user", "content": KING}]
    conversation += [item.model_dump() for item in first.output]
    conversation.append({"role": "user", "content": "Go on."})
    second = openai_client.responses.create(model="chat", input=conversation, max_output_tokens=5)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


def test_events_come_in_order(openai_http: httpx.Client) -> None:
    whole = respond(openai_http, max_output_tokens=5, temperature=0)
    events = events_of(openai_http, max_output_tokens=5, temperature=0)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert 1 < len(deltas) <= 5
    text = "".join(event["delta"] for event in deltas)
    assert text == text_of(whole) == text_of(events[-1]["response"])
    created, final = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[2]["item"]["content"] == []
    assert events[-2]["item"] == final["output"][0]
    changing = {"id", "created_at", "output"}
    assert {k: v for k, v in final.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing | {"usage"}
    } | {"usage": final["usage"]}
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_streams_of_the_sdk(openai_client: openai.OpenAI, openai_http: httpx.Client) -> None:
    body: dict[str, Any] = {"text": {"format": {"type": "json_schema", **SCHEMA}}, "temperature": 0}
    expected = text_of(respond(openai_http, **body))
    with openai_client.responses.stream(model="chat", input=KING, **body) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == expected
    assert final.status == "completed"
    raw = openai_client.responses.create(model="chat", input=KING, stream=True, **body)
    assert [event.type for event in raw][-1] == "response.completed"


class Weather(BaseModel):
    """What the model has to write."""

    city: Literal["Paris", "Rome"]
    warm: bool


def test_parse_with_a_pydantic_model(openai_client: openai.OpenAI) -> None:
    for seed in range(3):
        response = openai_client.responses.parse(
            model="chat", input=KING, text_format=Weather, extra_body={"seed": seed}
        )
        assert isinstance(response.output_parsed, Weather)
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        assert response.text.format.name == "Weather"
    with openai_client.responses.stream(model="chat", input=KING, text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)


SCHEMA: dict[str, Any] = {
    "name": "choice",
    "schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def test_formats(openai_http: httpx.Client) -> None:
    for strict in (True, False, None):
        format_ = {"type": "json_schema", **SCHEMA, "strict": strict}
        assert json.loads(text_of(respond(openai_http, text={"format": format_})))["a"] in (1, 2)
    response = respond(openai_http, text={"format": {"type": "json_object"}}, max_output_tokens=99)
    assert text_of(response).startswith("{")
    plain = respond(openai_http, temperature=0, max_output_tokens=5)
    for text in ({"format": {"type": "text"}}, {"verbosity": "low"}, {}, None):
        response = respond(openai_http, temperature=0, max_output_tokens=5, text=text)
        assert text_of(response) == text_of(plain)


def test_extensions(openai_http: httpx.Client) -> None:
    body = {"seed": 3, "min_tokens": 9, "max_output_tokens": 9, "repetition_penalty": 1.3}
    response = respond(openai_http, **body)
    assert response["usage"]["output_tokens"] == 9
    body["max_tokens"] = body.pop("max_output_tokens")
    expected = chat(openai_http, [{"role": "user", "content": KING}], **body)
    assert text_of(response) == expected["choices"][0]["message"]["content"]
    with_stop = respond(openai_http, seed=3, stop=["e"], max_output_tokens=99)
    assert with_stop["status"] == "completed"
    assert "e" not in text_of(with_stop)


def test_many_at_once(openai_server: Any, openai_http: httpx.Client) -> None:
    body: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0.8}
    expected = [text_of(respond(openai_http, seed=seed, **body)) for seed in range(24)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:

            async def ask(seed: int) -> str:
                options: dict[str, Any] = {"model": "chat", "input": KING} | body
                options["extra_body"] = {"seed": seed}
                if seed % 2:
                    response: Response = await client.responses.create(**options)
                    return response.output_text
                async with client.responses.stream(**options) as stream:
                    return "".join(
                        [e.delta async for e in stream if e.type == "response.output_text.delta"]
                    )

            return await asyncio.gather(*map(ask, range(24)))

    assert asyncio.run(ask_all()) == expected


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "required"),
        ({"input": 5}, "input", "must be a string or a list of items"),
        ({"input": []}, "input", "between 1 and 16384 items"),
        ({"input": ["a"]}, "input[0]", "must be an object"),
        ({"input": [{"type": "web_search_call"}]}, "input", "no item that is read here"),
        ({"input": [{"type": "mesage", "content": "a"}]}, "input[0]", "must be one of message"),
        ({"input": [{"type": {}}]}, "input[0]", "must be one of message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "are not stored"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"role": "judge", "content": "a"}]}, "input[0].role", "'developer'"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "must be a string"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "no model here reads images",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            "input[0].content[0].text",
            "valid string",
        ),
        ({"input": "the " * 600}, "input", "context of 512"),
        ({"model": "hybrid"}, "input", "no chat template"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "conv_1"}, "conversation", "conversations are not stored"),
        ({"background": True}, "background", "stores no responses"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompts are not stored here"),
        ({"n": 2}, "n", "only 1 is supported"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "requ"),
        (
            {"text": {"format": {"type": "text", "schema": {}}}},
            "text.format.schema",
            "only to that",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}},
            "text.format",
            "thing",
        ),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ],
)
def test_requests_that_cannot_be_answered(
    openai_http: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "chat", "input": KING} | change
    for stream in (False, True):
        error = error_of(openai_http.post("/v1/responses", json=body | {"stream": stream}))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]


def test_what_asks_for_nothing_is_taken(openai_http: httpx.Client) -> None:
    nothing = {
        "background": False,
        "conversation": None,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": True,
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "high"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "me",
    }
    response = respond(openai_http, max_output_tokens=2, **nothing)
    assert response["store"] is False, "nothing is stored"


def test_an_unknown_model(openai_http: httpx.Client) -> None:
    error = error_of(openai_http.post("/v1/responses", json={"model": "x", "input": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_nothing_is_stored(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(
        model="chat", input=KING, max_output_tokens=1, store=True
    )
    with pytest.raises(openai.NotFoundError, match="responses are not stored"):
        openai_client.responses.retrieve(response.id)


def test_a_stream_that_fails(
    openai_server: Any, openai_http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    engine, loop = engine_of(openai_server, "chat"), openai_server.server._loop
    body: dict[str, Any] = {"ignore_eos": True, "timeout": HOUR}
    with held(engine, num_steps=8), HeldTimers(loop) as timers:

        def end(line: str) -> None:
            if "response.output_text.delta" in line:
                timers.go_off()

        events = events_of(openai_http, end, max_output_tokens=480, **body)
    last = events[-1]
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "3600 seconds" in response["error"]["message"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text
    assert text_of(response) == text
    assert response["output"][0]["status"] == "incomplete"
    with (
        held(engine, num_steps=8),
        HeldTimers(loop) as timers,
        openai_client.responses.stream(
            model="chat", input=KING, max_output_tokens=480, extra_body=body
        ) as stream,
    ):
        types = []
        for event in stream:
            types.append(event.type)
            if event.type == "response.output_text.delta":
                timers.go_off()
        assert types[-1] == "response.failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_before_the_first_token_has_its_status(
    openai_server: Any, openai_http: httpx.Client, stream: bool
) -> None:
    body = {"model": "chat", "input": KING, "timeout": 0.001, "stream": stream}
    with held(engine_of(openai_server, "chat")):
        reply = openai_http.post("/v1/responses", json=body)
    assert error_of(reply, 504)["type"] == "timeout_error"


def test_a_conversation_is_made_shorter(
    openai_client: openai.OpenAI, openai_http: httpx.Client
) -> None:
    past: list[Any] = [
        {"role": "system", "content": RULE},
        {"role": "user", "content": KING},
        {"role": "assistant", "content": "There was a king."},
    ]
    extra = {"max_output_tokens": 20, "temperature": 0}
    reply = openai_client.responses.compact(model="chat", input=past, extra_body=extra)
    assert reply.object == "response.compaction"
    # The messages have parts of input, as OpenAI's have, which the SDK warns of.
    going_on = [item.model_dump(warnings=False) for item in reply.output]
    assert [item["content"][0]["text"] for item in going_on[:-1]] == [RULE, KING]
    assert going_on[-1]["type"] == "compaction"
    # The summary is the model's, of all of the conversation.
    messages = [*past, {"role": "user", "content": compact.ASK}]
    written = chat(openai_http, messages, max_tokens=20, temperature=0)
    text = written["choices"][0]["message"]["content"].strip()
    assert reply.usage.input_tokens == written["usage"]["prompt_tokens"]
    assert reply.usage.output_tokens == written["usage"]["completion_tokens"]
    # What came back is sent again, as any client does, and the model reads the summary.
    body = {"input": [*going_on, {"role": "user", "content": "Go on."}], **extra}
    told = f"A summary of the conversation so far:\n\n{text}"
    again = [{"role": "system", "content": RULE}]
    again += [{"role": "user", "content": each} for each in (KING, told, "Go on.")]
    answer = chat(openai_http, again, max_tokens=20, temperature=0)
    assert text_of(respond(openai_http, **body)) == answer["choices"][0]["message"]["content"]


def test_a_conversation_that_cannot_be_made_shorter(openai_http: httpx.Client) -> None:
    def refused(**body: Any) -> Any:
        return error_of(openai_http.post("/v1/responses/compact", json={"model": "chat"} | body))

    assert refused()["message"] == "input: this field is required"
    error = refused(input="word " * 3000)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    broken = [{"type": "compaction", "encrypted_content": "maskdial.%"}]
    assert "send the item as it came" in refused(input=broken)["message"]
    assert refused(previous_response_id="resp_1")["param"] == "previous_response_id"
    # A response may still be asked for by this name, and is not there.
    assert openai_http.get("/v1/responses/compact").status_code == 404
