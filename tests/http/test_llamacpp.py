"""Routes of llama.cpp, vLLM, LM Studio and Mistral that their clients ask first, or only."""

import json
from typing import Any

import httpx
import pytest

import maskdial

ONCE = "Once upon a time"


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_completion(openai_http: httpx.Client) -> None:
    body = {"model": "hybrid", "prompt": ONCE, "n_predict": 5, "temperature": 0, "seed": -1}
    whole = post(openai_http, "/completion", **body, cache_prompt=True, id_slot=-1)
    expected = post(openai_http, "/v1/completions", model="hybrid", prompt=ONCE, max_tokens=5,
                    temperature=0)  # fmt: skip
    assert whole["content"] == expected["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 5)
    assert whole["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    streamed = events(openai_http, "/completion", **body)
    assert "".join(each["content"] for each in streamed) == whole["content"]
    assert [each["stop"] for each in streamed] == [False] * 5 + [True]
    ids = post(openai_http, "/tokenize", model="hybrid", content=ONCE, add_special=True)["tokens"]
    assert post(openai_http, "/completion", **body | {"prompt": ids})["content"] == whole["content"]


def test_penalties_look_at_the_last_tokens(openai_http: httpx.Client) -> None:
    body = {"model": "hybrid", "prompt": ONCE, "n_predict": 24, "temperature": 0}
    penalized = body | {"repeat_penalty": 5.0}
    texts = [
        post(openai_http, "/completion", **penalized, repeat_last_n=last_n)["content"]
        for last_n in (0, 8, -1)
    ]
    assert texts[0] == post(openai_http, "/completion", **body)["content"]
    assert texts[2] == post(openai_http, "/completion", **penalized)["content"]
    assert len({*texts}) == 3


def test_a_schema_of_a_completion_holds(openai_http: httpx.Client) -> None:
    body = {"model": "hybrid", "prompt": "It is", "json_schema": {"const": 7}, "n_predict": 9}
    assert post(openai_http, "/completion", **body)["content"] == "7"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ""}, "prompt: must be a text"),
        ({"prompt": ["a", 1]}, "prompt: must be a text"),
        ({"prompt": [5, 999_999]}, "token ids from 0 to 11999"),
        ({"n_predict": 0}, "n_predict: must be at least 1"),
        ({"n_predict": -2}, "n_predict: "),
        ({"grammar": "root ::= x"}, "GBNF"),
        ({"image_data": [{"data": "x", "id": 1}]}, "image_data: only [] is supported"),
        ({"prompt": "the " * 600}, "prompt is too long"),
        ({"model": "sentiment"}, "cannot do generate"),
    ],
)
def test_completions_that_cannot_be_served(
    openai_http: httpx.Client, change: dict[str, Any], words: str
) -> None:
    reply = openai_http.post("/completion", json={"model": "hybrid", "prompt": "a"} | change)
    assert reply.status_code == 422, reply.text
    assert words in reply.json()["error"]


def test_tokens_of_a_content(openai_http: httpx.Client) -> None:
    tokens = post(openai_http, "/tokenize", model="hybrid", content=ONCE)["tokens"]
    pieces = post(openai_http, "/tokenize", model="hybrid", content=ONCE, with_pieces=True)
    assert [each["id"] for each in pieces["tokens"]] == tokens
    back = post(openai_http, "/detokenize", model="hybrid", tokens=tokens)
    assert back["content"] == back["prompt"] == ONCE


def test_a_template_is_applied(openai_http: httpx.Client) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Who?"}]}
    assert post(openai_http, "/apply-template", **body)["prompt"].endswith("user: Who?\nassistant:")
    reply = openai_http.post("/apply-template", json={"model": "chat", "prompt": "a"})
    assert (reply.status_code, reply.json()["error"]) == (
        422,
        "messages: this field is required",
    )


def test_a_conversation_without_a_version_in_the_path(openai_http: httpx.Client) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
    assert post(openai_http, "/chat/completions", **body)["object"] == "chat.completion"


def test_what_the_server_is(openai_http: httpx.Client) -> None:
    described = openai_http.get("/props?model=chat").json()
    assert described["default_generation_settings"]["n_ctx"] == 512
    assert described["model_alias"] == "chat"
    assert "message.content" in described["chat_template"]
    slots = openai_http.get("/slots?model=chat").json()
    assert len(slots) == described["total_slots"]
    assert {each["n_ctx"] for each in slots} == {512}
    assert openai_http.get("/props?model=nobody").status_code == 404
    assert openai_http.get("/slots").status_code == 422  # two models generate
    assert openai_http.get("/version").json() == {"version": maskdial.__version__}


def test_models_as_lm_studio_lists_them(openai_http: httpx.Client) -> None:
    listed = openai_http.get("/api/v0/models").json()["data"]
    assert [(each["id"], each["type"], each["state"]) for each in listed] == [
        ("chat", "llm", "loaded"),
        ("hybrid", "llm", "loaded"),
    ]
    assert listed[0]["max_context_length"] == 512
    assert openai_http.get("/api/v0/models/chat").json() == listed[0]
    assert openai_http.get("/api/v0/models/sentiment").status_code == 404
    assert openai_http.get("/api/v0/models/nobody").status_code == 404


def test_mistrals_text_in_the_middle(openai_http: httpx.Client) -> None:
    body = {"model": "hybrid", "prompt": ONCE, "max_tokens": 5, "temperature": 0}
    body["random_seed"] = 3
    (choice,) = post(openai_http, "/v1/fim/completions", **body)["choices"]
    expected = post(openai_http, "/v1/completions", **body)["choices"][0]["text"]
    assert choice["message"]["content"] == expected
    streamed = events(openai_http, "/v1/fim/completions", **body)
    deltas = [each["choices"][0]["delta"] for each in streamed]
    assert "".join(each["content"] for each in deltas) == expected
    assert [each.get("role") for each in deltas] == ["assistant", *[None] * 4]
    body["logprobs"] = 2
    described = post(openai_http, "/v1/completions", **body)["choices"][0]["logprobs"]
    (choice,) = post(openai_http, "/v1/fim/completions", **body)["choices"]
    tokens = choice["logprobs"]["content"]
    assert [each["token"] for each in tokens] == described["tokens"]
    assert [each["logprob"] for each in tokens] == described["token_logprobs"]
    assert [len(each["top_logprobs"]) for each in tokens] == [2] * 5
    streamed = events(openai_http, "/v1/fim/completions", **body)
    assert [each["choices"][0]["logprobs"]["content"] for each in streamed] == [[t] for t in tokens]
    reply = openai_http.post("/v1/fim/completions", json=body | {"suffix": " sea."})
    assert reply.status_code == 400  # this model has no tokens for it
