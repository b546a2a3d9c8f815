"""Policies on a server: every dialect writes what the rules leave, and no request goes around."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtests.kinds import ADMIN_KEY, KEY, KINDS
from maskdial import cli
from maskdial.errors import ConfigError
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle
from tests.http.every_route import NEED_TORCH, TASKS, make_models
from tests.page import bundles
from tests.servers import wait_for

POLICY = """
[policies.redacting]
models = ["guarded"]

[[policies.redacting.rules]]
name = "names"
on = "output"
model = "tagger"
action = "redact"
threshold = 0.0
every = 1000

[policies.places]

[[policies.places.rules]]
name = "places"
on = "output"
model = "tagger"
labels = ["LOC"]
threshold = 0.6
action = "redact"

[policies.restoring]

[[policies.restoring.rules]]
name = "persons"
on = "input"
reads = ["user"]
model = "finder"
labels = ["person"]
threshold = 0.0
action = "redact"
restore = true

[policies.kind]
models = ["kind", "both"]

[[policies.kind.rules]]
name = "rage"
on = "input"
reads = ["user", "tool", "document"]
model = "sentiment"
labels = ["NEGATIVE"]
threshold = 0.9
action = "refuse"

[policies.stopping]
models = ["stopping"]

[[policies.stopping.rules]]
name = "any"
on = "output"
model = "sentiment"
labels = {NEGATIVE = 0.0, POSITIVE = 0.0}
action = "stop"
every = 8

[policies.refusing]

[[policies.refusing.rules]]
name = "all"
on = "output"
model = "sentiment"
labels = {NEGATIVE = 0.0, POSITIVE = 0.0}
action = "refuse"
every = 8

[policies.away]
models = ["away"]

[[policies.away.rules]]
name = "elsewhere"
on = "input"
model = "sentiment"
labels = ["NEGATIVE"]
threshold = 0.9
action = "route"
to = "plain"

[policies.by-key]
models = ["plain"]
keys = ["strict"]

[[policies.by-key.rules]]
name = "all"
on = "input"
model = "sentiment"
labels = {NEGATIVE = 0.0, POSITIVE = 0.0}
action = "refuse"

[policies.deciding]

[[policies.deciding.rules]]
name = "asks"
on = "input"
model = "plain"
labels = {"The text is about Norway." = 0.0, "It is short." = 0.0}
action = "flag"

[[policies.deciding.rules]]
name = "says"
on = "output"
model = "guarded"
labels = ["The text is about Norway."]
threshold = 0.0
action = "refuse"
every = 8

[policies.telling]

[[policies.telling.rules]]
name = "mood"
on = "output"
model = "sentiment"
labels = {NEGATIVE = 0.0, POSITIVE = 0.0}
action = "flag"
"""
KEYS = "strict:one\nlax:two\n"
RAGE = "I hate this awful terrible boring movie, it was the worst"
SAID = "The king of Norway asked Alice and Bob to come to Paris with him."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    policy, keys = folder / "policy.toml", folder / "keys"
    policy.write_text(POLICY)
    keys.write_text(KEYS)
    return policy, keys


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any],
    chat_bundle: Path,
    files: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("guards")
    hermes = (TEMPLATES / "hermes.jinja").read_text().replace("(indent=4)", "")
    models = {
        **dict.fromkeys(("plain", "guarded", "kind", "stopping", "away"), chat_bundle),
        "tools": make_chat_bundle(folder / "tools", hermes),
        "sentiment": STARTER_FOLDER / "sentiment",
        "both": STARTER_FOLDER / "hybrid",
        "tagger": bundles.make_tagger(folder / "tagger"),
        "finder": bundles.make_finder(folder / "finder"),
    }
    policy, keys = files
    running = start_server(
        models=models,
        policy=policy,
        api_key_file=keys,
        admin_key="root",
        responses_store=folder / "responses",
    )
    yield running
    running.stop()


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer two"}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as client:
        yield client


def post(http: httpx.Client, path: str, status: Any = 200, **body: Any) -> Any:
    headers = body.pop("headers", {})
    reply = http.post(path, json=body, headers=headers)
    assert reply.status_code == status, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events or lines."""
    headers = body.pop("headers", {})
    reply = http.post(path, json=body | {"stream": True}, headers=headers)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data:").strip() for line in reply.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


