"""`/v1/completions`: the SDK, unmodified, and the answers of `/generate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.http.chat_bundles import make_chat_bundle

PROMPT = "Once upon a time there was a little"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


def native(http: httpx.Client, prompt: str | list[str] = PROMPT, **parameters: Any) -> Any:
    body = {"model": "hybrid", "inputs": prompt, "parameters": {"details": True} | parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/v1/completions", json={"model": "hybrid", "prompt": PROMPT} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(http: httpx.Client, text: str) -> list[int]:
    reply = http.post("/tokenize", json={"model": "hybrid", "inputs": text})
    (tokens,) = reply.json()
    return [token["id"] for token in tokens]


def test_a_completion_is_what_generate_writes(
    openai_client: openai.OpenAI, openai_http: httpx.Client
) -> None:
    expected = native(openai_http, max_new_tokens=12, **SAMPLING)
    reply = openai_client.completions.create(
        model="hybrid", prompt=PROMPT, max_tokens=12, **SAMPLING
    )
    (choice,) = reply.choices
    assert choice.text == expected["generated_text"]
    assert choice.finish_reason == "length"
    assert choice.index == 0
    assert choice.logprobs is None
    assert reply.object == "text_completion"
    assert reply.model == "hybrid"
    assert reply.id.startswith("cmpl-")
    assert reply.created > 1_700_000_000
    assert reply.usage is not None
    num_prompt = len(ids_of(openai_http, PROMPT))
    assert reply.usage.prompt_tokens == num_prompt
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == num_prompt + 12
    assert reply.usage.prompt_tokens_details is not None


def test_the_defaults_are_openais(openai_http: httpx.Client) -> None:
    first, second = (complete(openai_http) for _ in range(2))
    assert first["usage"]["completion_tokens"] <= 16
    assert first["choices"][0]["text"] != second["choices"][0]["text"], "it samples"
    greedy = native(openai_http, max_new_tokens=16)
    assert complete(openai_http, temperature=0)["choices"][0]["text"] == greedy["generated_text"]


def test_a_stream_says_the_same(openai_client: openai.OpenAI, openai_http: httpx.Client) -> None:
    expected = complete(openai_http, max_tokens=12, logprobs=2, **SAMPLING)
    with openai_client.completions.create(
        model="hybrid",
        prompt=PROMPT,
        max_tokens=12,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        **SAMPLING,
    ) as stream:
        *chunks, last = list(stream)
    assert len(chunks) == 12
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == expected["choices"][0]["text"]
    assert [choice.finish_reason for choice in choices] == [None] * 11 + ["length"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [getattr(choice.logprobs, name)[0] for choice in choices]
        assert streamed == expected["choices"][0]["logprobs"][name]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}


def events_of(http: httpx.Client, **body: Any) -> list[Any]:
    body = {"model": "hybrid", "prompt": PROMPT, "stream": True} | body
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_usage_in_a_stream_is_sent_when_asked_for(openai_http: httpx.Client) -> None:
    assert all("usage" not in event for event in events_of(openai_http, max_tokens=3))
    *events, last = events_of(
        openai_http, max_tokens=3, stream_options={"include_usage": True}, temperature=0
    )
    assert [event["usage"] for event in events] == [None, None, None]
    assert last["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = events_of(openai_http, max_tokens=3, stream_options=options, temperature=0)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens"] == events[0]["usage"]["prompt_tokens"] > 0


def test_token_ids_are_used_unchanged(openai_http: httpx.Client) -> None:
    ids = ids_of(openai_http, PROMPT)
    body = {"max_tokens": 8, "temperature": 0}
    expected = complete(openai_http, **body)["choices"][0]["text"]
    assert complete(openai_http, prompt=ids, **body)["choices"][0]["text"] == expected
    # Without the token that begins a text.
    bare = complete(openai_http, prompt=ids[1:], **body)
    assert bare["usage"]["prompt_tokens"] == len(ids) - 1
    several = complete(openai_http, prompt=[ids, ids[1:]], **body)
    assert [each["text"] for each in several["choices"]] == [
        expected,
        bare["choices"][0]["text"],
    ]


def test_several_prompts_and_texts_keep_their_order(openai_http: httpx.Client) -> None:
    prompts = [PROMPT, "The king and the"]
    body = {"max_tokens": 6, "n": 2, **SAMPLING}
    reply = complete(openai_http, prompt=prompts, **body)
    assert [each["index"] for each in reply["choices"]] == [0, 1, 2, 3]
    texts = [each["text"] for each in reply["choices"]]
    expected = native(openai_http, prompts, max_new_tokens=6, n=2, **SAMPLING)
    assert texts == [each["generated_text"] for group in expected for each in group]
    num_generated = [each["details"]["generated_tokens"] for group in expected for each in group]
    assert reply["usage"]["completion_tokens"] == sum(num_generated)
    streamed = [""] * 4
    for event in events_of(openai_http, prompt=prompts, **body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_best_of_returns_the_likeliest(openai_http: httpx.Client) -> None:
    body = {"max_tokens": 6, **SAMPLING}
    reply = complete(openai_http, best_of=4, n=2, logprobs=0, **body)
    everything = complete(openai_http, n=4, logprobs=0, **body)

    def mean(choice: Any) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    expected = sorted(everything["choices"], key=mean, reverse=True)[:2]
    assert [each["text"] for each in reply["choices"]] == [each["text"] for each in expected]
    assert reply["usage"] == everything["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_are_cut_off(openai_http: httpx.Client, stream: bool) -> None:
    whole = complete(openai_http, max_tokens=40, temperature=0)["choices"][0]["text"]
    stop = whole[10:16]
    body = {"max_tokens": 40, "temperature": 0, "stop": stop}
    expected = whole[: whole.index(stop)]
    if stream:
        choices = [event["choices"][0] for event in events_of(openai_http, **body)]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"
    else:
        (choice,) = complete(openai_http, **body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        kept = complete(openai_http, include_stop_str_in_output=True, **body)["choices"][0]
        assert kept["text"] == expected + stop
        assert complete(openai_http, **body | {"stop": ["zzzz", stop]})["choices"][0] == choice


def test_echo_and_log_probabilities(openai_http: httpx.Client) -> None:
    body = {"max_tokens": 5, "temperature": 0, "logprobs": 0}
    (plain,) = complete(openai_http, **body)["choices"]
    (echoed,) = complete(openai_http, echo=True, **body)["choices"]
    assert echoed["text"] == PROMPT + plain["text"]
    ids = ids_of(openai_http, PROMPT)
    logprobs = echoed["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    prefill = native(openai_http, max_new_tokens=1, decoder_input_details=True)["details"][
        "prefill"
    ]
    assert logprobs["token_logprobs"][: len(ids)] == [each["logprob"] for each in prefill]
    assert logprobs["token_logprobs"][len(ids) :] == plain["logprobs"]["token_logprobs"]
    assert logprobs["tokens"][0] == "<|endoftext|>", "it is no part of the text"
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert echoed["text"][offset:].startswith(token)
    assert logprobs["text_offset"][:2] == [0, 0]
    assert plain["logprobs"]["text_offset"][0] == 0
    first = events_of(openai_http, echo=True, max_tokens=3, temperature=0)[0]
    assert first["choices"][0]["text"].startswith(PROMPT)
    (from_ids,) = complete(openai_http, prompt=ids[1:], echo=True, max_tokens=1)["choices"]
    assert from_ids["text"].startswith(PROMPT)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_an_echo_alone(openai_http: httpx.Client, logprobs: int | None) -> None:
    """As older clients of lm-eval ask for log-probabilities."""
    prompts = [PROMPT, "The king slept."]
    body = {"prompt": prompts, "echo": True, "logprobs": logprobs, "temperature": 0}
    reply = complete(openai_http, max_tokens=0, **body)
    longer = complete(openai_http, max_tokens=2, **body)
    assert [choice["text"] for choice in reply["choices"]] == prompts
    for choice, other in zip(reply["choices"], longer["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            assert values == other["logprobs"][name][:-2]
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["prompt_tokens"] == longer["usage"]["prompt_tokens"]
    options = {"stream_options": {"include_usage": True}}
    if logprobs is None:
        *events, last = events_of(openai_http, max_tokens=0, **body, **options)
        told = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events}
        assert [told[0], told[1]] == prompts
        assert len(events) == 2
        assert last["usage"]["completion_tokens"] == 0


def test_seeds_below_zero(openai_http: httpx.Client) -> None:
    """-1 is a new one each time, as for vLLM and llama.cpp; others are seeds."""

    def texts(seed: int) -> set[str]:
        body = {"max_tokens": 12, "temperature": 1.5, "seed": seed}
        return {complete(openai_http, **body)["choices"][0]["text"] for _ in range(3)}

    assert len(texts(-1)) > 1
    assert len(texts(-2)) == len(texts(-(2**63))) == 1
    assert texts(-2) != texts(-3)


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("The king 👍 slept.", [0, 0, 3, 8, 9, 9, 9, 9, 10, 16]),
        ("Old Zu\u0308rich slept.", [0, 0, 3, 5, 6, 6, 7, 11, 17]),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_an_echoed_prompt(
    openai_http: httpx.Client, prompt: str, offsets: list[int], as_ids: bool
) -> None:
    """Tokens begin at a character of the text, however many bytes it has."""
    given = ids_of(openai_http, prompt)[1:] if as_ids else prompt
    body = {"prompt": given, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    (echoed,) = complete(openai_http, echo=True, **body)["choices"]
    assert echoed["text"].startswith(prompt)
    (plain,) = complete(openai_http, **body)["choices"]
    own = plain["logprobs"]["text_offset"]
    expected = [*offsets[as_ids:], *(len(prompt) + offset for offset in own)]
    assert echoed["logprobs"]["text_offset"] == expected
    for token, offset in zip(echoed["logprobs"]["tokens"], expected, strict=True):
        whole = "\ufffd" not in token and token != "<|endoftext|>"
        assert not whole or echoed["text"][offset:].startswith(token)


def test_offsets_are_in_the_text_before_normalization(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """Qwen's tokenizers compose characters; the echo is the text that was sent."""
    folder = make_chat_bundle(tmp_path / "composing", "", normalizer={"type": "NFC"})
    running = start_server(models={"hybrid": folder})
    body = {"echo": True, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            (choice,) = complete(http, prompt="Cafe\u0301 slept.", **body)["choices"]
    finally:
        running.stop()
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith("Cafe\u0301 slept.")
    assert "".join(tokens[1:-1]).startswith("Caf\u00e9 slept.")
    found = dict(zip(tokens, offsets, strict=True))
    assert (found["\u00e9"], found[" slept"], found["."]) == (3, 5, 11)
    assert offsets[-1] == 12


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_behind_unfinished_characters(openai_http: httpx.Client, echo: bool) -> None:
    """A byte that begins a character, and no other follows: each is one U+FFFD of the text."""
    prompt = "The king slept."
    lead = ids_of(openai_http, "ñ")[1]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "logprobs": 0, "echo": echo}
    body |= {"logit_bias": {str(lead): 100}, "temperature": 0}
    (choice,) = complete(openai_http, **body)["choices"]
    start = len(prompt) if echo else 0
    assert choice["text"][start:] == "\ufffd" * 4
    assert choice["logprobs"]["text_offset"][-4:] == [start, start + 1, start + 2, start + 3]
    if not echo:
        events = events_of(openai_http, **body)
        offsets = [each["choices"][0]["logprobs"]["text_offset"] for each in events]
        assert offsets == [[0], [1], [2], [3]]


