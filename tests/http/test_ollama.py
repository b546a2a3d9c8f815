"""Ollama's API, by the lines and bodies that it documents.

`tests/clients/sdks/use_ollama.py` and `use_langchain_ollama.py` do the same with its clients.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from pydantic import SecretStr

from maskdial.causal.tools import ToolFormat
from maskdial.dialects.ollama.errors import error_content, line
from maskdial.dialects.ollama.messages import MessageBody, conversation
from maskdial.errors import ConfigError, DeadlineError
from maskdial.exporting import Progress
from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import held
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle
from tests.page import bundles
from tests.servers import engine_of

ADMIN = {"x-api-key": "root"}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of a king."}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
# A template that tells what it was given.
MIRROR = """\
{{- raise_exception((messages | tojson) ~ ' ' ~ (tools or []) | length
    ~ ' ' ~ reasoning_effort | default('-') ~ ' ' ~ enable_thinking | default('-')) }}
"""
# Its prompt ends within what the manifest calls thoughts.
THINKER = """\
{{- bos_token }}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{{- 'assistant:' }}
"""
HERMES = ToolFormat(call='<tool_call>{"name": "$NAME", "arguments": $ARGUMENTS}</tool_call>')


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("bundles")
    hermes = (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")
    marks = ("assistant:", ".")
    models = {
        "chat": chat_bundle,
        "hermes": make_chat_bundle(folder / "hermes", hermes),
        "mirror": make_chat_bundle(
            folder / "mirror", MIRROR, tool_format=HERMES.to_json(), thinking_marks=marks
        ),
        "thinker": make_chat_bundle(folder / "thinker", THINKER, thinking_marks=marks),
        "embedder": bundles.make_embedder(folder / "embedder"),
        "hybrid": STARTER_FOLDER / "hybrid",
    }
    shelf = folder / "shelf"
    shutil.copytree(STARTER_FOLDER / "hybrid", shelf / "spare")
    running = start_server(models=models, model_dir=shelf, admin_key="root")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": MESSAGES, "options": GREEDY} | changes


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """A whole reply."""
    reply = http.post(path, json=body | {"stream": False})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream, which is what clients get that do not say otherwise."""
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    *lines, rest = reply.content.split(b"\n")
    assert rest == b""
    found = [json.loads(each) for each in lines]
    assert [each["done"] for each in found] == [False] * (len(found) - 1) + [True]
    return found


def refusal(http: httpx.Client, path: str, body: dict[str, Any], status: int = 400) -> str:
    reply = http.post(path, json=body)
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    return str(reply.json()["error"])


def test_a_whole_answer(http: httpx.Client) -> None:
    reply = ask(http, "/api/chat", chat_body(model="chat:latest"))
    expected = http.post(
        "/generate",
        json={
            "model": "chat",
            "messages": MESSAGES,
            "parameters": {"max_new_tokens": 24, "details": True},
        },
    ).json()
    assert reply["message"] == {"role": "assistant", "content": expected["generated_text"]}
    assert (reply["model"], reply["done"], reply["done_reason"]) == ("chat:latest", True, "length")
    assert datetime.fromisoformat(reply["created_at"]).tzinfo is not None
    assert (reply["prompt_eval_count"], reply["eval_count"]) == (
        expected["details"]["input_length"],
        24,
    )
    assert all(isinstance(reply[name], int) and reply[name] > 0 for name in DURATIONS)
    parts = reply["load_duration"] + reply["prompt_eval_duration"] + reply["eval_duration"]
    assert parts <= reply["total_duration"]


def test_a_stream_makes_the_same_answer(http: httpx.Client) -> None:
    whole = ask(http, "/api/chat", chat_body())
    *parts, last = stream(http, "/api/chat", chat_body())
    assert len(parts) > 10, "as they are generated"
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() == whole.keys()
    assert all(DURATIONS.isdisjoint(part) for part in parts)
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert last[name] == whole[name]