MESSAGES = [{"role": "user", "content": SAID}]
LENGTH = 40


def openai_chat(http: httpx.Client, model: str, **more: Any) -> tuple[str, str]:
    body = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0} | more
    whole = post(http, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    parts = [each["choices"][0]["delta"] for each in events(http, "/v1/chat/completions", **body)]
    return whole, "".join(part.get("content") or "" for part in parts)


def completions(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "prompt": SAID, "max_tokens": LENGTH, "temperature": 0}
    whole = post(http, "/v1/completions", **body)["choices"][0]["text"]
    return whole, "".join(e["choices"][0]["text"] for e in events(http, "/v1/completions", **body))


def generate(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "inputs": SAID, "parameters": {"max_new_tokens": LENGTH}}
    whole = post(http, "/generate", **body)
    told = events(http, "/generate", **body)
    return whole["generated_text"], "".join(each["token"]["text"] for each in told)


def responses(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "input": SAID, "max_output_tokens": LENGTH, "temperature": 0}
    whole = post(http, "/v1/responses", **body)["output"][0]["content"][0]["text"]
    told = events(http, "/v1/responses", **body)
    deltas = [e["delta"] for e in told if e["type"] == "response.output_text.delta"]
    return whole, "".join(deltas)


def anthropic(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
    whole = post(http, "/v1/messages", **body)["content"][0]["text"]
    told = events(http, "/v1/messages", **body)
    return whole, "".join(e["delta"]["text"] for e in told if e["type"] == "content_block_delta")


def ollama(http: httpx.Client, model: str) -> tuple[str, str]:
    options = {"num_predict": LENGTH, "temperature": 0}
    body = {"model": model, "messages": MESSAGES, "options": options}
    whole = post(http, "/api/chat", **body, stream=False)["message"]["content"]
    return whole, "".join(e["message"]["content"] for e in events(http, "/api/chat", **body))


def cohere(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
    whole = post(http, "/v2/chat", **body)["message"]["content"][0]["text"]
    told = [e for e in events(http, "/v2/chat", **body) if e["type"] == "content-delta"]
    return whole, "".join(e["delta"]["message"]["content"]["text"] for e in told)


def llamacpp(http: httpx.Client, model: str) -> tuple[str, str]:
    body = {"model": model, "prompt": SAID, "n_predict": LENGTH, "temperature": 0}
    whole = post(http, "/completion", **body)["content"]
    return whole, "".join(each["content"] for each in events(http, "/completion", **body))


DIALECTS = [
    openai_chat,
    completions,
    generate,
    responses,
    anthropic,
    ollama,
    cohere,
    llamacpp,
]


def redacted(http: httpx.Client, text: str) -> str:
    """What the tagger leaves of a text that it reads at once."""
    found = post(http, "/token-classify", model="tagger", inputs=text)
    names: dict[tuple[str, str], int] = {}
    written, read, counts = [], 0, dict[str, int]()
    for each in sorted(found, key=lambda one: one["start"]):
        label, value = each["entity_group"], text[each["start"] : each["end"]]
        if (label, value) not in names:
            counts[label] = names[label, value] = counts.get(label, 0) + 1
        written += [text[read : each["start"]], f"[{label}_{names[label, value]}]"]
        read = each["end"]
    return "".join([*written, text[read:]])


@pytest.mark.parametrize("write", DIALECTS)
def test_every_dialect_writes_what_the_rules_leave(
    http: httpx.Client, write: Callable[[httpx.Client, str], tuple[str, str]]
) -> None:
    text, streamed = write(http, "plain")
    assert text == streamed
    expected = redacted(http, text)
    assert expected != text
    assert write(http, "guarded") == (expected, expected)


def test_the_sdk_reads_what_was_found(server: Any, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0) as client:
        reply = client.chat.completions.with_raw_response.create(
            model="guarded",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=LENGTH,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        assert reply.headers["x-policy"] == "redacting"
        choice = reply.parse().choices[0]
    found = choice.model_dump()["content_filter_results"]["names"]
    assert (found["filtered"], found["action"], found["part"]) == (True, "redact", "content")
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(each.token for each in tokens).strip() == (choice.message.content or "").strip()
    text, _ = openai_chat(http, "plain")
    assert "".join(each.token for each in tokens) != text


def test_a_request_is_refused(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": RAGE}]
    body = {"model": "kind", "messages": messages, "max_tokens": 3}
    error = post(http, "/v1/chat/completions", 400, **body)["error"]
    assert (error["code"], error["type"]) == ("content_filter", "invalid_request_error")
    assert error["message"] == (
        "policy 'kind' refuses the request: rule 'rage' found 'NEGATIVE' in what the user wrote"
    )
    assert RAGE not in json.dumps(error)
    assert post(http, "/v1/messages", 400, **body)["type"] == "error"
    assert post(http, "/generate", 422, model="kind", inputs=RAGE)["error_type"] == "content_filter"
    chat = {"model": "kind", "messages": messages}
    assert post(http, "/generate", 422, **chat)["error_type"] == "content_filter"
    # Not in a role that the rule does not read, and not of what is kind.
    system = {"role": "system", "content": RAGE}
    post(http, "/v1/chat/completions", **body | {"messages": [system, MESSAGES[0]]})
    document = {"messages": MESSAGES, "documents": [{"text": RAGE}]}
    told = post(http, "/v1/chat/completions", 400, **body | document)["error"]["message"]
    assert told.endswith("in what the document wrote")


def test_token_ids_are_read_as_text(http: httpx.Client) -> None:
    ids = post(http, "/v1/completions", model="plain", prompt=RAGE, max_tokens=1, echo=True)
    assert ids
    tokens = post(http, "/tokenize", model="kind", inputs=RAGE)
    given = [each["id"] for each in tokens[0]] if isinstance(tokens, list) else tokens
    post(http, "/v1/completions", 400, model="kind", prompt=given, max_tokens=1)


def test_a_long_text_is_read_whole(http: httpx.Client) -> None:
    """A classifier reads it in windows; the strongest verdict counts."""
    long = "The sun was warm and all were glad. " * 120
    body = {"model": "kind", "max_tokens": 2}
    kind = {"messages": [{"role": "user", "content": long}], "max_tokens": 2, "model": "kind"}
    reply = http.post("/v1/chat/completions", json=kind)
    assert "content_filter" not in reply.text
    hidden = [{"role": "user", "content": long + (RAGE + ". ") * 20 + long}]
    assert (
        "rage"
        in post(http, "/v1/chat/completions", 400, **body, messages=hidden)["error"]["message"]
    )


def test_values_come_back_in_the_reply(http: httpx.Client) -> None:
    """The model reads placeholders; what it writes of them is restored."""
    headers = {"x-policy": "restoring"}
    body = {"model": "plain", "prompt": SAID, "max_tokens": 6, "temperature": 0, "echo": True}
    reply = post(http, "/v1/completions", **body, headers=headers)["choices"][0]
    found = reply["content_filter_results"]["persons"]
    assert (found["action"], found["part"]) == ("redact", "user")
    assert "[PERSON_1]" in reply["text"]  # the prompt as the model read it
    counted = post(http, "/v1/completions", **body)["choices"][0]["text"]
    assert "[PERSON_1]" not in counted


def test_a_text_ends_where_a_rule_says(http: httpx.Client) -> None:
    body = {"model": "stopping", "prompt": SAID, "max_tokens": LENGTH, "temperature": 0}
    choice = post(http, "/v1/completions", **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "content_filter")
    told = events(http, "/v1/completions", **body)
    assert [e["choices"][0]["finish_reason"] for e in told if e["choices"]][-1] == "content_filter"
    chat = {"model": "stopping", "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
    assert post(http, "/v1/messages", **chat)["stop_reason"] == "refusal"
    asked = {"model": "stopping", "input": SAID, "max_output_tokens": 20, "temperature": 0}
    response = post(http, "/v1/responses", **asked)
    assert response["incomplete_details"] == {"reason": "content_filter"}


def test_a_reply_is_refused_whole(http: httpx.Client) -> None:
    headers = {"x-policy": "refusing"}
    text, streamed = openai_chat(http, "plain", headers=headers, n=1)
    assert text == streamed == ""


DETAILS = {"max_new_tokens": 4, "details": True}


def test_a_model_that_answers_questions_is_a_guard(http: httpx.Client) -> None:
    """Also while it writes what it judges, in more streams than it has slots."""
    body = {"model": "guarded", "prompt": SAID, "max_tokens": LENGTH, "temperature": 0}
    headers = {"x-policy": "deciding"}
    statements = ["The text is about Norway.", "It is short."]
    questions = [{"type": "predicate", "instructions": each} for each in statements]
    asked = {"model": "plain", "input": SAID, "questions": questions}
    answers = post(http, "/v1/decisions", **asked)["answers"]
    expected = {s: a["probability"] for s, a in zip(statements, answers, strict=True)}
    with ThreadPoolExecutor(20) as pool:
        one = partial(post, http, "/v1/completions", **body, headers=headers)
        replies = list(pool.map(lambda _: one(), range(20)))
    assert all(reply["choices"] == replies[0]["choices"] for reply in replies)
    choice = replies[0]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "content_filter")
    found = choice["content_filter_results"]
    assert (found["says"]["label"], found["says"]["filtered"]) == (statements[0], True)
    told = post(http, "/generate", model="plain", inputs=SAID, parameters=DETAILS, headers=headers)
    scores = {e["label"]: e["score"] for e in told["details"]["policy"] if e["rule"] == "asks"}
    assert scores == pytest.approx(expected, abs=1e-6)
    # More than fits into one prompt beside a statement is read in parts.
    parts = " ".join([SAID] * 24)
    told = post(http, "/generate", model="plain", inputs=parts, parameters=DETAILS, headers=headers)
    spans = [(e["start"], e["end"]) for e in told["details"]["policy"] if e["rule"] == "asks"]
    assert len(spans) == 2
    assert all(0 < end - start < len(parts) for start, end in spans)


def test_beams(http: httpx.Client) -> None:
    beams = {"max_new_tokens": LENGTH, "num_beams": 3, "do_sample": False}
    plain = post(http, "/generate", model="plain", inputs=SAID, parameters=beams)
    guarded = post(http, "/generate", model="guarded", inputs=SAID, parameters=beams)
    assert guarded["generated_text"] == redacted(http, plain["generated_text"])
    assert guarded["generated_text"] != plain["generated_text"]


def test_what_is_read_ahead_for_a_key_is_under_the_policies_of_that_key(
    server: Any, http: httpx.Client
) -> None:
    body = {"model": "plain", "messages": MESSAGES}
    admin = {"authorization": "Bearer root"}
    post(http, "/v1/prefill", **body, key="lax", headers=admin)
    error = post(http, "/v1/prefill", 400, **body, key="strict", headers=admin)["error"]
    assert "policy 'by-key' refuses the request" in error["message"]


def test_several_choices(http: httpx.Client) -> None:
    body = {"model": "guarded", "prompt": [SAID, "Alice"], "max_tokens": 20, "n": 3, "seed": 5}
    guarded = post(http, "/v1/completions", **body, temperature=1.0)["choices"]
    plain = post(http, "/v1/completions", **body | {"model": "plain"}, temperature=1.0)["choices"]
    assert [each["text"] for each in guarded] == [redacted(http, each["text"]) for each in plain]


def test_another_model_answers(http: httpx.Client) -> None:
    body = {"model": "away", "prompt": RAGE, "max_tokens": 5, "temperature": 0}
    reply = post(http, "/v1/completions", **body)
    assert reply["model"] == "plain"
    assert reply["choices"] == post(http, "/v1/completions", **body | {"model": "plain"})["choices"]
    assert post(http, "/v1/completions", **body | {"prompt": "So glad!"})["model"] == "away"


def test_a_model_is_bound_under_either_mask(http: httpx.Client) -> None:
    body = {"prompt": RAGE, "max_tokens": 2}
    for name in ("both", "both:full", "both:causal", "both:block"):
        error = post(http, "/v1/completions", 400, model=name, **body)["error"]
        assert error["code"] == "content_filter", (name, error)
    post(http, "/fill-mask", 403, model="both", inputs="a [MASK]")


def test_a_key_has_a_policy_of_its_own(http: httpx.Client) -> None:
    body = {"model": "plain", "prompt": "Hello", "max_tokens": 2}
    post(http, "/v1/completions", **body)
    strict = {"authorization": "Bearer one"}
    post(http, "/v1/completions", 400, **body, headers=strict)


def test_a_request_asks_for_more_never_for_less(http: httpx.Client) -> None:
    body = {"model": "kind", "prompt": RAGE, "max_tokens": 9, "temperature": 0}
    body |= {"headers": {"x-policy": "telling"}}
    post(http, "/v1/completions", 400, **body)
    reply = post(http, "/v1/completions", **body | {"prompt": "So glad!"})
    assert reply["choices"][0]["content_filter_results"]["mood"]["filtered"] is False
    unknown = body | {"headers": {"x-policy": "telling, nothing"}}
    message = post(http, "/v1/completions", 400, **unknown)["error"]["message"]
    assert message.startswith("x-policy: no policy 'nothing' here; there are: redacting, ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"inputs": SAID}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/embed", {"inputs": SAID}),
        ("/v1/embeddings", {"input": SAID}),
        ("/v2/models/guarded/infer", None),
    ],
)
def test_what_no_rule_sees_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any] | None
) -> None:
    if body is None:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [SAID]}
        reply = http.post(path, json={"inputs": [tensor]})
        assert reply.status_code in (200, 400, 403)
        plain = http.post(path.replace("guarded", "plain"), json={"inputs": [tensor]})
        assert plain.status_code == 200, plain.text
        if reply.status_code == 200:
            assert reply.json()["outputs"] != plain.json()["outputs"]
        return
    reply = http.post(path, json={"model": "guarded"} | body)
    assert reply.status_code in (400, 403, 404, 422), reply.text
    if reply.status_code == 403:
        assert "policy 'redacting' binds model 'guarded'" in reply.text


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"who": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["who", "n"],
            "additionalProperties": False,
        },
    },
}