def test_offsets_of_tokens_that_wait_for_a_stop_text(openai_http: httpx.Client) -> None:
    """The beginning of a stop text is held back until it is known to be none."""
    body: dict[str, Any] = {"max_tokens": 8, "logprobs": 0, "temperature": 0}
    (plain,) = complete(openai_http, **body)["choices"]
    tokens = plain["logprobs"]["tokens"]
    stops = [each + "zzz" for each in tokens[1:5]]
    (choice,) = complete(openai_http, stop=stops, **body)["choices"]
    assert choice == plain


@pytest.mark.parametrize("bias", [{}, {"0": 100.0}], ids=["a word follows", "the text ends"])
def test_what_lm_eval_reads(openai_http: httpx.Client, bias: dict[str, float]) -> None:
    """`local-completions` asks so, and reads `[ctxlen:-1]` of the lists."""
    text = PROMPT + " girl who lived in a house by the sea."
    ids = ids_of(openai_http, text)
    context = len(ids_of(openai_http, PROMPT))
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    reply = complete(openai_http, prompt=[ids, ids], logit_bias=bias, **body)
    score = openai_http.post("/score", json={"model": "hybrid", "inputs": text}).json()
    scored = [token["logprob"] for token in score[0]["tokens"]]
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]
        assert all(len(values) == len(ids) + 1 for values in logprobs.values())
        read = slice(context, -1)
        assert logprobs["token_logprobs"][read] == scored[context - 1 :]
        for token, value, top in zip(
            logprobs["tokens"][read],
            logprobs["token_logprobs"][read],
            logprobs["top_logprobs"][read],
            strict=True,
        ):
            assert top[token] == value
            assert len(top) == (1 if value == max(top.values()) else 2)
        greedy = [
            value == max(top.values())
            for value, top in zip(
                logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
            )
        ]
        assert any(greedy[:-1])
        assert not all(greedy[:-1])
    assert reply["choices"][0]["finish_reason"] == ("stop" if bias else "length")


