"""langchain-openai: an answer, a stream, two tools, a typed answer, and embeddings.

python use_langchain.py http://127.0.0.1:8000 MODEL
"""

import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather."""
    return f"sunny in {city}"


def clock(utc: bool) -> str:
    """Time."""
    return f"noon, {utc}"


class Answer(BaseModel):
    """A typed answer."""

    city: Literal["Paris", "Rome"]
    warm: bool


def main(url: str, model_name: str) -> None:
    model = ChatOpenAI(
        model=model_name,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=12,
        stream_usage=True,
    )
    whole = model.invoke("Go.")
    assert whole.usage_metadata["output_tokens"] <= 12
    chunks = list(model.stream("Go."))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert (
        sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)
        == (whole.usage_metadata["output_tokens"])
    )
    print("an answer, and the same one as a stream")

    long = model.model_copy(update={"max_tokens": 200})
    tools = [tool(weather), tool(clock)]
    for each in tools:
        calling = long.bind_tools(
            tools, tool_choice=each.name, parallel_tool_calls=False, strict=True
        )
        reply = calling.invoke("Go.")
        (call,) = reply.tool_calls
        assert call["name"] == each.name
        result = each.invoke(call)
        assert isinstance(result, ToolMessage)
        last = model.invoke([HumanMessage("Go."), reply, result])
        assert isinstance(last, AIMessage)
        gathered: Any = None
        for chunk in calling.stream("Go."):
            gathered = chunk if gathered is None else gathered + chunk
        assert [(made["name"], made["args"]) for made in gathered.tool_calls] == [
            (call["name"], call["args"])
        ]
    print("two tools, whole and streamed")

    for method in ("json_schema", "function_calling"):
        answer = long.with_structured_output(Answer, method=method, strict=True).invoke("Go.")
        assert isinstance(answer, Answer), answer
    print("typed answers")

    # Without the check it sends the texts; with it, it sends token ids of OpenAI's own tokenizer.
    embeddings = OpenAIEmbeddings(
        model="embed",
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    texts = ["A boat on the river.", "A ship on the sea.", "The price of bread."]
    vectors = embeddings.embed_documents(texts)
    assert len(vectors) == 3
    query = embeddings.embed_query(texts[0])
    assert query == vectors[0]
    print(f"embeddings of {len(query)} numbers, the same alone and in company")


if __name__ == "__main__":
    main(*sys.argv[1:])
