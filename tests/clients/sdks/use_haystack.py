"""haystack's OpenAIChatGenerator: an answer, a stream and a tool.

python use_haystack.py http://127.0.0.1:8000 MODEL
"""

import sys
from typing import Any

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret


def main(url: str, model_name: str) -> None:
    def generator(**settings: Any) -> OpenAIChatGenerator:
        return OpenAIChatGenerator(
            api_key=Secret.from_token("none"),
            model=model_name,
            api_base_url=f"{url}/v1",
            max_retries=0,
            **settings,
        )

    question = [ChatMessage.from_user("Go.")]
    short = {"max_tokens": 12, "temperature": 0}
    (whole,) = generator(generation_kwargs=short).run(question)["replies"]
    assert whole.text
    parts: list[str] = []
    streaming = generator(
        generation_kwargs=short, streaming_callback=lambda chunk: parts.append(chunk.content)
    )
    (streamed,) = streaming.run(question)["replies"]
    assert "".join(parts) == streamed.text == whole.text
    print("an answer, and the same one as a stream")

    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather = Tool("weather", "Weather.", schema, lambda city: f"sunny in {city}")
    calling = generator(
        tools=[weather],
        generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False, "seed": 1},
    )
    (reply,) = calling.run(question)["replies"]
    (call,) = reply.tool_calls
    result = ChatMessage.from_tool(weather.invoke(**call.arguments), origin=call)
    last = generator(generation_kwargs=short).run([*question, reply, result])
    assert len(last["replies"]) == 1
    print("a tool and what it returned")


if __name__ == "__main__":
    main(*sys.argv[1:])
