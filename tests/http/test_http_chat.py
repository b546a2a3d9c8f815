"""`messages` over HTTP: a bundle with a chat template, one whose template fails, one without."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import hash_files, load_bundle, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial_client import Client

# As real ones: it writes the special tokens, checks the roles, and trims what users wrote.
TEMPLATE = """\
{%- if messages[0].role == 'system' and messages|length == 1 %}
    {{- raise_exception('a conversation needs a user') }}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {{- message.role + ': ' + message.content | trim + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant:' }}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "You tell stories. "},
    {"role": "user", "content": "Tell me of a king."},
]
RENDERED = "<|endoftext|>system: You tell stories.\nuser: Tell me of a king.\nassistant:"
BOS = 0


def make_bundle(folder: Path, template: str) -> Path:
    """The causal starter with a chat template. Its tokenizer begins texts with BOS."""
    shutil.copytree(STARTER_FOLDER / "hybrid", folder, ignore=shutil.ignore_patterns("*.full.*"))
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    manifest = load_bundle("hybrid", folder).manifest
    files = hash_files(folder, [*manifest.files, CHAT_TEMPLATE])
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    return folder


@pytest.fixture(scope="module")
def chat(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    server = start_server(
        models={
            "plain": STARTER_FOLDER / "hybrid",
            "chat": make_bundle(folder / "chat", TEMPLATE),
            "endless": make_bundle(folder / "endless", endless),
            "empty": make_bundle(folder / "empty", "{# nothing #}"),
        }
    )
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(chat: httpx.Client, route: str = "/generate", **body: Any) -> Any:
    reply = chat.post(route, json={"model": "chat"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(chat: httpx.Client, **body: Any) -> str:
    reply = chat.post("/generate", json={"model": "chat"} | body)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error_type"] == "validation"
    return str(reply.json()["error"])


def test_messages_are_rendered_by_the_models_template(chat: httpx.Client) -> None:
    parameters = {"max_new_tokens": 8, "decoder_input_details": True, "return_full_text": True}
    answer = ask(chat, messages=MESSAGES, parameters=parameters)
    assert answer["generated_text"].startswith(RENDERED)
    assert "".join(token["text"] for token in answer["details"]["prefill"]) == RENDERED

    # The template writes the special tokens itself; inputs get them from the tokenizer.
    ids = [token["id"] for token in answer["details"]["prefill"]]
    as_inputs = ask(chat, inputs=RENDERED, parameters=parameters)
    assert [token["id"] for token in as_inputs["details"]["prefill"]] == [BOS, *ids]
    same = ask(chat, inputs=RENDERED.removeprefix("<|endoftext|>"), parameters=parameters)
    assert same["details"] == answer["details"]


def test_an_answer_without_the_prompt(chat: httpx.Client) -> None:
    parameters = {"max_new_tokens": 8, "details": True}
    answer = ask(chat, messages=MESSAGES, parameters=parameters)
    assert set(answer) == {"generated_text", "details"}
    assert answer["generated_text"]
    assert ask(chat, "/models/chat", messages=MESSAGES, parameters=parameters) == [answer]
    parts = [{"role": "system", "content": [{"type": "text", "text": "You tell stories."}]}]
    assert ask(chat, messages=parts + MESSAGES[1:], parameters=parameters) == answer
    other = ask(chat, messages=MESSAGES[1:], parameters=parameters)
    assert other["details"]["input_length"] < answer["details"]["input_length"]


def test_a_streamed_answer(chat: httpx.Client) -> None:
    parameters = {"max_new_tokens": 12, "temperature": 0.9, "seed": 4}
    answer = ask(chat, messages=MESSAGES, parameters=parameters | {"details": True})
    body = {"model": "chat", "messages": MESSAGES, "parameters": parameters}
    with chat.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["token"] for event in events] == answer["details"]["tokens"]
    assert events[-1]["generated_text"] == answer["generated_text"]


def test_conversations_take_every_parameter(chat: httpx.Client) -> None:
    parameters = {"max_new_tokens": 6, "temperature": 1.0, "seed": 9, "n": 3, "details": True}
    texts = ask(chat, messages=MESSAGES, parameters=parameters)
    assert [text["details"]["seed"] for text in texts] == [9, 10, 11]
    grammar = {"type": "regex", "value": " (yes|no)"}
    text = ask(chat, messages=MESSAGES, parameters={"grammar": grammar})["generated_text"]
    assert text in (" yes", " no")
    cut = ask(chat, messages=MESSAGES, parameters={"truncate": 4, "details": True})
    assert cut["details"]["input_length"] == 4


def test_a_conversation_longer_than_the_context(chat: httpx.Client) -> None:
    messages = [{"role": "user", "content": "the " * 800}]
    error = refusal(chat, messages=messages)
    assert "context of 512" in error
    reply = chat.post(
        "/generate", json={"model": "chat", "messages": messages, "parameters": {"truncate": 100}}
    )
    assert reply.status_code == 200
    assert int(reply.headers["x-truncated-tokens"]) > 700


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "plain", "messages": MESSAGES}, "model 'plain' has no chat template"),
        ({"messages": MESSAGES[:1]}, "a conversation needs a user"),
        ({"model": "endless", "messages": MESSAGES}, "takes more than 1,000,000 steps"),
        ({"model": "empty", "messages": MESSAGES}, "the prompt has no tokens"),
        ({"inputs": "a", "messages": MESSAGES}, "either inputs or messages, not both"),
        ({"inputs": ["a"], "messages": MESSAGES}, "either inputs or messages, not both"),
        ({}, "give a prompt as inputs, or a conversation as messages"),
        ({"inputs": None, "messages": None}, "give a prompt as inputs"),
        ({"messages": []}, "between 1 and 10000 messages"),
        ({"messages": MESSAGES * 5001}, "at most 10000 items"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [MESSAGES]}, "messages[0]: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: this field is required"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: this field is required"),
        ({"messages": [{"role": "", "content": "a"}]}, "between 1 and 64 characters"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: this field is"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]},
            "part 0 is an image",
        ),
    ],
)
def test_conversations_that_cannot_be_answered(
    chat: httpx.Client, body: dict[str, Any], words: str
) -> None:
    assert words in refusal(chat, **body)


def test_a_slow_template_is_given_up(chat: httpx.Client) -> None:
    body = {"model": "endless", "messages": MESSAGES, "timeout": 1e-3}
    reply = chat.post("/generate", json=body)
    assert reply.status_code == 504
    assert reply.json()["error_type"] == "timeout"


def test_the_client_talks_to_it(chat: httpx.Client) -> None:
    parameters: Any = {"max_new_tokens": 8, "seed": 2, "temperature": 0.8}
    expected = ask(chat, messages=MESSAGES, parameters=parameters)
    with Client(str(chat.base_url)) as client:
        answer = client.generate(model="chat", messages=MESSAGES, **parameters)
        assert answer.generated_text == expected["generated_text"]
        with client.stream(model="chat", messages=MESSAGES, **parameters) as stream:
            assert "".join(event.text for event in stream) == answer.generated_text
