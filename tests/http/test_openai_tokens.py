"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`, beside text-embeddings-inference's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.chat_bundles import make_chat_bundle

TEXT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me of a king."}]


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    reply = http.post(path, json={"model": "chat"} | body)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_the_keys_of_the_body_say_which_dialect_is_meant(openai_http: httpx.Client) -> None:
    (native,) = post(openai_http, "/tokenize", inputs=TEXT)
    ids = [token["id"] for token in native]
    reply = post(openai_http, "/tokenize", prompt=TEXT)
    assert reply == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert post(openai_http, "/detokenize", ids=ids) == [TEXT]
    assert post(openai_http, "/detokenize", tokens=ids)["prompt"] == "<|endoftext|>" + TEXT
    # A key within a text is none.
    (tokens,) = post(openai_http, "/tokenize", inputs='a "prompt" and "messages"')
    assert tokens


def test_prompts(openai_http: httpx.Client) -> None:
    ids = post(openai_http, "/tokenize", prompt=TEXT)["tokens"]
    assert (
        post(openai_http, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"] == ids[1:]
    )
    assert post(openai_http, "/detokenize", tokens=ids[1:]) == {"prompt": TEXT, "content": TEXT}
    assert post(openai_http, "/detokenize", tokens=[])["prompt"] == ""
    assert post(openai_http, "/tokenize", prompt="", add_special_tokens=False)["count"] == 0
    spelled = post(openai_http, "/tokenize", prompt=TEXT, return_token_strs=True)["token_strs"]
    assert len(spelled) == len(ids)
    assert spelled[0] == "<|endoftext|>"


def test_conversations(openai_http: httpx.Client) -> None:
    reply = post(openai_http, "/tokenize", messages=MESSAGES)
    text = post(openai_http, "/detokenize", tokens=reply["tokens"])["prompt"]
    assert text == "<|endoftext|>user: Tell me of a king.\nassistant:"
    completion = post(openai_http, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert completion["usage"]["prompt_tokens"] == reply["count"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "user: Tell me of a king.\nassistant: The old king\nassistant:"),
        (
            {"add_generation_prompt": False},
            "user: Tell me of a king.\nassistant: The old king\n",
        ),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "user: Tell me of a king.\nassistant: The old king",
        ),
        ({"continue_final_message": True}, "user: Tell me of a king.\nassistant: The old king"),
    ],
)
def test_a_conversation_may_end_open_or_go_on(
    openai_http: httpx.Client, changes: dict[str, bool], text: str
) -> None:
    """A reply goes on with the very prompt that `/tokenize` shows."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The old king"}]
    shown = post(openai_http, "/tokenize", messages=messages, **changes)["tokens"]
    prompt = post(openai_http, "/detokenize", tokens=shown)["prompt"]
    assert prompt == "<|endoftext|>" + text
    greedy = {"temperature": 0, "max_tokens": 8}
    reply = post(openai_http, "/v1/chat/completions", messages=messages, **changes, **greedy)
    expected = post(openai_http, "/v1/completions", prompt=shown, **greedy)
    assert reply["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert reply["usage"]["prompt_tokens"] == len(shown)


def test_a_template_for_tools_renders_conversations_with_tools(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    default = "{{ messages[-1].content }}|"
    used = "{{ tools[0].function.name }}: " + default
    folder = make_chat_bundle(tmp_path / "named", default, tool_template=used)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    running = start_server(models={"chat": folder})
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            for given, text in ((None, "Go.|"), ([], "Go.|"), (tools, "weather: Go.|")):
                messages = [{"role": "user", "content": "Go."}]
                choice = "required" if given else None
                body: dict[str, Any] = {"messages": messages, "tools": given}
                body["tool_choice"] = choice
                reply = post(http, "/v1/chat/completions", **body, max_tokens=1)
                expected = post(http, "/tokenize", prompt=text, add_special_tokens=False)
                assert reply["usage"]["prompt_tokens"] == expected["count"]
            body["tool_choice"] = "none"  # then the prompt does not mention them
            reply = post(http, "/v1/chat/completions", **body, max_tokens=1)
            assert reply["usage"]["prompt_tokens"] < expected["count"]
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": 5}, "prompt: "),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages: give either"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": 3}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt: a prompt cannot",
        ),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0]"),
        ("/tokenize", {"prompt": None}, "prompt: this field is required"),
        ("/tokenize", {"messages": MESSAGES, "model": "hybrid"}, "messages: model 'hybrid'"),
        ("/tokenize", {"messages": MESSAGES, "model": "sentiment"}, "messages: model 'sentiment'"),
        ("/detokenize", {"tokens": [12000]}, "tokens: model 'chat' has token ids from 0 to 11999"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]: must be at least 0"),
        ("/detokenize", {"tokens": "abc"}, "tokens: "),
    ],
)
def test_refusals_are_the_native_apis(
    openai_http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    reply = post(openai_http, path, 422, **body)
    assert reply["error_type"] == "validation"
    assert reply["error"].startswith(words)


def test_tokenizer_info(openai_http: httpx.Client) -> None:
    info = openai_http.get("/tokenizer_info", params={"model": "chat"}).json()
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>"
    assert info["model_max_length"] == 512
    assert "add_generation_prompt" in info["chat_template"]
    plain = openai_http.get("/tokenizer_info", params={"model": "sentiment"}).json()
    assert plain["chat_template"] is None
    several = openai_http.get("/tokenizer_info")
    assert several.status_code == 422
    assert "several models do generate" in several.json()["error"]
    assert openai_http.get("/tokenizer_info", params={"model": "x"}).status_code == 404


def test_tokenizer_info_of_the_only_model_that_generates(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json()["bos_token"] == "<|endoftext|>"