def test_a_last_message_of_the_assistant_is_continued(http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once there was a king who"}]
    expected = http.post(
        "/v1/chat/completions",
        json={
            "model": "hermes",
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            "continue_final_message": True,
        },
    ).json()
    reply = ask(http, "/api/chat", chat_body(model="hermes", messages=messages))
    assert reply["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert reply["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def test_generate_fills_the_template_or_continues(http: httpx.Client) -> None:
    chatted = ask(http, "/api/chat", chat_body())["message"]["content"]
    body = {"model": "chat", "prompt": MESSAGES[0]["content"], "options": GREEDY}
    assert ask(http, "/api/generate", body)["response"] == chatted
    parts = stream(http, "/api/generate", body)
    assert "".join(part["response"] for part in parts) == chatted
    with_system = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    expected = ask(http, "/api/chat", chat_body(messages=with_system))["message"]["content"]
    assert ask(http, "/api/generate", body | {"system": "Be kind."})["response"] == expected
    parameters = {"max_new_tokens": 24}
    plain = http.post(
        "/generate", json={"model": "chat", "inputs": body["prompt"], "parameters": parameters}
    ).json()["generated_text"]
    for raw in ({"raw": True}, {"template": "{{ .Prompt }}"}, {"model": "hybrid"}):
        assert ask(http, "/api/generate", body | raw)["response"] == plain


def test_options(http: httpx.Client) -> None:
    text = ask(http, "/api/chat", chat_body())["message"]["content"]
    stop = text.split()[3]
    for stops in (stop, [stop, "never said"]):
        reply = ask(http, "/api/chat", chat_body(options=GREEDY | {"stop": stops}))
        assert reply["message"]["content"] == text[: text.index(stop)]
        assert reply["done_reason"] == "stop"
    runtime = {"num_ctx": 8192, "num_gpu": 1, "num_thread": 4, "mirostat": 0, "repeat_last_n": 64}
    reply = ask(http, "/api/chat", chat_body(options=GREEDY | runtime))
    assert reply["message"]["content"] == text
    drawn = {"temperature": 1.5, "num_predict": 24}
    seeded = [
        ask(http, "/api/chat", chat_body(options=drawn | {"seed": 7}))["message"] for _ in range(2)
    ]
    assert seeded[0] == seeded[1] != {"role": "assistant", "content": text}
    others = {
        ask(http, "/api/chat", chat_body(options=drawn | {"seed": -1}))["message"]["content"]
        for _ in range(4)
    }
    assert len(others) > 1
    narrow = drawn | {"top_k": 1, "num_predict": 1_000_000}
    long = ask(http, "/api/chat", chat_body(options=narrow))
    assert long["message"]["content"].startswith(text)
    assert long["eval_count"] <= 512
    penalized = ask(http, "/api/chat", chat_body(options=GREEDY | {"repeat_penalty": 5.0}))
    assert penalized["message"]["content"] != text
    for last_n, expected in ((0, text), (-1, penalized["message"]["content"])):
        options = GREEDY | {"repeat_penalty": 5.0, "repeat_last_n": last_n}
        reply = ask(http, "/api/chat", chat_body(options=options))
        assert reply["message"]["content"] == expected
    windowed = GREEDY | {"repeat_penalty": 5.0, "repeat_last_n": 8}
    reply = ask(http, "/api/chat", chat_body(options=windowed))
    assert reply["message"]["content"] not in (text, penalized["message"]["content"])


def test_formats(http: httpx.Client) -> None:
    long = {"temperature": 0, "num_predict": 100}
    reply = ask(http, "/api/chat", chat_body(format=SCHEMA, options=long))
    jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)
    assert reply["done_reason"] == "stop"
    body = {"model": "hybrid", "prompt": "Once", "format": SCHEMA, "options": long}
    jsonschema.validate(json.loads(ask(http, "/api/generate", body)["response"]), SCHEMA)
    begun = ask(http, "/api/chat", chat_body(format="json"))["message"]["content"]
    assert begun.lstrip().startswith("{")


def test_log_probabilities(http: httpx.Client) -> None:
    asked = chat_body(logprobs=True, top_logprobs=2)
    whole = ask(http, "/api/chat", asked)
    assert len(whole["logprobs"]) == 24
    for token in whole["logprobs"]:
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"])
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
    parts = stream(http, "/api/chat", asked)
    assert [each for part in parts for each in part.get("logprobs", ())] == whole["logprobs"]


def test_thoughts_are_apart(http: httpx.Client) -> None:
    body = chat_body(model="thinker", options={"temperature": 0, "num_predict": 60})
    message = ask(http, "/api/chat", body)["message"]
    assert message["thinking"]
    assert "." not in message["thinking"]
    assert message["content"]
    parts = [part["message"] for part in stream(http, "/api/chat", body)]
    assert "".join(part.get("thinking", "") for part in parts) == message["thinking"]
    assert "".join(part["content"] for part in parts) == message["content"]
    prompt = {"model": "thinker", "prompt": MESSAGES[0]["content"], "options": body["options"]}
    generated = ask(http, "/api/generate", prompt)
    assert (generated["thinking"], generated["response"]) == (
        message["thinking"],
        message["content"],
    )
    short = body | {"options": body["options"] | {"thinking_budget": 2}}
    cut = ask(http, "/api/chat", short)["message"]
    assert message["thinking"].startswith(cut["thinking"])
    assert len(cut["thinking"]) < len(message["thinking"])
    assert cut["content"]
    assert "does not think" in refusal(http, "/api/chat", chat_body(think=True))
    assert ask(http, "/api/chat", chat_body(think=False))["done"]


@pytest.mark.parametrize(
    ("think", "told"), [(True, "- true"), (False, "- false"), ("high", "high true")]
)
def test_what_templates_are_told_of_thinking(http: httpx.Client, think: Any, told: str) -> None:
    message = refusal(http, "/api/chat", chat_body(model="mirror", think=think))
    assert f"0 {told}" in message.lower()


def test_results_belong_to_calls_by_order_and_name() -> None:
    def called(*names: str, **more: Any) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": {"a": 1}}} | more for name in names]
        return {"role": "assistant", "tool_calls": calls}

    messages = [
        *MESSAGES,
        called("look", "find", "look"),
        {"role": "tool", "tool_name": "find", "content": "1"},
        {"role": "tool", "content": "2"},
        called("look", id="mine", type="function"),
        {"role": "tool", "tool_call_id": "mine", "content": "3"},
        {"role": "tool", "tool_name": "look", "content": "4"},
        {"role": "tool", "tool_name": "other", "content": "5"},
    ]
    seen = conversation([MessageBody.model_validate(message) for message in messages])
    calls = [call for message in seen for call in message.tool_calls]
    assert [call.call_id for call in calls] == ["call_0", "call_1", "call_2", "mine"]
    assert {call.arguments for call in calls} == {'{"a": 1}'}
    results = [(each.tool_call_id, each.content) for each in seen if each.role == "tool"]
    assert results == [("call_1", "1"), ("call_0", "2"), ("mine", "3"), ("call_2", "4"), ("", "5")]


def test_calls_have_objects_as_arguments(http: httpx.Client) -> None:
    """No field makes the model call a tool; a bias keeps it from writing the only other text."""
    format_: Any = {"enum": ["no"]}
    quote = http.post(
        "/tokenize", json={"model": "hermes", "inputs": '"no', "add_special_tokens": False}
    )
    biases = {str(token["id"]): -100 for token in quote.json()[0]}
    options = GREEDY | {"num_predict": 100, "logit_bias": biases}
    body = chat_body(model="hermes", tools=[WEATHER], options=options, format=format_)
    whole = ask(http, "/api/chat", body)
    (call, *_) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["index"] == 0
    jsonschema.validate(call["function"]["arguments"], SCHEMA)
    assert whole["done_reason"] in ("stop", "length")
    parts = [part["message"] for part in stream(http, "/api/chat", body)]
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        call["function"] for call in whole["message"]["tool_calls"]
    ]