def test_top_log_probabilities_of_greedy_tokens(openai_http: httpx.Client) -> None:
    body = {"max_tokens": 6, "temperature": 0, "logprobs": 5}
    logprobs = complete(openai_http, **body)["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 5
        assert top[token] == value == max(top.values())
    drawn = complete(openai_http, max_tokens=6, logprobs=1, temperature=2.0, seed=1)
    for top in drawn["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) in (1, 2), "the most likely token, and the one that was drawn"


CONSTRAINTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"guided_regex": " (yes|no)"}, {" yes", " no"}),
    ({"guided_choice": ['a "b"', "c\n", "é|"]}, {'a "b"', "c\n", "é|"}),
    ({"guided_choice": ["\x7f", "a\x7f", "\x00\u2028\x85"]}, {"\x7f", "a\x7f", "\x00\u2028\x85"}),
    ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
    ({"structured_outputs": {"choice": [" left", " right"]}}, {" left", " right"}),
    ({"structured_outputs": {"regex": "ab|cd"}}, {"ab", "cd"}),
    ({"structured_outputs": {"json": {"const": "k"}}}, {'"k"'}),
    ({"response_format": {"type": "regex", "value": "[01]"}}, {"0", "1"}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
        {"5"},
    ),
]


@pytest.mark.parametrize(("constraint", "texts"), CONSTRAINTS)
def test_constrained_output(
    openai_http: httpx.Client, constraint: dict[str, Any], texts: set[str]
) -> None:
    reply = complete(openai_http, max_tokens=30, **constraint)
    (choice,) = reply["choices"]
    assert choice["text"] in texts
    assert choice["finish_reason"] == "stop"


