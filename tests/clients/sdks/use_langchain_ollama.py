"""LangChain's ChatOllama and OllamaEmbeddings: answers, streams, tools, typed answers, vectors.

python use_langchain_ollama.py http://127.0.0.1:8000 MODEL EMBEDDER
"""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel

QUESTION = "Tell me of a king."


class Weather(BaseModel):
    """What the model has to write."""

    city: Literal["Rome", "Paris"]


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is warm in {city}."


def main(url: str, model: str, embedder: str) -> None:
    """Runs every check."""
    chat = ChatOllama(
        model=model, base_url=url, temperature=0, num_predict=24, validate_model_on_init=True
    )
    answer = chat.invoke(QUESTION)
    assert answer.usage_metadata is not None
    assert 0 < answer.usage_metadata["output_tokens"] <= 24
    assert answer.response_metadata["done_reason"] in ("stop", "length")
    streamed = "".join(str(part.content) for part in chat.stream(QUESTION))
    assert streamed == answer.content != ""
    assert asyncio.run(chat.ainvoke(QUESTION)).content == answer.content
    typed = chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION)
    assert isinstance(typed, Weather)
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "1"}
    past = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage(weather("Rome"), tool_call_id="1"),
    ]
    assert isinstance(chat.bind_tools([weather]).invoke(past), AIMessage)
    vectors = OllamaEmbeddings(model=embedder, base_url=url)
    documents = vectors.embed_documents(["A king.", "A queen."])
    query = vectors.embed_query("A king.")
    assert max(abs(a - b) for a, b in zip(documents[0], query, strict=True)) < 1e-4
    print(f"langchain-ollama {version('langchain-ollama')}: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