def test_embed(http: httpx.Client) -> None:
    texts = ["The ship left at dawn.", "She baked bread."]
    reply = ask(http, "/api/embed", {"model": "embedder", "input": texts})
    own = http.post("/embed", json={"model": "embedder", "inputs": texts, "normalize": True}).json()
    assert len(reply["embeddings"]) == 2
    for vector, expected in zip(reply["embeddings"], own, strict=True):
        assert vector == pytest.approx(expected, abs=1e-6)
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
    assert reply["prompt_eval_count"] > 8
    (single,) = ask(http, "/api/embed", {"model": "embedder", "input": texts[0]})["embeddings"]
    assert single == reply["embeddings"][0]
    inputs: tuple[str | list[str], ...] = ("", [])
    for nothing in inputs:
        assert ask(http, "/api/embed", {"model": "embedder", "input": nothing})["embeddings"] == []
    old = http.post("/api/embeddings", json={"model": "embedder", "prompt": texts[0]}).json()
    expected = http.post("/embed", json={"model": "embedder", "inputs": texts[0]}).json()
    assert old["embedding"] == pytest.approx(expected[0], abs=1e-6)
    assert http.post("/api/embeddings", json={"model": "embedder"}).json() == {"embedding": []}


def test_long_texts_are_cut_unless_they_must_not_be(http: httpx.Client) -> None:
    body = {"model": "embedder", "input": ["short", "word " * 3000]}
    assert len(ask(http, "/api/embed", body)["embeddings"]) == 2
    told = refusal(http, "/api/embed", body | {"truncate": False})
    assert told.startswith("input[1]: ")


