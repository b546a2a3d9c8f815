"""litellm: answers, streams and tools through its route for servers that speak OpenAI's API.

python use_litellm.py http://127.0.0.1:8000 MODEL
"""

import json
import sys
from typing import Any

import litellm

# litellm takes "additionalProperties" out of schemas; the model would then write further properties
# until its context ends.
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "maxProperties": 1,
        },
    },
}


def main(url: str, model_name: str) -> None:
    messages = [{"role": "user", "content": "Go."}]
    route: dict[str, Any] = {
        "model": f"hosted_vllm/{model_name}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": messages,
        "temperature": 0,
        "num_retries": 0,
    }
    for provider in ("hosted_vllm", "openai"):
        route["model"] = f"{provider}/{model_name}"
        whole = litellm.completion(**route, max_tokens=12)
        text = whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 12
        chunks = litellm.completion(**route, max_tokens=12, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text

        reply = litellm.completion(
            **route, tools=[_TOOL], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) in ({"city": "Paris"}, {"city": "Rome"})
        results = [
            *messages,
            reply.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        last = litellm.completion(**route | {"messages": results}, tools=[_TOOL], max_tokens=4)
        assert last.choices[0].finish_reason
        print(f"{provider}: an answer, a stream, a tool and what it returned")

    try:
        litellm.completion(**route | {"model": "openai/none"})
    except litellm.NotFoundError as error:
        message = str(error)
    else:
        message = "answered"
    assert "no model 'none' here" in message, message


if __name__ == "__main__":
    main(*sys.argv[1:])
