"""The ollama package: chats, texts, streams, tools, formats, vectors and errors; sync and async.

    python use_ollama.py http://127.0.0.1:8000 MODEL EMBEDDER

Whatever the model writes, its calls satisfy their schemas, and its JSON the format.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import ollama

MESSAGES = [{"role": "user", "content": "Tell me of a king."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24, "num_ctx": 2048}


def check_chat(client: ollama.Client, model: str) -> str:
    """Whole and streamed answers are the same; returns the text."""
    reply = client.chat(model, MESSAGES, options=GREEDY)
    assert (reply.model, reply.done) == (model, True)
    assert reply.done_reason in ("stop", "length")
    assert reply.message.role == "assistant"
    assert reply.eval_count is not None
    assert 0 < reply.eval_count <= 24
    for each in (reply.total_duration, reply.prompt_eval_duration, reply.eval_duration):
        assert each is not None
        assert each > 0
    text = reply.message.content or ""
    parts = list(client.chat(f"{model}:latest", MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == reply.eval_count
    stop = text.split()[2]
    stopped = client.chat(model, MESSAGES, options=GREEDY | {"stop": [stop]})
    assert (stopped.message.content, stopped.done_reason) == (text[: text.index(stop)], "stop")
    return text


def check_generate(client: ollama.Client, model: str) -> None:
    reply = client.generate(model, "Once upon a time", raw=True, options=GREEDY)
    parts = list(client.generate(model, "Once upon a time", raw=True, options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == reply.response != ""
    described = client.generate(model, "Once", options=GREEDY, logprobs=True, top_logprobs=2)
    assert described.logprobs is not None
    assert len(described.logprobs) == described.eval_count
    assert all(len(each.top_logprobs or ()) == 2 for each in described.logprobs)
    assert client.generate(model, keep_alive=-1).done_reason == "load"


def check_formats(client: ollama.Client, model: str) -> None:
    options = GREEDY | {"num_predict": 200}
    reply = client.chat(model, MESSAGES, format=SCHEMA, options=options)
    assert json.loads(reply.message.content or "")["city"] in ("Rome", "Paris")


def check_tools(client: ollama.Client, model: str) -> None:
    """A past call and its result; calls that the model chooses have objects as arguments."""
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    result = {"role": "tool", "tool_name": "weather", "content": "It is warm."}
    past = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    reply = client.chat(model, past, tools=[TOOL], options=GREEDY)
    for each in reply.message.tool_calls or ():
        assert each.function.arguments["city"] in ("Rome", "Paris")


def check_embed(client: ollama.Client, embedder: str) -> None:
    reply = client.embed(embedder, ["A king.", "A queen."])
    assert len(reply.embeddings) == 2
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in reply.embeddings)
    one = client.embeddings(embedder, "A king.")
    assert max(abs(a - b) for a, b in zip(one.embedding, reply.embeddings[0], strict=True)) < 1e-4


def check_models(client: ollama.Client, model: str, embedder: str) -> None:
    listed = {each.model: each for each in client.list().models}
    assert {f"{model}:latest", f"{embedder}:latest"} <= listed.keys()
    assert all(each.size and each.digest and each.modified_at for each in listed.values())
    running = {each.model: each for each in client.ps().models}
    assert running[f"{model}:latest"].expires_at is not None
    shown = client.show(model)
    assert {"completion", "tools"} <= {*(shown.capabilities or ())}
    assert client.show(embedder).capabilities == ["embedding"]
    assert client.pull(model).status == "success"


def check_errors(client: ollama.Client, model: str) -> None:
    assert failure(client, model="none").status_code == 404
    invalid = failure(client, model=model, options={"top_p": 2})
    assert invalid.status_code == 400
    assert "options.top_p" in invalid.error
    image = {"role": "user", "content": "What is it?", "images": [b"\x89PNG"]}
    assert "no model here reads images" in failure(client, model=model, messages=[image]).error
    for change in (lambda: client.create("x", from_=model), lambda: client.delete(model)):
        refused = raised(change)
        assert refused.status_code == 403
        assert "this server is maskdial" in refused.error


def failure(client: ollama.Client, **options: Any) -> ollama.ResponseError:
    """The error that a chat ends with."""
    return raised(lambda: client.chat(**{"messages": MESSAGES} | options))


def raised(call: Callable[[], object]) -> ollama.ResponseError:
    """The error that a call ends with."""
    try:
        call()
    except ollama.ResponseError as error:
        return error
    raise AssertionError("it was answered")


async def check_many(url: str, model: str, expected: str) -> None:
    """32 at once, half of them streamed."""
    client = ollama.AsyncClient(host=url)

    async def ask(index: int) -> str:
        if index % 2:
            reply = await client.chat(model, MESSAGES, options=GREEDY)
            return reply.message.content or ""
        parts = await client.chat(model, MESSAGES, options=GREEDY, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    assert set(await asyncio.gather(*map(ask, range(32)))) == {expected}


def main(url: str, model: str, embedder: str) -> None:
    """Runs every check."""
    client = ollama.Client(host=url, timeout=60)
    text = check_chat(client, model)
    check_generate(client, model)
    check_formats(client, model)
    check_tools(client, model)
    check_embed(client, embedder)
    check_models(client, model, embedder)
    check_errors(client, model)
    asyncio.run(check_many(url, model, text))
    print(f"ollama {version('ollama')}: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
