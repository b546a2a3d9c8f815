"""llama-index's OpenAILike: completions, conversations, streams, and a tool.

python use_llama_index.py http://127.0.0.1:8000 MODEL
"""

import asyncio
import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather."""
    return f"sunny in {city}"


def main(url: str, model_name: str) -> None:
    def client(*, is_chat: bool, max_tokens: int) -> OpenAILike:
        return OpenAILike(
            model=model_name,
            api_base=f"{url}/v1",
            api_key="none",
            is_chat_model=is_chat,
            is_function_calling_model=is_chat,
            context_window=512,
            temperature=0,
            max_tokens=max_tokens,
            max_retries=0,
        )

    writer = client(is_chat=False, max_tokens=12)
    whole = writer.complete("Once upon a time").text
    assert whole
    assert list(writer.stream_complete("Once upon a time"))[-1].text == whole
    assert asyncio.run(writer.acomplete("Once upon a time")).text == whole
    print("a completion: whole, streamed and async")

    talker = client(is_chat=True, max_tokens=12)
    messages = [ChatMessage(role="user", content="Go.")]
    answer = talker.chat(messages).message.content
    assert answer
    assert list(talker.stream_chat(messages))[-1].message.content == answer
    print("a conversation: whole and streamed")

    tools = [FunctionTool.from_defaults(weather)]
    caller = client(is_chat=True, max_tokens=200)
    reply = caller.chat_with_tools(tools, user_msg="Go.", tool_required=True)
    (call,) = caller.get_tool_calls_from_response(reply)
    assert call.tool_name == "weather"
    assert weather(**call.tool_kwargs) in ("sunny in Paris", "sunny in Rome")
    print("a tool")


if __name__ == "__main__":
    main(*sys.argv[1:])