def test_extensions_are_those_of_generate(openai_http: httpx.Client) -> None:
    same: dict[str, Any] = {
        "top_k": 20,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {"300": 5.0},
        "ignore_eos": True,
        "seed": 3,
        "temperature": 0.9,
    }
    expected = native(openai_http, max_new_tokens=20, min_new_tokens=20, truncate=3, **same)
    reply = complete(
        openai_http,
        max_tokens=20,
        min_tokens=20,
        truncate_prompt_tokens=3,
        priority=-1,
        cache_salt="mine",
        timeout=50,
        **same,
    )
    assert reply["choices"][0]["text"] == expected["generated_text"]
    assert reply["usage"]["prompt_tokens"] == 3


def test_cached_tokens_are_counted(openai_http: httpx.Client) -> None:
    prompt = "The old man went down to the harbour and looked at the ships. " * 20
    body = {"prompt": prompt, "max_tokens": 2, "cache_salt": "counted", "n": 3}
    details = [complete(openai_http, **body)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details[0] == {"cached_tokens": 0}
    assert details[1]["cached_tokens"] > 100
    *_, last = events_of(openai_http, stream_options={"include_usage": True}, **body)
    assert last["usage"]["prompt_tokens_details"] == details[1]


def test_fields_of_habit_change_nothing(openai_http: httpx.Client) -> None:
    body = {"max_tokens": 5, "temperature": 0}
    habits = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "suffix": None,
        "best_of": 1,
        "use_beam_search": False,
        "not_a_field_but_null": None,
    }
    expected = complete(openai_http, **body)["choices"]
    assert complete(openai_http, **body, **habits)["choices"] == expected