def test_models(http: httpx.Client) -> None:
    assert http.get("/api/version").json()["version"].count(".") == 2
    listed = {each["name"]: each for each in http.get("/api/tags").json()["models"]}
    assert {"chat:latest", "embedder:latest", "spare:latest"} <= listed.keys()
    for name, each in listed.items():
        assert each["model"] == name
        assert each["size"] > 10_000
        assert len(each["digest"]) == 64
        assert datetime.fromisoformat(each["modified_at"]).year > 2000
    assert listed["hybrid:latest"]["digest"] == listed["spare:latest"]["digest"]
    assert listed["chat:latest"]["digest"] != listed["hybrid:latest"]["digest"]
    assert listed["chat:latest"]["details"]["format"] == "onnx"
    running = {each["model"]: each for each in http.get("/api/ps").json()["models"]}
    assert datetime.fromisoformat(running["chat:latest"]["expires_at"]).year > 2300
    assert running["chat:latest"]["context_length"] == 512


def test_show(http: httpx.Client) -> None:
    shown = http.post("/api/show", json={"name": "hermes:latest", "verbose": True}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert "tool_call" in shown["template"]
    assert "temperature" in shown["parameters"]
    lengths = {
        value for name, value in shown["model_info"].items() if name.endswith(".context_length")
    }
    assert lengths == {512}
    thinker = http.post("/api/show", json={"model": "thinker"}).json()
    assert "thinking" in thinker["capabilities"]
    embedder = http.post("/api/show", json={"model": "embedder"}).json()
    assert embedder["capabilities"] == ["embedding"]
    refusal(http, "/api/show", {"model": "none"}, 404)


def test_requests_without_input_load_and_unload(server: Any, http: httpx.Client) -> None:
    def loaded() -> bool:
        names = {each["name"] for each in http.get("/api/ps").json()["models"]}
        return "spare:latest" in names

    assert not loaded()
    reply = ask(http, "/api/generate", {"model": "spare"})
    assert (reply["response"], reply["done"], reply["done_reason"]) == ("", True, "load")
    assert loaded()
    unload = {"model": "spare:latest", "messages": [], "keep_alive": 0}
    assert "key" in refusal(http, "/api/chat", unload, 401)
    assert loaded()
    reply = http.post("/api/chat", json=unload, headers=ADMIN).json()
    assert (reply["message"]["content"], reply["done_reason"]) == ("", "unload")
    assert not loaded()
    kept = {"model": "spare", "keep_alive": "10m"}
    assert http.post("/api/generate", json=kept, headers=ADMIN).json()["done_reason"] == "load"
    (spare,) = (
        each for each in http.get("/api/ps").json()["models"] if each["name"] == "spare:latest"
    )
    left = datetime.fromisoformat(spare["expires_at"]) - datetime.fromisoformat(reply["created_at"])
    assert 500 < left.total_seconds() < 700
    # A request with input keeps nothing and unloads nothing.
    answered = {"model": "spare", "prompt": "Once", "keep_alive": 0, "options": {"num_predict": 1}}
    assert ask(http, "/api/generate", answered)["done_reason"] == "length"
    assert loaded()
    http.post("/api/chat", json=unload, headers=ADMIN).raise_for_status()


@pytest.mark.parametrize("value", [-1, 0, 30, 1.5, "5m", "1h30m", "-1s", "300", "-1", "100ms"])
def test_all_that_may_be_said_of_keeping(http: httpx.Client, value: Any) -> None:
    assert ask(http, "/api/chat", chat_body(keep_alive=value))["done"]


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m", "1e9", True, [], "5m" * 9])
def test_what_may_not_be_said_of_keeping(http: httpx.Client, value: Any) -> None:
    assert refusal(http, "/api/chat", chat_body(keep_alive=value)).startswith("keep_alive: must be")


def test_what_changes_models_is_refused_in_a_sentence(http: httpx.Client) -> None:
    for path in ("push", "create", "copy", "blobs/sha256:0"):
        told = refusal(http, f"/api/{path}", {"model": "chat"}, 403)
        assert "this server is maskdial" in told
    reply = http.request("DELETE", "/api/delete", json={"model": "chat"}, headers=ADMIN)
    assert reply.status_code == 403
    assert "its owner allows it with --allow-pull" in reply.json()["error"]
    assert http.post("/api/pull", json={"model": "chat"}).json() == {"status": "success"}
    assert "maskdial export" in refusal(http, "/api/pull", {"model": "none"}, 404)


def test_clients_find_the_server(http: httpx.Client) -> None:
    """They ask for the head of the root, where the page is."""
    assert http.head("/").status_code == 200


def test_an_error_before_the_first_line_has_its_status(http: httpx.Client) -> None:
    for changes, status in (({"model": "none"}, 404), ({"timeout": 0.001}, 504)):
        reply = http.post("/api/chat", json=chat_body(**changes))
        assert (reply.status_code, reply.json().keys()) == (status, {"error"})
        assert reply.headers["content-type"] == "application/json"


def test_an_error_ends_a_stream(server: Any, http: httpx.Client) -> None:
    long = GREEDY | {"num_predict": 100}  # more than three steps write, drafts included
    with (
        held(engine_of(server, "chat"), 3),
        http.stream("POST", "/api/chat", json=chat_body(timeout=1.0, options=long)) as reply,
    ):
        lines = [json.loads(each) for each in reply.iter_lines()]
    assert reply.status_code == 200
    assert lines[-1].keys() == {"error"}
    assert "did not finish within its timeout" in lines[-1]["error"]
    assert len(lines) > 1


def test_line_ends_of_unicode_do_not_end_lines() -> None:
    content = line(error_content(DeadlineError("a\u2028b\u0085c")))
    assert len(content.decode().splitlines()) == 1
    assert json.loads(content) == {"error": "a\u2028b\u0085c"}


@pytest.fixture
def pulling(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    """A server that may pull, and makes every model of the one that ships."""
    monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "cache"))

    def export(
        options: list[str], folder: Path, show: Callable[[Progress], None], *_: object
    ) -> None:
        if "bad" in options[-1]:
            raise ConfigError("acme/bad is gated")
        for done in (10, 20):
            show(Progress("Downloading", done, 20, "bytes"))
        show(Progress("Checking", 0, 0, ""))
        shutil.copytree(STARTER_FOLDER / "hybrid", folder)

    monkeypatch.setattr("maskdial.intake.export_apart", export)
    running = start_server(
        models={"own": STARTER_FOLDER / "hybrid"},
        allow_pull=("acme/*",),
        admin_key=SecretStr("root"),
    )
    with httpx.Client(base_url=running.url, timeout=60) as http:
        yield http
    running.stop()


