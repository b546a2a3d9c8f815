"""Failures under `/v1`: OpenAI's form, the dialect's own field names, and what the SDK does."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from maskdial import errors
from maskdial.dialects.openai.errors import FORM
from tests.held import HOUR, HeldTimers, held
from tests.servers import engine_of, metric, wait_for

MESSAGES = [{"role": "user", "content": "Tell me of a king."}]
CHAT = {"model": "chat", "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "hybrid", "prompt": "Once upon a time"}


def error_of(reply: httpx.Response, status: int = 400) -> Any:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": []}, "prompt", "must be a string"),
        ({"prompt": ["a", 1]}, "prompt", "item 1 must be a string"),
        ({"prompt": [[1], "a"]}, "prompt", "item 1 must be a list of token ids"),
        ({"prompt": [1, 12000]}, "prompt", "token ids from 0 to 11999, not 12000"),
        ({"prompt": [[1], [-1]]}, "prompt[1]", "token ids from 0 to 11999, not -1"),
        ({"prompt": [[1], []]}, "prompt[1]", "no tokens"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, not 0, unless echo is true"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "unless echo is true"),
        ({"max_tokens": -2, "echo": True}, "max_tokens", "at least 0"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "leave it out"),
        ({"seed": -(2**63) - 1}, "seed", "between -9223372036854775808 and"),
        ({"min_tokens": 600}, "min_tokens", "between 0 and 512"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 2}, "top_p", "between 0 and 1"),
        ({"logprobs": 6}, "logprobs", "between 0 and 5"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 2, "temperature": 0}, "n", "all texts are the same"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n (3)"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot wait"),
        ({"echo": True, "logprobs": 0, "stream": True}, "logprobs", "not available in a stream"),
        ({"stop": [1]}, "stop[0]", "string"),
        ({"logit_bias": {"12000": 1.0}}, "logit_bias", "token ids from 0 to 11999"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias", "must be a token id"),
        ({"stop_token_ids": [12001]}, "stop_token_ids", "token ids from 0 to 11999"),
        ({"suffix": "the end"}, "suffix", "no fill-in-the-middle tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only a stream"),
        (
            {
                "guided_regex": "(",
            },
            "guided_regex",
            "",
        ),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "also given as guided_json"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"use_beam_search": True}, "use_beam_search", "only false is supported"),
        ({"prompt_embeds": "abc"}, "prompt_embeds", "prompts are texts or token ids"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora", 'name one as "model"'),
        ({"timeout": 0}, "timeout", "between 0.001 and 86400"),
        ({"model": "sentiment"}, "model", "cannot do generate"),
        ({"model": None}, "model", "several models"),
        ({"model": 3}, "model", "string"),
    ],
)
def test_completions_that_cannot_be_served(
    openai_http: httpx.Client, change: dict[str, Any], param: str | None, words: str
) -> None:
    error = error_of(openai_http.post("/v1/completions", json=TEXT | change))
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "between 1 and 10000"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "'developer'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            {
                "messages": [
                    *MESSAGES,
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                ]
            },
            "messages[1].content",
            "part 0 is an image, and no model here reads images",
        ),
        ({"messages": [{"role": "user", "content": "the " * 600}]}, "messages", "context of 512"),
        ({"model": "hybrid"}, "messages", "no chat template"),
        ({"top_logprobs": 3}, "top_logprobs", "set logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"max_tokens": "9"}, "max_tokens", "valid integer"),
        ({"grammar": "root ::= x"}, "grammar", "grammars in GBNF are not supported"),
        ({"documents": ["a"]}, "documents[0]", "should be an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "this field is required"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools to call"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools and tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call", "send tools and tool_choice"),
        ({"modalities": ["audio"]}, "modalities", 'only ["text"] is supported'),
        ({"prediction": {}}, "prediction.type", "this field is required"),
        ({"prediction": {"type": "content"}}, "prediction.content", "this field is required"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content", ""),
        ({"response_format": {"type": "json_object", "value": 3}}, "response_format.value", ""),
    ],
)
def test_conversations_that_cannot_be_answered(
    openai_http: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(openai_http.post("/v1/chat/completions", json=CHAT | change))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_what_asks_for_nothing_is_taken(openai_http: httpx.Client) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "functions": None,
        "modalities": ["text"],
        "reasoning_effort": None,
        "verbosity": "low",
        "audio": None,
        "user": "me",
        "service_tier": "auto",
    }
    reply = openai_http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2} | nothing)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"a"', b"\xff"])
def test_bodies_that_are_no_objects(openai_http: httpx.Client, content: bytes) -> None:
    error = error_of(openai_http.post("/v1/completions", content=content))
    assert error["param"] is None
    assert "body" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model(openai_http: httpx.Client, path: str) -> None:
    body = TEXT if path == "/v1/completions" else CHAT
    error = error_of(openai_http.post(path, json=body | {"model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "served models: chat, hybrid, sentiment" in error["message"]


def test_routes_that_do_not_exist(openai_http: httpx.Client) -> None:
    assert "no route /v1/nothing" in error_of(openai_http.post("/v1/nothing"), 404)["message"]
    reply = openai_http.get("/v1/completions")
    assert error_of(reply, 405)["type"] == "invalid_request_error"
    assert reply.headers["allow"] == "POST"
    assert openai_http.get("/v2/nothing").json()["error_type"] == "not_found"


def test_models(openai_client: openai.OpenAI) -> None:
    models = list(openai_client.models.list())
    assert [model.id for model in models] == ["chat", "hybrid", "sentiment"]
    assert {model.object for model in models} == {"model"}
    assert openai_client.models.retrieve("hybrid") == models[1]
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_the_sdk_raises_its_own_errors(openai_server: Any, openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(**TEXT, max_tokens=-2)
    assert caught.value.param == "max_tokens"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(**TEXT | {"model": "gpt-9"})
    with (
        held(engine_of(openai_server, "hybrid")),
        pytest.raises(openai.InternalServerError) as late,
    ):
        openai_client.completions.create(**TEXT, extra_body={"timeout": 1e-3})
    assert late.value.status_code == 504
    assert late.value.type == "timeout_error"
    assert late.value.code == "timeout"
    assert late.value.response.headers["x-should-retry"] == "false"


def cancelled(http: httpx.Client, reason: str) -> float:
    return metric(http, "maskdial_cancelled_total", model="hybrid", reason=reason)


# More texts than run at once.
LONG: dict[str, Any] = {"max_tokens": 500, "n": 16}


def test_a_stream_that_fails(
    openai_server: Any, openai_http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    """One error tells of the timeout of all its texts."""
    engine, loop = engine_of(openai_server, "hybrid"), openai_server.server._loop
    extensions = {"timeout": HOUR, "ignore_eos": True}
    before = cancelled(openai_http, "timeout"), cancelled(openai_http, "disconnect")
    body = TEXT | LONG | extensions | {"stream": True}
    with (
        held(engine, num_steps=4),
        HeldTimers(loop) as timers,
        openai_http.stream("POST", "/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        received = (line for line in reply.iter_lines() if line)
        lines = [next(received)]
        timers.go_off()
        lines += received
    assert [line for line in lines if '"error"' in line] == lines[-1:]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "timeout_error"
    assert "3600 seconds" in error["message"]
    after = cancelled(openai_http, "timeout"), cancelled(openai_http, "disconnect")
    assert after == (before[0] + 16, before[1])
    with (
        held(engine, num_steps=4),
        HeldTimers(loop) as timers,
        openai_client.completions.create(
            **TEXT, **LONG, stream=True, extra_body=extensions
        ) as stream,
    ):
        next(stream)
        timers.go_off()
        with pytest.raises(openai.APIError, match="3600 seconds"):
            list(stream)


@pytest.fixture(scope="module")
def small_server(start_server: Callable[..., Any], chat_bundle: Path) -> Iterator[Any]:
    """It runs one text at a time, lets one wait, and takes small bodies."""
    server = start_server(
        models={"chat": chat_bundle}, slots=1, max_queue=1, max_body_bytes=4000, max_batch_inputs=3
    )
    yield server
    server.stop()


def test_limits(small_server: Any) -> None:
    with httpx.Client(base_url=small_server.url, timeout=60) as http:
        error = error_of(http.post("/v1/completions", json={"prompt": "a" * 5000}), 413)
        assert (error["type"], error["code"]) == ("invalid_request_error", "too_large")
        error = error_of(http.post("/v1/completions", json={"prompt": ["a"] * 4}))
        assert error["param"] == "prompt"
        error = error_of(http.post("/v1/completions", json={"prompt": "a", "n": 2}))
        assert "--max-queue" in error["message"]


def test_replies_that_would_be_too_large(openai_http: httpx.Client) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 20, "n": 60, "max_tokens": 200}
    error = error_of(openai_http.post("/v1/chat/completions", json=body))
    assert error["param"] == "logprobs"
    assert "252,000 tokens" in error["message"]
    echo = {"model": "hybrid", "prompt": ["the " * 500] * 30, "echo": True, "logprobs": 0, "n": 20}
    error = error_of(openai_http.post("/v1/completions", json=echo | {"max_tokens": 1}))
    assert error["param"] == "logprobs"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (errors.ValidationError("m"), 400, "invalid_request_error", None, {}),
        (errors.NotFoundError("m"), 404, "invalid_request_error", "model_not_found", {}),
        (errors.TooLargeError("m"), 413, "invalid_request_error", "too_large", {}),
        (errors.OverloadedError("m"), 429, "rate_limit_error", "overloaded", {"retry-after": "1"}),
        (errors.UnavailableError("m"), 503, "server_error", "unavailable", {"retry-after": "5"}),
        (errors.DeadlineError("m"), 504, "timeout_error", "timeout", {"x-should-retry": "false"}),
        (errors.GenerationError("m"), 500, "server_error", "generation", {}),
        (errors.InferenceError("m"), 500, "server_error", "inference", {}),
        (errors.InternalError("m"), 500, "server_error", "internal", {}),
    ],
)
def test_every_error_has_its_form(
    error: errors.MaskdialError, status: int, kind: str, code: str | None, headers: dict[str, str]
) -> None:
    reply = FORM.reply(error)
    assert reply.status_code == status
    content = json.loads(bytes(reply.body))["error"]
    assert (content["message"], content["type"], content["code"]) == ("m", kind, code)
    sent = {name: reply.headers[name] for name in headers}
    assert sent == headers


def test_a_client_that_leaves_a_stream_of_several_texts(
    openai_server: Any, openai_http: httpx.Client
) -> None:
    before = cancelled(openai_http, "disconnect")
    body = TEXT | {"max_tokens": 500, "ignore_eos": True, "n": 3, "stream": True}
    with held(engine_of(openai_server, "hybrid"), num_steps=4):
        with openai_http.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        wait_for(lambda: cancelled(openai_http, "disconnect") == before + 3)


def test_an_overloaded_server_is_tried_again(small_server: Any) -> None:
    """The SDK waits as Retry-After says, and succeeds."""
    body = {"prompt": "a", "max_tokens": 1}
    with (
        held(engine_of(small_server, "chat")) as go_on,
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=small_server.url, timeout=60) as http,
        openai.OpenAI(base_url=f"{small_server.url}/v1", api_key="none", max_retries=8) as client,
    ):
        waiting = pool.submit(http.post, "/v1/completions", json=body)
        wait_for(lambda: metric(http, "maskdial_queue_size", model="chat") == 1)
        refused = http.post("/v1/completions", json=body)
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        num_refused = count(http)
        answer = pool.submit(client.completions.create, model="chat", prompt="a", max_tokens=1)
        wait_for(lambda: count(http) > num_refused)
        go_on()
        assert answer.result().choices
        assert waiting.result().status_code == 200


def count(http: httpx.Client) -> float:
    """How many completions were refused."""
    labels = {"model": "chat", "outcome": "overloaded", "route": "/v1/completions"}
    return metric(http, "maskdial_requests_total", **labels)