PLACES = {"x-policy": "places"}


def without_places(http: httpx.Client, text: str) -> bool:
    """Whether the tagger finds no place in a text."""
    found = post(http, "/token-classify", model="tagger", inputs=text)
    return not any(each["entity_group"] == "LOC" and each["score"] >= 0.6 for each in found)


def test_arguments_of_calls_are_read(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    body: dict[str, Any] = {
        "model": "tools",
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 120,
        "temperature": 1.0,
    }
    num_changed = 0
    for seed in range(8):
        plain = post(http, path, seed=seed, **body)["choices"][0]
        whole = post(http, path, seed=seed, **body, headers=PLACES)["choices"][0]
        told = [
            each["choices"][0]["delta"].get("tool_calls", [])
            for each in events(http, path, seed=seed, **body, headers=PLACES)
        ]
        if whole["finish_reason"] == "content_filter":
            assert "tool_calls" not in whole["message"]
            continue
        assert whole["finish_reason"] == plain["finish_reason"]
        streamed = "".join(call["function"]["arguments"] for calls in told for call in calls)
        calls = [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]
        assert streamed == "".join(calls)
        said = [call["function"]["arguments"] for call in plain["message"]["tool_calls"]]
        assert len(said) == len(calls)
        for before, after in zip(said, calls, strict=True):
            if whole["finish_reason"] != "tool_calls":
                continue
            value = json.loads(before)["who"]
            assert (json.loads(after)["who"] == value) == without_places(http, value)
            num_changed += before != after
    assert num_changed


def test_json_stays_what_its_schema_says(http: httpx.Client) -> None:
    """Strings are redacted within their quotes; what then does not fit is refused."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"who": {"type": "string", "maxLength": 30}, "n": {"type": "boolean"}},
        "required": ["who", "n"],
        "additionalProperties": False,
    }

    def ask(seed: int, headers: dict[str, str]) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "plain", "messages": MESSAGES, "max_tokens": 80, "temperature": 1.0}
        body |= {"seed": seed, "response_format": form, "headers": headers}
        choice: dict[str, Any] = post(http, "/v1/chat/completions", **body)["choices"][0]
        return choice

    num_changed = 0
    for seed in range(8):
        guarded, plain = ask(seed, PLACES), ask(seed, {})
        if plain["finish_reason"] != "stop":
            continue
        if guarded["finish_reason"] == "content_filter":  # a placeholder is longer
            assert guarded["message"]["content"] == ""
            continue
        after, said = (json.loads(each["message"]["content"]) for each in (guarded, plain))
        assert (after["who"] == said["who"]) == without_places(http, said["who"])
        assert after["n"] == said["n"]
        num_changed += after != said
    assert num_changed
    # No placeholder is one of these values.
    drawn = (ask(seed, {})["message"]["content"] for seed in range(8))
    said = [json.loads(each)["who"] for each in drawn if each.endswith("}")]
    values = [each for each in said if not without_places(http, each)]
    assert values
    schema["properties"]["who"] = {"enum": values}
    guarded = ask(1, PLACES)
    assert (guarded["message"]["content"], guarded["finish_reason"]) == ("", "content_filter")


def test_verdicts_are_counted_and_logged_without_texts(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="maskdial.policy"):
        post(http, "/v1/completions", 400, model="kind", prompt=RAGE, max_tokens=2)
    (line,) = [each.getMessage() for each in caplog.records if "rage" in each.getMessage()]
    assert "policy kind: rule rage: NEGATIVE" in line
    assert "in user 0, characters 0 to" in line
    assert "hate" not in caplog.text
    metrics = http.get("/metrics").text
    assert 'maskdial_policy_verdicts_total{action="refuse",policy="kind",rule="rage"}' in metrics
    assert 'maskdial_policy_verdict_seconds_count{policy="kind",rule="rage"}' in metrics


def test_a_guard_that_is_gone_refuses(http: httpx.Client) -> None:
    """And nothing that it should have read goes out."""
    admin = {"authorization": "Bearer root"}
    post(http, "/models/unload", model="tagger", headers=admin)
    try:
        body = {"model": "guarded", "prompt": SAID, "max_tokens": 8, "temperature": 0}
        reply = http.post("/v1/completions", json=body)
        if reply.status_code == 200:  # it was loaded again for the rule
            text = post(http, "/v1/completions", **body | {"model": "plain"})
            assert reply.json()["choices"][0]["text"] == redacted(http, text["choices"][0]["text"])
        else:
            assert reply.status_code == 503
            assert "rule 'names' could not be judged" in reply.text
    finally:
        post(http, "/models/load", model="tagger", headers=admin)


def strings_of(content: object) -> Iterator[str]:
    match content:
        case str():
            yield content
        case list():
            for each in content:
                yield from strings_of(each)
        case dict():
            for value in content.values():
                yield from strings_of(value)


def told_by(reply: httpx.Response) -> set[str]:
    """The texts of a reply: all that is longer than a label and no more than letters and such."""
    lines = [line.removeprefix("data:").strip() for line in reply.text.splitlines()]
    parts = [json.loads(line) for line in lines if line[:2] in ('{"', "[{", '["', "[[")]
    return {each for each in strings_of(parts) if len(each) > 6 and " " in each.strip()}


NOT_WRITTEN = {"/detokenize", "/apply-template", "/api/show", "/redact"}
"""Routes whose texts no model writes."""


def test_no_route_goes_around(
    start_server: Callable[..., Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every kind of request, with and without a policy by which no text of a model goes out."""
    rule = POLICY[POLICY.index("[policies.refusing]") : POLICY.index("[policies.away]")]
    rule = rule.replace("[policies.refusing]", '[policies.refusing]\nmodels = ["*"]')
    policy = tmp_path / "policy.toml"
    policy.write_text(rule)
    of_input = tmp_path / "input.toml"
    of_input.write_text(rule.replace('"output"', '"input"'))
    models = make_models(tmp_path_factory.mktemp("models"))
    kinds = [
        kind
        for kind in (*KINDS, *TASKS)
        if kind.body is not None and not kind.leaves and not kind.half and kind.status == 200
        if kind.path not in {*NEED_TORCH, *NOT_WRITTEN} and not kind.headers
    ]
    settings = {"api_keys": [KEY], "admin_key": ADMIN_KEY, "max_queue": 1024}
    plain = start_server(models=models, **settings)
    bound = start_server(models=models, policy=policy, **settings)
    closed = start_server(models=models, policy=of_input, **settings)
    num_told = num_closed = 0
    try:
        for number, kind in enumerate(kinds):
            assert kind.body is not None
            body = kind.body(number)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            path = kind.target or kind.path
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            sent = headers | {name.lower(): value for name, value in kind.headers.items()}
            with httpx.Client(timeout=60) as client:
                free = client.post(plain.url + path, content=content, headers=sent)
                held = client.post(bound.url + path, content=content, headers=sent)
                shut = client.post(closed.url + path, content=content, headers=sent)
            given = content.decode(errors="replace")
            written = {each for each in told_by(free) if json.dumps(each)[1:-1] not in given}
            if "completion" in path or "chat" in path or "generate" in path:
                num_told += bool(written)
            assert free.status_code == 200, (kind.name, free.text)
            assert not told_by(held) & written, kind.name
            if "x-policy" in held.headers:  # it asks a model to write
                assert shut.status_code in (400, 422), (kind.name, shut.text)
                assert "policy 'refusing' refuses the request" in shut.text, kind.name
                num_closed += 1
    finally:
        plain.stop()
        bound.stop()
        closed.stop()
    assert num_told > 10
    assert num_closed > 20


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (('["guarded"]', '["gaurded"]'), "line 2: policy 'redacting' binds model 'gaurded', which"),
        (('model = "tagger"', 'model = "gone"'), "line 5: rule 'names': no model 'gone' is served"),
        (('model = "tagger"', 'model = "plain"'), "so nothing can be redacted by it"),
        (('["strict"]', '["strikt"]'), "binds requests with key 'strikt', and there is no key of"),
        (('model = "tagger"', 'model = "sentiment"'), "so nothing can be redacted by it"),
        (('["LOC"]', '["LOC", "ORG"]'), "rule 'places': model 'tagger' has no label 'ORG', but"),
        (('["person"]', "[]"), "rule 'persons': model 'finder' has no labels of its own"),
        (('["NEGATIVE"]', "[]"), "rule 'rage': name the labels that matter"),
        (('to = "plain"', 'to = "nowhere"'), "rule 'elsewhere': no model 'nowhere' is served"),
        (('action = "stop"', 'action = "halt"'), "policies.stopping.rules[0].action"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    server: Any, files: tuple[Path, Path], changed: tuple[str, str], told: str
) -> None:
    policies = server.server.config.app.state.context.policies
    before = policies.policies
    assert changed[0] in POLICY
    files[0].write_text(POLICY.replace(*changed))
    try:
        with pytest.raises(ConfigError) as caught:
            policies.reload()
        assert told in caught.value.message
        assert policies.policies is before
    finally:
        files[0].write_text(POLICY)


def test_sighup_reads_the_file_again(
    server: Any, files: tuple[Path, Path], http: httpx.Client
) -> None:
    body = {"model": "plain", "prompt": RAGE, "max_tokens": 2}
    post(http, "/v1/completions", **body)
    try:
        files[0].write_text(POLICY.replace('models = ["kind", "both"]', 'models = ["*"]'))
        server.server.reload()
        post(http, "/v1/completions", 400, **body)
        files[0].write_text("nothing")
        server.server.reload()
        post(http, "/v1/completions", 400, **body)
    finally:
        files[0].write_text(POLICY)
        server.server.reload()
    post(http, "/v1/completions", **body)


def test_a_server_does_not_start_with_a_model_that_is_not_served(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.replace('["guarded"]', '["hybrid"]'))
    program = [sys.executable, "-m", "maskdial", "serve", "--port", "0", "--policy", str(policy)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{policy}, line 5: rule 'names': no model 'tagger' is served" in done.stderr


def test_a_guard_that_is_too_slow_refuses(http: httpx.Client, server: Any) -> None:
    judge = server.server.config.app.state.context.policies.judge
    asked = judge._judge

    async def slow(rule: Any, *given: Any) -> Any:
        await asyncio.sleep(0.2 if rule.name == "names" else 0)
        return await asked(rule, *given)

    body = {"model": "guarded", "prompt": SAID, "max_tokens": LENGTH, "temperature": 0}
    policies = server.server.config.app.state.context.policies
    before = policies._policies
    judge._judge = slow
    try:
        for lets_pass in (False, True):
            changes: dict[str, Any] = {"timeout": 0.05, "lets_pass": lets_pass}
            policies._policies = tuple(
                replace(each, rules=tuple(replace(rule, **changes) for rule in each.rules))
                for each in before
            )
            reply = http.post("/v1/completions", json=body)
            streamed = http.post("/v1/completions", json=body | {"stream": True})
            if lets_pass:
                text = reply.json()["choices"][0]
                assert text["text"] == completions(http, "plain")[0]
                assert text["content_filter_results"]["names"]["label"] == "unchecked"
                continue
            assert reply.status_code == 503
            assert "rule 'names' could not be judged: no verdict within 0.05" in reply.text
            assert streamed.status_code == 503  # as nothing has gone out
    finally:
        judge._judge, policies._policies = asked, before


def test_a_response_in_the_background_has_the_policy_that_was_asked_for(
    http: httpx.Client,
) -> None:
    headers = {"x-policy": "refusing"}
    body = {"model": "plain", "input": SAID, "max_output_tokens": 20, "temperature": 0}
    queued = post(http, "/v1/responses", **body, background=True, headers=headers)
    path = f"/v1/responses/{queued['id']}"
    wait_for(lambda: http.get(path).json()["status"] not in ("queued", "in_progress"))
    response = http.get(path).json()
    assert response["incomplete_details"] == {"reason": "content_filter"}
    assert not any(part["text"].strip() for item in response["output"] for part in item["content"])


def test_lines_of_a_file_do_not_go_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is refused, also those after the first for the same model."""
    policy, lines, results = tmp_path / "policy.toml", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kind = POLICY[POLICY.index("[policies.kind]") : POLICY.index("[policies.stopping]")]
    policy.write_text(kind.replace('["kind", "both"]', '["hybrid"]'))
    monkeypatch.setenv("MASKDIAL_POLICY", str(policy))
    for task, model in (("score", "hybrid"), ("fill-mask", "hybrid"), ("generate", "hybrid")):
        text = "a [MASK]" if task == "fill-mask" else RAGE
        line = json.dumps({"model": model, "inputs": text, "parameters": {}})
        lines.write_text(f"{line}\n" * 70)
        cli.main(["batch", str(lines), str(results), "--task", task, "--overwrite"])
        assert results.read_text() == "", task
        errors = Path(f"{results}.errors.jsonl").read_text().splitlines()
        assert len(errors) == 70
        assert all("policy 'kind'" in each for each in errors), (task, errors[-1])
    capsys.readouterr()