def test_pulling_and_deleting(pulling: httpx.Client, tmp_path: Path) -> None:
    name, body = "hf.co/acme/tale:Q4_K_M", {"model": "hf.co/acme/tale:Q4_K_M"}
    assert pulling.post("/api/pull", json=body).status_code == 401
    reply = pulling.post("/api/pull", json=body, headers=ADMIN)
    first, half, whole, checking, last = map(json.loads, reply.iter_lines())
    assert (first, checking, last) == (
        {"status": "pulling manifest"},
        {"status": "checking"},
        {"status": "success"},
    )
    digest = half.pop("digest")
    assert half == {"status": "downloading", "total": 20, "completed": 10}
    assert (whole["digest"], whole["completed"]) == (digest, 20)
    folder = tmp_path / "cache" / "acme" / "tale--Q4_K_M"
    assert folder.is_dir()
    asked = {"prompt": "Once", "options": {"num_predict": 2}}
    for each in (name, "acme/tale:Q4_K_M", "acme/tale--Q4_K_M:latest"):
        assert ask(pulling, "/api/generate", asked | {"model": each})["done"]
    listed = pulling.get("/api/tags").json()["models"]
    assert "acme/tale--Q4_K_M:latest" in {each["name"] for each in listed}
    # There already, which anybody may be told
    assert pulling.post("/api/pull", json=body | {"stream": False}).json()["status"] == "success"

    assert pulling.request("DELETE", "/api/delete", json=body).status_code == 401
    pulling.request("DELETE", "/api/delete", json=body, headers=ADMIN).raise_for_status()
    assert not folder.exists()
    assert pulling.post("/api/show", json=body).status_code == 404
    own = pulling.request("DELETE", "/api/delete", json={"model": "own"}, headers=ADMIN)
    assert own.status_code == 403
    assert (STARTER_FOLDER / "hybrid").is_dir()


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("acme2/tale", 403, "this server pulls no 'acme2/tale'; --allow-pull has acme/*"),
        ("acme/bad", 400, "model acme/bad: acme/bad is gated"),
        ("tale", 400, "'tale' is no name of the Hub: ORG/NAME"),
        ("../../etc/passwd", 400, "is no name of the Hub"),
        ("/etc/passwd", 400, "is no name of the Hub"),
        ("acme/..", 400, "is no name of the Hub"),
        ("http://127.0.0.1/acme/tale", 400, "is no name of the Hub"),
        ("acme/tale@main", 400, "is no name of the Hub"),
    ],
)
def test_what_is_not_pulled(
    pulling: httpx.Client, tmp_path: Path, name: str, status: int, why: str
) -> None:
    body = {"model": name, "stream": False}
    reply = pulling.post("/api/pull", json=body, headers=ADMIN)
    assert reply.status_code == status
    assert why in reply.json()["error"]
    assert [each for each in (tmp_path / "cache").rglob("*") if each.is_file()] == []


def test_a_client_that_leaves_gives_its_pull_up(
    pulling: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given_up = threading.Event(), threading.Event()

    def export(
        _: list[str], __: Path, show: Callable[[Progress], None], ___: object, stop: threading.Event
    ) -> None:
        show(Progress("Downloading", 1, 20, "bytes"))
        begun.set()
        assert stop.wait(60)
        given_up.set()
        raise InterruptedError

    monkeypatch.setattr("maskdial.intake.export_apart", export)
    with pulling.stream("POST", "/api/pull", json={"model": "acme/a"}, headers=ADMIN) as reply:
        assert next(reply.iter_lines())
        assert begun.wait(60)
    assert given_up.wait(60)
