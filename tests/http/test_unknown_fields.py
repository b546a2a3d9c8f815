"""What programs for other servers send and this one does not know is ignored and told, once."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
TENSOR = {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["A warm film."]}
OLLAMA = {"num_predict": 1}
PROMPT = {"model": "hybrid", "prompt": "a"}
IGNORED = "x-ignored-fields"


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        # llama.cpp's page, vLLM's clients, OpenRouter's
        (
            "/v1/chat/completions",
            CHAT | {"cache_prompt": True, "id_slot": -1, "samplers": "edkypmxt", "x": 1},
            "x",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"prompt_logprobs": 1, "return_tokens_as_token_ids": True, "documents": []},
            "prompt_logprobs, return_tokens_as_token_ids",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"provider": {"sort": "price"}, "transforms": [], "top_a": 0.5, "num_ctx": 9},
            "top_a, num_ctx",
        ),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"stream": True, "x": 1}, "x"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "a", "x": 1, "cot_id": "c"}]},
            "messages.x",
        ),
        ("/v1/completions", {"model": "hybrid", "prompt": "a", "max_tokens": 1, "x": 1}, "x"),
        (
            "/v1/responses",
            {"model": "chat", "input": "a", "max_output_tokens": 1, "text": {"x": 1}},
            "text.x",
        ),
        ("/v1/messages", CHAT | {"container": "c", "mcp_servers": []}, "container, mcp_servers"),
        ("/v1/messages/count_tokens", CHAT | {"x": 1}, "max_tokens, x"),
        (
            "/api/chat",
            {"model": "chat", "messages": CHAT["messages"], "options": OLLAMA | {"x": 1}},
            "options.x",
        ),
        (
            "/api/generate",
            {"model": "hybrid", "prompt": "a", "options": OLLAMA, "context": [1, 2]},
            "context",
        ),
        ("/api/generate", PROMPT | {"options": OLLAMA, "x": 1}, "x"),
        (
            "/v1/completions",
            {"model": "hybrid:full", "prompt": "a", "max_tokens": 1, "steps": 1, "x": 1},
            "x",
        ),
        ("/generate", {"model": "hybrid", "inputs": "a", "parameters": {"x": 1}}, "parameters.x"),
        ("/predict", {"model": "sentiment", "inputs": "A warm film.", "x": 1}, "x"),
        ("/v2/models/sentiment/infer", {"inputs": [TENSOR | {"x": 1}], "y": 1}, "inputs.x, y"),
        ("/v1/models/sentiment:predict", {"instances": ["A warm film."], "x": 1}, "x"),
        ("/tokenize", {"model": "hybrid", "inputs": "a", "x": 1}, "x"),
        ("/tokenize", {"model": "hybrid", "prompt": "a", "x": 1}, "x"),
    ],
)
def test_what_is_not_known_is_ignored_and_told(
    openai_http: httpx.Client, path: str, body: dict[str, Any], ignored: str
) -> None:
    reply = openai_http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told = sorted(reply.headers[IGNORED].split(", "))
    assert told == sorted(ignored.split(", "))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/score", {"model": "hybrid", "inputs": "a", "x": 1}, "x: unknown field"),
        ("/classify", {"model": "sentiment", "inputs": "a", "x": 1}, "x: unknown field"),
        ("/classify", {"model": "sentiment", "inputs": "a", "parameters": {"x": 1}}, "unknown"),
        # Known fields have their types, and what would change the answer is refused.
        ("/v1/chat/completions", CHAT | {"temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", CHAT | {"grammar": "root ::= x"}, "GBNF"),
        ("/v1/chat/completions", CHAT | {"modalities": ["audio"]}, "modalities: only"),
        ("/v1/chat/completions", CHAT | {"lora": [{"id": 0, "scale": 1}]}, "adapters are models"),
        ("/v1/completions", {"model": "hybrid", "prompt": "a", "best_of": "3"}, "best_of"),
        ("/api/chat", {"model": "chat", **CHAT, "options": {"num_ctx": "x"}}, "num_ctx"),
        ("/api/generate", {"model": "hybrid", "prompt": "a", "images": ["i"]}, "images"),
        ("/api/generate", PROMPT | {"template": "{{ .System }}"}, "template"),
        ("/api/generate", PROMPT | {"options": {"mirostat": 1}}, "mirostat"),
        ("/v1/completions", {"model": "hybrid:full", "prompt": "a", "top_k": 5}, "top_k"),
    ],
)
def test_what_is_still_refused(
    openai_http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    reply = openai_http.post(path, json=body)
    assert reply.status_code in (400, 422), reply.text
    assert words in reply.text


def test_names_are_short_few_and_of_plain_characters(openai_http: httpx.Client) -> None:
    body = CHAT | {f"{index:02}é,\n" + "x" * 9000: 1 for index in range(99)}
    told = openai_http.post("/v1/chat/completions", json=body).headers[IGNORED]
    assert told.startswith(r"00\u00e9\u002c\nxxx")
    assert told.endswith(", ...")
    assert len(told) < 2000


def test_the_log_tells_each_name_once_for_each_client(
    openai_http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "maskdial.requests")
    for _ in range(3):
        openai_http.post("/v1/chat/completions", json=CHAT | {"told_once": 1})
    openai_http.post("/v1/chat/completions", json=CHAT | {"told_once": 1, "other\n": 1})
    lines = [each.getMessage() for each in caplog.records if "ignored in" in each.getMessage()]
    assert lines == [
        "ignored in requests of 127.0.0.1: told_once",
        r"ignored in requests of 127.0.0.1: other\n",
    ]


@pytest.fixture(scope="module")
def strict(start_server: Callable[..., Any], chat_bundle: Path) -> Iterator[httpx.Client]:
    models = {"chat": chat_bundle, "hybrid": STARTER_FOLDER / "hybrid"}
    server = start_server(models=models, unknown_fields="refuse")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", CHAT | {"x": 1}, "x: unknown field"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a", "x": 1}]},
         "messages[0].x: unknown field"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 2}, "leave it out"),
        ("/v1/messages", CHAT | {"container": "c"}, "container: unknown field"),
        ("/v1/responses", {"model": "chat", "input": [{"type": "web_search_call"}]}, "one of"),
        ("/api/chat", CHAT, "max_tokens: unknown field"),
    ],
)  # fmt: skip
def test_a_setting_has_them_refused(
    strict: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    reply = strict.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert words in reply.text


def test_habits_are_taken_also_then(strict: httpx.Client) -> None:
    reply = strict.post("/v1/chat/completions", json=CHAT | {"user": "u", "provider": {}})
    assert reply.status_code == 200
    assert IGNORED not in reply.headers


def test_limits_that_are_too_long_are_clipped_and_told(openai_http: httpx.Client) -> None:
    stop = {"stop": ["e", "a", "o", "i", " "]}
    for path, body, field in (
        ("/v1/chat/completions", CHAT | {"max_tokens": 32_000} | stop, "max_tokens"),
        ("/v1/completions", {"model": "hybrid", "prompt": "a", "max_tokens": 600} | stop,
         "max_tokens"),
        ("/v1/responses", {"model": "chat", "input": "a", "max_output_tokens": 32_000} | stop,
         "max_output_tokens"),
        ("/v1/messages", CHAT | {"max_tokens": 32_000, "stop_sequences": stop["stop"]},
         "max_tokens"),
        ("/generate", {"model": "hybrid", "inputs": "a", "parameters": {"max_new_tokens": 9000}
         | stop}, "parameters.max_new_tokens"),
    ):  # fmt: skip
        reply = openai_http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-clipped-fields"] == field


def test_where_there_is_no_limit_none_is_clipped(openai_http: httpx.Client) -> None:
    grammar = {"guided_choice": ["yes"]}  # or the text would fill the context
    message = {"model": "chat", "messages": [{"role": "user", "content": "Say yes."}]}
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", message | grammar),
        ("/v1/chat/completions", message | grammar | {"max_tokens": -1}),
        ("/v1/completions", {"model": "hybrid", "prompt": "a"} | grammar),
        ("/v1/responses", {"model": "chat", "input": "a"} | grammar),
        ("/completion", {"model": "hybrid", "prompt": "a", "json_schema": {"const": "yes"}}),
        ("/completion", {"model": "hybrid", "prompt": "a", "json_schema": {"const": "yes"},
                         "n_predict": -1}),
        ("/api/chat", message | {"stream": False, "format": {"const": "yes"}}),
        ("/api/chat", message | {"stream": False, "format": {"const": "yes"},
                                 "options": {"num_predict": -1}}),
    ):  # fmt: skip
        reply = openai_http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert "x-clipped-fields" not in reply.headers, (path, body)


LONG = "the " * 600


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "openai"),
        ("/v1/completions", {"prompt": LONG}, "openai"),
        ("/v1/responses", {"input": LONG}, "openai"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
         "anthropic"),
        ("/api/chat", {"messages": [{"role": "user", "content": LONG}]}, "plain"),
        ("/generate", {"inputs": LONG}, "plain"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG * 400}]},
         "openai"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_told_as_agents_know_it(
    openai_http: httpx.Client, path: str, body: dict[str, Any], read: str
) -> None:
    reply = openai_http.post(path, json={"model": "chat", **body})
    assert reply.status_code in (400, 422)
    error = reply.json()["error"]
    message = error if read == "plain" else error["message"]
    assert message.startswith("prompt is too long: ")
    assert " tokens > 511 maximum (model 'chat' has a context of 512: --max-context)" in message
    if read == "openai":
        assert error["code"] == "context_length_exceeded"


def test_ollamas_tag_names_a_model_on_every_route(openai_http: httpx.Client) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
        ("/tokenize", {"inputs": "a"}),
    ):
        reply = openai_http.post(path, json=body | {"model": "chat:latest"})
        assert reply.status_code == 200, reply.text
    assert openai_http.get("/v1/models/chat:latest").json()["id"] == "chat"
    reply = openai_http.post("/v1/chat/completions", json=CHAT | {"model": "nobody:latest"})
    assert reply.status_code == 404


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_a_tools_result_with_a_part_of_no_type(openai_http: httpx.Client, kind: Any) -> None:
    parts = [{"type": kind, "text": "a"}]
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_call_id": "x",
                                                "content": parts}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": parts}]}]}),
        ("/v1/responses", {"input": [call, {"type": "function_call_output", "call_id": "x",
                                            "output": parts}]}),
    ):  # fmt: skip
        reply = openai_http.post(path, json={"model": "chat"} | body)
        assert reply.status_code in (400, 422), (path, reply.text)
