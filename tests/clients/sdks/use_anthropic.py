"""The Anthropic SDK: messages, streams, tools, typed answers, counts and errors; sync and async.

    python use_anthropic.py http://127.0.0.1:8000 MODEL

Whatever the model writes, its calls satisfy their schemas, and its typed answers their type.
"""

import asyncio
import sys
from typing import Any

import anthropic
from anthropic.types import Message, MessageParam, ToolParam
from pydantic import BaseModel

MESSAGES: list[MessageParam] = [{"role": "user", "content": "Tell me of a king."}]
TOOLS: list[ToolParam] = [
    {
        "name": "weather",
        "description": "The weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
# The SDK has no arguments for these any more; the API still takes them.
GREEDY = {"temperature": 0}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def check_messages(client: anthropic.Anthropic, model: str) -> str:
    """Whole and streamed messages are the same; returns the text."""
    options: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24}
    message = client.messages.create(**options, extra_body=GREEDY)
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.model == model
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens <= 24
    with client.messages.stream(**options, extra_body=GREEDY) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text_of(final) == text_of(message)
    assert final.stop_reason == message.stop_reason
    assert final.usage.output_tokens == message.usage.output_tokens
    kinds = [event.type for event in client.messages.create(**options, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return text_of(message)


def check_stop_sequences(client: anthropic.Anthropic, model: str, text: str) -> None:
    stop = text.split()[2]
    message = client.messages.create(
        model=model, messages=MESSAGES, max_tokens=24, stop_sequences=[stop], extra_body=GREEDY
    )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert text_of(message) == text[: text.index(stop)]


def check_tools(client: anthropic.Anthropic, model: str) -> None:
    """A call, whole and streamed, and the answer to its result."""
    options: dict[str, Any] = {"model": model, "max_tokens": 100, "tools": TOOLS}
    options["tool_choice"] = {
        "type": "tool",
        "name": "weather",
        "disable_parallel_tool_use": True,
    }
    message = client.messages.create(**options, messages=MESSAGES)
    with client.messages.stream(**options, messages=MESSAGES) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        assert each.stop_reason == "tool_use"
        (call,) = (block for block in each.content if block.type == "tool_use")
        assert call.name == "weather"
        assert call.input in ({"city": "Rome"}, {"city": "Paris"})
        answer = client.messages.create(
            model=model,
            max_tokens=8,
            tools=TOOLS,
            tool_choice={"type": "none"},
            system="Be kind.",
            messages=[
                *MESSAGES,
                each.to_param(),
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call.id, "content": "It is warm."}
                    ],
                },
            ],
        )
        assert answer.stop_reason != "tool_use"


class Weather(BaseModel):
    """What the model has to write."""

    warm: bool


def check_parse(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.parse(
        model=model, messages=MESSAGES, max_tokens=60, output_format=Weather
    )
    assert isinstance(message.parsed_output, Weather)


def check_count(client: anthropic.Anthropic, model: str) -> None:
    count = client.messages.count_tokens(model=model, messages=MESSAGES, tools=TOOLS)
    message = client.messages.create(model=model, messages=MESSAGES, tools=TOOLS, max_tokens=1)
    cached = message.usage.cache_read_input_tokens or 0
    assert count.input_tokens == message.usage.input_tokens + cached


def check_errors(client: anthropic.Anthropic, model: str) -> None:
    missing = failure(client, model="none")
    assert isinstance(missing, anthropic.NotFoundError)
    assert "no model 'none' here" in str(missing)
    invalid = failure(client, model=model, messages=[])
    assert isinstance(invalid, anthropic.BadRequestError)
    assert invalid.type == "invalid_request_error"
    # The shortest timeout there is; the text takes many times as long.
    late = failure(client, model=model, max_tokens=400, extra_body={"timeout": 0.001})
    assert (late.status_code, late.type) == (504, "timeout_error")


def failure(client: anthropic.Anthropic, **options: Any) -> anthropic.APIStatusError:
    """The error that a request ends with."""
    try:
        client.messages.create(**{"messages": MESSAGES, "max_tokens": 1} | options)
    except anthropic.APIStatusError as error:
        return error
    raise AssertionError(f"{options} was answered")


async def check_many(url: str, model: str, expected: str) -> None:
    """32 at once, half of them streamed."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:

        async def ask(index: int) -> str:
            options: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24}
            if index % 2:
                return text_of(await client.messages.create(**options, extra_body=GREEDY))
            async with client.messages.stream(**options, extra_body=GREEDY) as stream:
                return text_of(await stream.get_final_message())

        assert set(await asyncio.gather(*map(ask, range(32)))) == {expected}


def main(url: str, model: str) -> None:
    """Runs every check."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        text = check_messages(client, model)
        check_stop_sequences(client, model, text)
        check_tools(client, model)
        check_parse(client, model)
        check_count(client, model)
        check_errors(client, model)
    asyncio.run(check_many(url, model, text))
    print(f"anthropic {anthropic.__version__}: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
