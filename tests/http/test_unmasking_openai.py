"""`/v1/completions` and `/v1/chat/completions` under the full mask, and streams of each pass."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from maskdial.bundle.bundle import hash_files, read_manifests, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE, FULL_MANIFEST, MANIFEST
from tests.http.written import WAYS

PROMPT = "Once upon"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{{ mark or '' }}{% if add_generation_prompt %}a:{% endif %}"
)
CHAT = [{"role": "user", "content": "Who?"}]
HOW: dict[str, Any] = {"block_length": 4, "steps": 6, "order": "entropy"}
DRAWN: dict[str, Any] = {**HOW, "temperature": 2.0, "seed": 5}


@pytest.fixture(scope="module")
def url(
    hybrid_bundle: Path, start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("unmasking") / "dial"
    shutil.copytree(hybrid_bundle, folder)
    (folder / CHAT_TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
    names = (MANIFEST, FULL_MANIFEST)
    for manifest, name in zip(read_manifests("dial", folder), names, strict=True):
        files = manifest.files | hash_files(folder, [CHAT_TEMPLATE])
        write_manifest(folder, manifest.model_copy(update={"files": files}), name)
    running = start_server(models={"dial": folder}, threads=1)
    yield str(running.url)
    running.stop()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(http: httpx.Client, route: str, status: int = 200, **body: object) -> Any:
    reply = http.post(route, json={"model": "dial:full", **body})
    assert reply.status_code == status, reply.text
    return reply.json()


def events(http: httpx.Client, route: str, **body: object) -> list[Any]:
    reply = http.post(route, json={"model": "dial:full", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data:").strip() for line in reply.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def generate(http: httpx.Client, prompt: str = PROMPT, **parameters: object) -> Any:
    parameters = {"max_new_tokens": 12, "details": True, **parameters}
    return post(http, "/generate", inputs=prompt, parameters=parameters)


@pytest.mark.parametrize("how", [HOW, DRAWN])
def test_completions_are_the_texts_of_generate(http: httpx.Client, how: dict[str, Any]) -> None:
    expected = generate(http, **how)
    reply = post(http, "/v1/completions", prompt=PROMPT, max_tokens=12, **how)
    (choice,) = reply["choices"]
    details = expected["details"]
    assert choice["text"] == expected["generated_text"]
    reason = {"length": "length", "eos_token": "stop"}[details["finish_reason"]]
    assert (choice["finish_reason"], choice["logprobs"]) == (reason, None)
    assert reply["usage"]["completion_tokens"] == details["generated_tokens"]
    assert reply["usage"]["prompt_tokens"] == details["input_length"]
    assert (reply["object"], reply["model"]) == ("text_completion", "dial")


def test_token_ids_are_read_unchanged(
    http: httpx.Client, byte_tokenizer: Callable[..., tokenizers.Tokenizer]
) -> None:
    ids = byte_tokenizer().encode(PROMPT).ids
    both = [
        post(http, "/v1/completions", prompt=prompt, max_tokens=8)["choices"][0]["text"]
        for prompt in (PROMPT, ids)
    ]
    assert both[0] == both[1]


def test_conversations_are_rendered(http: httpx.Client, sdk: openai.OpenAI) -> None:
    expected = generate(http, "u:Who?;a:", max_new_tokens=8, block_length=4)["generated_text"]
    reply = sdk.chat.completions.create(
        model="dial:full",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=8,
        extra_body={"block_length": 4},
    )
    assert reply.choices[0].message.content == expected
    chunks = sdk.chat.completions.create(
        model="dial:full",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"block_length": 4},
    )
    *blocks, usage = chunks
    assert len(blocks) == 2
    assert blocks[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in blocks) == expected
    assert [each.choices[0].finish_reason for each in blocks] == [None, "length"]
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 8
    marked = post(
        http,
        "/v1/chat/completions",
        messages=CHAT,
        max_tokens=4,
        chat_template_kwargs={"mark": "!"},
    )
    expected = generate(http, "u:Who?;!a:", max_new_tokens=4)["generated_text"]
    assert marked["choices"][0]["message"]["content"] == expected


def test_streams_of_completions_send_blocks(http: httpx.Client) -> None:
    whole = post(http, "/v1/completions", prompt=PROMPT, max_tokens=12, **DRAWN)
    chunks = events(http, "/v1/completions", prompt=PROMPT, max_tokens=12, **DRAWN)
    assert "".join(each["choices"][0]["text"] for each in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert len(chunks) == -(-whole["usage"]["completion_tokens"] // 4)
    assert not any("unmasked" in each["choices"][0] for each in chunks)


def test_streams_show_every_pass(http: httpx.Client) -> None:
    tokens = generate(http, **HOW)["details"]["tokens"]
    parameters = {"max_new_tokens": 12, "stream_unmasking": True, **HOW}
    sent = events(http, "/generate", inputs=PROMPT, parameters=parameters)
    passes = [each["unmasked"] for each in sent if "unmasked" in each]
    assert len(passes) == 6
    shown = {each["index"]: each for step in passes for each in step}
    assert [(shown[i]["id"], shown[i]["step"]) for i in range(1, len(tokens) + 1)] == [
        (token["id"], token["step"]) for token in tokens
    ]
    assert [{each["step"] for each in step} for step in passes] == [{i} for i in range(6)]
    assert [each["token"] for each in sent if "token" in each] == tokens
    # Finished blocks follow the pass that finished them.
    kinds = ["token" in each for each in sent]
    assert kinds == ([False] * 2 + [True] * 4) * 3

    for route, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ):
        chunks = events(http, route, **body, max_tokens=12, stream_unmasking=True, **HOW)
        choices = [each["choices"][0] for each in chunks]
        assert [len(each["unmasked"]) for each in choices] == [2] * 6
        texts = [
            each["text"] if "text" in each else each["delta"].get("content") for each in choices
        ]
        assert [bool(text) for text in texts] == [False, True] * 3


def test_seeds_reproduce_in_any_company(http: httpx.Client) -> None:
    def write(seed: int) -> str:
        reply = post(
            http, "/v1/completions", prompt=PROMPT, max_tokens=12, **{**DRAWN, "seed": seed}
        )
        return str(reply["choices"][0]["text"])

    alone = [write(seed) for seed in range(6)]
    assert len(set(alone)) == 6
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(write, range(6))) == alone


@pytest.mark.parametrize(
    ("route", "body", "param", "sentence"),
    [
        ("", {"prompt": ["a", "b [MASK]"]}, "prompt[1]", "prompt[1]: has a mask of its own"),
        ("", {"prompt": []}, "prompt", "prompt: "),
        ("", {"top_p": 0.5}, "top_p", "top_p: is for the causal mask; model 'dial' writes by"),
        ("", {"n": 128, "prompt": ["a"] * 16}, None, "asks for 2048 texts; the queue holds"),
        ("", {"guided_regex": "a"}, "guided_regex", "guided_regex: is for the causal mask"),
        ("", {"min_tokens": 2}, "min_tokens", "min_tokens: is for the causal mask"),
        ("", {"max_tokens": 4, "steps": 5}, "steps", "steps: must be between 1, the number of"),
        ("", {"steps": 0}, "steps", "steps: must be at least 1"),
        ("", {"block_length": 17}, "block_length", "block_length: must be at most 16, the tokens"),
        ("", {"prompt": "a [MASK]"}, "prompt", "prompt: has a mask of its own"),
        ("", {"prompt": [5, 10**6]}, "prompt", "model 'dial' has token ids from 0 to"),
        ("", {"max_tokens": 60}, "prompt", "has 10 tokens, and 60 are to be written"),
        ("", {"stream_unmasking": True}, "stream_unmasking", "stream_unmasking: only a stream"),
        ("", {"mask": "causal", "model": "dial", "steps": 2}, "steps", "steps: is for the full"),
        ("chat/", {"max_tokens": 60}, "messages", "has 9 tokens, and 60 are to be written"),
        ("chat/", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools: "),
        ("chat/", {"guided_regex": "a"}, "guided_regex", "guided_regex: is for the causal mask"),
    ],
)
def test_what_cannot_be_unmasked_is_refused(
    http: httpx.Client, route: str, body: dict[str, Any], param: str, sentence: str
) -> None:
    given: dict[str, Any] = {"messages": CHAT} if route else {"prompt": PROMPT}
    error = post(http, f"/v1/{route}completions", 400, **{**given, **body})["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]


def test_fields_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    idle = {"top_p": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False}
    bodies: list[dict[str, Any]] = [{}, idle]
    replies = [
        post(http, "/v1/completions", prompt=PROMPT, max_tokens=4, **body)["choices"]
        for body in bodies
    ]
    assert replies[0] == replies[1]


def test_several_prompts_and_texts_are_those_that_come_alone(http: httpx.Client) -> None:
    prompts = [PROMPT, "One", "The longest of these is this one."]
    alone = [
        post(http, "/v1/completions", prompt=prompt, max_tokens=12, **{**DRAWN, "seed": seed})
        for prompt in prompts
        for seed in (5, 6)
    ]
    body = {"prompt": prompts, "n": 2, "max_tokens": 12, **DRAWN}
    together = post(http, "/v1/completions", **body)
    texts = [each["text"] for each in together["choices"]]
    assert texts == [each["choices"][0]["text"] for each in alone]
    assert len(set(texts)) == 6
    assert together["usage"]["completion_tokens"] == sum(
        each["usage"]["completion_tokens"] for each in alone
    )
    chunks = [each["choices"][0] for each in events(http, "/v1/completions", **body)]
    for index, text in enumerate(texts):
        parts = [each for each in chunks if each["index"] == index]
        assert "".join(each["text"] for each in parts) == text
        assert [bool(each["finish_reason"]) for each in parts][-1]
    best = generate(http, n=1, best_of=2, **DRAWN)
    assert best["generated_text"] in texts[:2]


def test_few_texts_of_a_request_are_written_at_once(http: httpx.Client) -> None:
    """The passes of all would hold the event loop."""
    body = {"prompt": [PROMPT, "One"], "n": 10, "max_tokens": 12, "block_length": 4}
    open_, most, ended = set(), 0, 0
    for chunk in events(http, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        open_.add(choice["index"])
        most = max(most, len(open_))
        if choice["finish_reason"]:
            open_.remove(choice["index"])
            ended += 1
    assert (most, ended) == (8, 20)


def test_an_echo_alone_has_the_prompt(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT], "echo": True}
    alone = post(http, "/v1/completions", max_tokens=0, **body)
    assert [each["text"] for each in alone["choices"]] == [PROMPT]
    both = post(http, "/v1/completions", max_tokens=8, **body)
    text = generate(http, max_new_tokens=8)["generated_text"]
    assert [each["text"] for each in both["choices"]] == [PROMPT + text]


def test_log_probabilities_are_those_of_the_passes(http: httpx.Client) -> None:
    tokens = generate(http, **HOW)["details"]["tokens"]
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, **HOW}
    (choice,) = post(http, "/v1/completions", **body)["choices"]
    expected = [token["logprob"] for token in tokens]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected)
    chunks = events(http, "/v1/completions", **body)
    streamed = [each["choices"][0]["logprobs"] for each in chunks]
    assert [len(each["tokens"]) for each in streamed] == [4] * 3
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [value for each in streamed for value in each[key]] == choice["logprobs"][key]


@pytest.mark.parametrize("way", [name for name in WAYS if name != "kserve tensors"])
def test_every_dialect_unmasks(http: httpx.Client, way: str) -> None:
    prompt = "u:Who?;a:" if WAYS[way].chats else PROMPT
    expected = generate(http, prompt, max_new_tokens=8)["generated_text"]
    asked = "Who?" if WAYS[way].chats else PROMPT
    assert WAYS[way].ask(http, "dial:full", asked, 8) == expected
    assert WAYS[way].stream(http, "dial:full", asked, 8) == expected
