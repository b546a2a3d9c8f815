"""Every parameter of `/generate` over HTTP: what it does and refuses, and what replies hold."""

import itertools
import json
import math
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maskdial.dialects.native import generate as tgi
from maskdial.dialects.native.generate_bodies import GenerateBody, GenerateParameters

PROMPT = "Once upon a time there was a little"
SAMPLED = {"max_new_tokens": 16, "temperature": 1.0, "seed": 11}
VOCABULARY, CONTEXT, EOS, MASK = 12000, 512, 0, 1


def post(http: httpx.Client, body: dict[str, Any], route: str = "/generate") -> Any:
    reply = http.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def generate(http: httpx.Client, prompt: str | list[str], **parameters: object) -> Any:
    return post(http, {"inputs": prompt, "parameters": {"details": True} | parameters})


def token_ids(reply: dict[str, Any]) -> list[int]:
    return [token["id"] for token in reply["details"]["tokens"]]


def stream(http: httpx.Client, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    return response, [json.loads(line.removeprefix("data: ")) for line in lines]


def refusal(http: httpx.Client, body: dict[str, Any], route: str = "/generate") -> str:
    reply = http.post(route, json=body)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error_type"] == "validation"
    return str(reply.json()["error"])


def metric(http: httpx.Client, name: str) -> float:
    start = f'{name}{{model="hybrid"}} '
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))


# Each with values out of its range, and what the sentence says of the range.
OUT_OF_RANGE: list[tuple[str, list[Any], str]] = [
    ("max_new_tokens", [0, -1], "must be at least 1"),
    ("max_new_tokens", [2**31, 2**70], "must be between 1 and"),
    ("min_new_tokens", [-1], "must be at least 0"),
    ("min_new_tokens", [CONTEXT + 1], "must be between 0 and 512"),
    ("temperature", [-0.1, 100.5], "must be between 0 and 100"),
    ("top_k", [-1], "must be at least 0"),
    ("top_p", [-0.1, 1.1], "must be between 0 and 1"),
    ("min_p", [-0.1, 1.1], "must be between 0 and 1"),
    ("typical_p", [0, -1, 1.1], "must be above 0 and at most 1"),
    ("repetition_penalty", [0, -1, 101], "must be between 0.01 and 100"),
    ("frequency_penalty", [-2.1, 2.1], "must be between -2 and 2"),
    ("presence_penalty", [-2.1, 2.1], "must be between -2 and 2"),
    ("logit_bias", [{"5": 101}, {"5": -101}], "must be between -100 and 100"),
    ("logit_bias", [{"": 1}, {"-1": 1}, {"01": 1}, {"1.0": 1}], "a key must be a token id"),
    (
        "logit_bias",
        [{str(i): 0 for i in range(1025)}],
        "must have at most 1024 token ids and texts",
    ),
    ("logit_bias", [{"12000": 1}, {"2147483647": 1}], "token ids from 0 to 11999"),
    ("seed", [-1, 2**63, 2**64], "must be between 0 and 9223372036854775807"),
    ("stop", [["x"] * 65], "must have at most 64 items"),
    ("stop", [["x" * 1025]], "must have at most 1024 characters"),
    ("stop_token_ids", [[-1]], "must be at least 0"),
    ("stop_token_ids", [[12000], [1, 2**31 - 1]], "token ids from 0 to 11999"),
    ("stop_token_ids", [[1] * 257], "must have at most 256 items"),
    ("truncate", [0, -5], "must be at least 1"),
    ("top_n_tokens", [-1, 21], "must be between 0 and 20"),
    ("n", [0, 129], "must be between 1 and 128"),
    ("best_of", [0, 129], "must be between 1 and 128"),
    ("watermark", [True], "False"),
]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [(name, value, words) for name, values, words in OUT_OF_RANGE for value in values],
    ids=lambda value: str(value)[:24],
)
def test_values_out_of_range_are_refused(
    http: httpx.Client, name: str, value: object, words: str
) -> None:
    error = refusal(http, {"inputs": PROMPT, "parameters": {name: value}})
    assert error.startswith(f"parameters.{name}")
    assert words in error
    assert len(error) < 300


WRONG_TYPES = [
    ("max_new_tokens", "8"),
    ("max_new_tokens", 8.5),
    ("temperature", "1"),
    ("temperature", True),
    ("do_sample", "yes"),
    ("do_sample", 1),
    ("top_k", 1.5),
    ("logit_bias", [5, 1]),
    ("logit_bias", {"5": "1"}),
    ("seed", 1.5),
    ("stop", "end"),
    ("stop", [1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 5),
    ("ignore_eos", 0),
    ("details", "true"),
    ("truncate", True),
    ("n", "2"),
    ("grammar", "[a-z]+"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=lambda value: str(value))
def test_values_of_another_type_are_refused(http: httpx.Client, name: str, value: object) -> None:
    error = refusal(http, {"inputs": PROMPT, "parameters": {name: value}})
    assert error.startswith(f"parameters.{name}")


TOGETHER = [
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "must be at most max_new_tokens (8), not 9"),
    ({"n": 3, "best_of": 2, "temperature": 1}, "must be at least n (3), not 2"),
    ({"n": 2}, "without sampling, all texts are the same"),
    ({"best_of": 2, "temperature": 0}, "without sampling, all texts are the same"),
    ({"n": 2, "do_sample": False, "temperature": 1}, "without sampling, all texts are the same"),
]


@pytest.mark.parametrize(("parameters", "words"), TOGETHER)
def test_parameters_that_contradict_each_other(
    http: httpx.Client, parameters: dict[str, Any], words: str
) -> None:
    assert words in refusal(http, {"inputs": PROMPT, "parameters": parameters})


@pytest.mark.parametrize("route", ["/generate_stream", "/generate", "/models/hybrid"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"n": 2, "temperature": 1}}, "a stream has one text"),
        ({"parameters": {"best_of": 2, "temperature": 1}}, "a stream has one text"),
        ({"parameters": {"decoder_input_details": True}}, "not available in a stream"),
        ({"inputs": ["a"]}, "a stream has one prompt"),
    ],
)
def test_what_a_stream_cannot_do(
    http: httpx.Client, route: str, changes: dict[str, Any], words: str
) -> None:
    body = {"inputs": PROMPT} | changes | ({} if route == "/generate_stream" else {"stream": True})
    assert words in refusal(http, body, route)


@pytest.mark.parametrize(
    "parameters",
    [
        {"do_sample": False, "temperature": 9.0},
        {"temperature": 0},
        {"temperature": 3.0, "top_k": 1},
        {"temperature": 3.0, "min_p": 1.0},
        {"temperature": 0.5, "top_p": 0.0},
        {"watermark": False, "top_n_tokens": 0, "stop": [""], "logit_bias": {}, "n": 1},
        {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0},
    ],
)
def test_what_comes_down_to_greedy(http: httpx.Client, parameters: dict[str, Any]) -> None:
    greedy = generate(http, PROMPT, max_new_tokens=12)
    assert token_ids(generate(http, PROMPT, max_new_tokens=12, **parameters)) == token_ids(greedy)


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"top_k": 0}, {"top_k": 2}),
        ({"top_p": 1}, {"top_p": 0.2}),
        ({"min_p": 0}, {"min_p": 0.5}),
        ({"typical_p": 1}, {"typical_p": 0.2}),
        ({"temperature": 1}, {"temperature": 2.5}),
        ({"repetition_penalty": 1}, {"repetition_penalty": 2.0}),
        ({"frequency_penalty": 0}, {"frequency_penalty": 2.0}),
        ({"presence_penalty": 0}, {"presence_penalty": -2.0}),
        ({"seed": 11}, {"seed": 12}),
        ({"logit_bias": {}}, {"logit_bias": {"259": 100}}),
    ],
)
def test_sampling_parameters_change_the_text(
    http: httpx.Client, off: dict[str, Any], on: dict[str, Any]
) -> None:
    plain = generate(http, PROMPT, **SAMPLED)
    assert token_ids(generate(http, PROMPT, **(SAMPLED | off))) == token_ids(plain)
    assert token_ids(generate(http, PROMPT, **(SAMPLED | on))) != token_ids(plain)


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.9}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}],
)
def test_a_sampling_parameter_turns_sampling_on(
    http: httpx.Client, parameters: dict[str, Any]
) -> None:
    assert generate(http, PROMPT, max_new_tokens=1)["details"]["seed"] is None
    drawn = generate(http, PROMPT, max_new_tokens=1, **parameters)["details"]["seed"]
    assert 0 <= drawn < 2**53
    assert generate(http, PROMPT, max_new_tokens=1, do_sample=True)["details"]["seed"] != drawn


def test_penalties_bring_variety(http: httpx.Client) -> None:
    def num_different(**parameters: float) -> int:
        lengths = {"min_new_tokens": 40, "max_new_tokens": 40}
        return len(set(token_ids(generate(http, PROMPT, **lengths, **parameters))))

    plain = num_different()
    assert num_different(frequency_penalty=2) > plain
    assert num_different(presence_penalty=2) > plain
    assert num_different(repetition_penalty=100) == 40
    assert num_different(frequency_penalty=-2) < plain


def test_logit_bias_forces_and_forbids(http: httpx.Client) -> None:
    forced = generate(http, PROMPT, max_new_tokens=4, logit_bias={"11999": 100})
    assert token_ids(forced) == [11999] * 4
    (first, second), *_ = (
        [token["id"] for token in top]
        for top in generate(http, PROMPT, max_new_tokens=1, top_n_tokens=2)["details"]["top_tokens"]
    )
    forbidden = generate(http, PROMPT, max_new_tokens=1, logit_bias={str(first): -100})
    assert token_ids(forbidden) == [second]


def test_texts_can_be_biased_and_banned(http: httpx.Client) -> None:
    plain = generate(http, PROMPT, max_new_tokens=12)
    word = next(t["text"] for t in plain["details"]["tokens"] if t["text"].strip().isalpha())
    for parameters in (
        {"bad_words": [word.strip()]},
        {"logit_bias": [[word, False]]},
        {"logit_bias": {word: -100}},
    ):
        answer = generate(http, PROMPT, max_new_tokens=12, **parameters)
        assert word not in [token["text"] for token in answer["details"]["tokens"]]


def test_dry_ends_a_repetition(http: httpx.Client) -> None:
    prompt = "one two three four. one two three four. one two three"
    biased = {"max_new_tokens": 1, "logit_bias": {" four": 40, " cat": 30}}

    def next_word(**parameters: object) -> str:
        (token,) = generate(http, prompt, **biased, **parameters)["details"]["tokens"]
        return str(token["text"])

    assert next_word() == " four"
    assert next_word(dry_multiplier=50, dry_penalty_last_n=-1) == " cat"
    assert next_word(dry_multiplier=50, dry_sequence_breakers=["ee"]) == " four"


@pytest.mark.parametrize(
    "given",
    [
        {"xtc_probability": 1, "xtc_threshold": 0.001},
        {"mirostat": 2, "mirostat_tau": 0.1, "mirostat_eta": 1},
        {"top_n_sigma": 0.01},
        {"dynatemp_range": 50, "temperature": 60},
    ],
    ids=lambda given: next(iter(given)),
)
def test_samplers_of_llama_cpp(http: httpx.Client, given: dict[str, Any]) -> None:
    """Each has the effect that it is for, and the same text comes again with the same seed."""
    greedy = token_ids(generate(http, PROMPT, max_new_tokens=8, do_sample=False))
    drawn = [token_ids(generate(http, PROMPT, max_new_tokens=8, seed=1, **given)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    keeps_the_likeliest = not {"top_n_sigma", "mirostat"}.isdisjoint(given)
    assert (drawn[0] == greedy) is keeps_the_likeliest
    if "xtc_probability" in given:
        assert drawn[0][0] != greedy[0]


def test_special_tokens_have_no_text(http: httpx.Client) -> None:
    bias = {str(MASK): 100}
    masks = generate(http, PROMPT, max_new_tokens=3, logit_bias=bias)
    assert [(t["id"], t["text"], t["special"]) for t in masks["details"]["tokens"]] == [
        (MASK, "", True)
    ] * 3
    assert masks["generated_text"] == ""
    _, received = stream(
        http, {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "logit_bias": bias}}
    )
    assert received[-1]["generated_text"] == ""


def test_where_a_text_ends(http: httpx.Client) -> None:
    to_eos = {"max_new_tokens": 9, "logit_bias": {str(EOS): 100}}
    first, second, *_ = generate(http, PROMPT, max_new_tokens=9)["details"]["tokens"]
    across = first["text"][-2:] + second["text"][:2]
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"max_new_tokens": 9}, "length", 9),
        (to_eos, "eos_token", 1),
        (to_eos | {"min_new_tokens": 5}, "eos_token", 6),
        (to_eos | {"min_new_tokens": 9}, "length", 9),
        (to_eos | {"ignore_eos": True}, "length", 9),
        (to_eos | {"ignore_eos": True, "stop_token_ids": [EOS]}, "stop_sequence", 1),
        ({"max_new_tokens": 9, "stop": [first["text"]]}, "stop_sequence", 1),
        ({"max_new_tokens": 9, "stop": [across, "never"]}, "stop_sequence", 2),
        ({"max_new_tokens": 9, "stop_token_ids": [first["id"]]}, "stop_sequence", 1),
    ]
    for parameters, reason, count in cases:
        details = generate(http, PROMPT, **parameters)["details"]
        assert (details["finish_reason"], details["generated_tokens"]) == (reason, count)
    default = generate(http, PROMPT, ignore_eos=True)["details"]
    assert default["generated_tokens"] == 100
    least = generate(http, PROMPT, min_new_tokens=120)["details"]
    assert least["generated_tokens"] == 120


def test_truncate_keeps_the_last_tokens(http: httpx.Client) -> None:
    whole = generate(http, PROMPT, max_new_tokens=4, decoder_input_details=True)
    ids = [token["id"] for token in whole["details"]["prefill"]]
    parameters = {"truncate": 3, "details": True, "max_new_tokens": 4}
    body = {"inputs": PROMPT, "parameters": parameters | {"decoder_input_details": True}}
    reply = http.post("/generate", json=body)
    cut = reply.json()
    kept = [ids[0], *ids[-2:]]  # what the tokenizer puts before every text stays
    assert [token["id"] for token in cut["details"]["prefill"]] == kept
    assert cut["details"]["input_length"] == 3
    assert reply.headers["x-truncated-tokens"] == str(len(ids) - 3)
    rest = "".join(token["text"] for token in whole["details"]["prefill"][-2:])
    other = generate(http, "She did not know that it" + rest, truncate=3, max_new_tokens=4)
    assert other["generated_text"] == cut["generated_text"]

    response, received = stream(http, {"inputs": PROMPT, "parameters": parameters})
    assert response.headers["x-truncated-tokens"] == str(len(ids) - 3)
    assert received[-1]["generated_text"] == cut["generated_text"]
    assert received[-1]["details"]["input_length"] == 3

    for enough in (len(ids), 2**31 - 1):
        reply = http.post("/generate", json={"inputs": PROMPT, "parameters": {"truncate": enough}})
        assert reply.status_code == 200
        assert "x-truncated-tokens" not in reply.headers
    both = http.post("/generate", json={"inputs": [PROMPT, PROMPT], "parameters": {"truncate": 3}})
    assert both.headers["x-truncated-tokens"] == str(2 * (len(ids) - 3))
    parameters = {"truncate": 1, "decoder_input_details": True, "details": True}
    (last,) = generate(http, PROMPT, **parameters)["details"]["prefill"]
    assert last["id"] == ids[-1]


def test_prompts_at_the_contexts_end(http: httpx.Client) -> None:
    for route in ("/generate", "/generate_stream"):
        error = refusal(http, {"inputs": " the" * (CONTEXT - 1)}, route)
        assert f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum" in error
        body = {"inputs": " the" * 700, "parameters": {"truncate": CONTEXT}}
        assert f"{CONTEXT} tokens" in refusal(http, body, route)
    error = refusal(http, {"inputs": ["a", " the" * 599]})
    assert error.startswith("inputs[1]: ")
    assert "600 tokens" in error
    full = generate(http, " the" * 700, truncate=CONTEXT - 1, max_new_tokens=9, ignore_eos=True)
    assert full["details"]["finish_reason"] == "length"
    assert full["details"]["generated_tokens"] == 1


@pytest.mark.parametrize("asked", [CONTEXT + 1, 2**31 - 1])
def test_more_tokens_than_the_context_has_are_clipped(http: httpx.Client, asked: int) -> None:
    parameters = {"max_new_tokens": asked, "details": True, "ignore_eos": True}
    reply = http.post("/generate", json={"inputs": " the" * 500, "parameters": parameters})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-clipped-fields"]
    details = reply.json()["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == CONTEXT - 501


def test_prompt_logprobs_are_those_of_generation(http: httpx.Client) -> None:
    """Each is that of the token when the tokens before it are the prompt."""
    reply = generate(http, PROMPT, max_new_tokens=6, decoder_input_details=True)
    prefill = reply["details"]["prefill"]
    assert prefill[0] == {"id": EOS, "text": "<|endoftext|>", "logprob": None}
    assert "".join(token["text"] for token in prefill[1:]) == PROMPT
    for position in range(1, len(prefill)):
        # The tokenizer writes its own first token before this one, and it is cut off again.
        before = "".join(token["text"] for token in prefill[:position])
        bias = {"logit_bias": {str(prefill[position]["id"]): 100}, "truncate": position}
        forced = generate(http, before, max_new_tokens=1, **bias)["details"]["tokens"][0]
        assert forced["id"] == prefill[position]["id"]
        assert forced["logprob"] == pytest.approx(prefill[position]["logprob"], abs=1e-4)

    longer = generate(
        http, PROMPT + reply["generated_text"], max_new_tokens=1, decoder_input_details=True
    )
    continued = longer["details"]["prefill"]
    assert [t["id"] for t in continued] == [t["id"] for t in prefill] + token_ids(reply)
    expected = [t["logprob"] for t in prefill[1:] + reply["details"]["tokens"]]
    assert [t["logprob"] for t in continued[1:]] == pytest.approx(expected, abs=1e-4)


def test_prompt_details_need_no_other_details(http: httpx.Client) -> None:
    reply = post(http, {"inputs": PROMPT, "parameters": {"decoder_input_details": True}})
    assert len(reply["details"]["prefill"]) == reply["details"]["input_length"]
    one = generate(http, "the", truncate=1, decoder_input_details=True, max_new_tokens=1)
    assert [token["logprob"] for token in one["details"]["prefill"]] == [None]
    long = " the king and the queen" * 60  # several chunks
    prefill = generate(http, long, decoder_input_details=True)["details"]["prefill"]
    assert len(prefill) == 1 + 300
    assert all(token["logprob"] < 0 for token in prefill[1:])


def test_top_tokens(http: httpx.Client) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        parameters = {"max_new_tokens": 10, "top_n_tokens": 5} | sampling
        details = generate(http, PROMPT, **parameters)["details"]
        assert len(details["top_tokens"]) == len(details["tokens"]) == 10
        for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
            assert len({each["id"] for each in top}) == 5
            logprobs = [each["logprob"] for each in top]
            assert logprobs == sorted(logprobs, reverse=True)
            assert sum(map(math.exp, logprobs)) < 1
            assert token["logprob"] <= logprobs[0]
            if not sampling:
                assert top[0] == token
            assert all(
                each["logprob"] == token["logprob"] for each in top if each["id"] == token["id"]
            )
        _, received = stream(http, {"inputs": PROMPT, "parameters": parameters})
        assert [event["top_tokens"] for event in received] == details["top_tokens"]
        assert [event["token"] for event in received] == details["tokens"]
        plain = generate(http, PROMPT, **(parameters | {"top_n_tokens": 0}))["details"]
        assert "top_tokens" not in plain
        assert plain["tokens"] == details["tokens"]


def test_each_of_n_is_what_its_seed_gives_alone(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 12, "temperature": 1.0, "top_n_tokens": 2}
    parameters |= {"decoder_input_details": True}
    texts = generate(http, PROMPT, n=11, **parameters)  # more than there are slots
    assert len(texts) == 11
    seeds = [text["details"]["seed"] for text in texts]
    assert seeds == list(range(seeds[0], seeds[0] + 11))
    assert len({text["generated_text"] for text in texts}) > 5
    for text in texts[::5]:
        alone = generate(http, PROMPT, seed=text["details"]["seed"], **parameters)
        assert alone == text
    last = 2**63 - 1
    wrapped = generate(http, PROMPT, n=2, seed=last, **parameters)
    assert [text["details"]["seed"] for text in wrapped] == [last, 0]


def test_the_best_of_several(http: httpx.Client) -> None:
    def score(reply: dict[str, Any]) -> float:
        tokens = reply.get("details", reply)["tokens"]
        return float(sum(token["logprob"] for token in tokens) / len(tokens))

    every = generate(http, PROMPT, n=5, **SAMPLED)
    ranked = sorted(every, key=score, reverse=True)
    best = generate(http, PROMPT, best_of=5, **SAMPLED)
    others = best["details"].pop("best_of_sequences")
    assert best == ranked[0]
    assert others == [
        {"generated_text": other["generated_text"]} | other["details"] for other in ranked[1:]
    ]
    assert generate(http, PROMPT, n=2, best_of=5, **SAMPLED) == ranked[:2]
    assert generate(http, PROMPT, n=5, best_of=5, **SAMPLED) == every
    plain = generate(http, PROMPT, best_of=5, details=False, **SAMPLED)
    assert plain == {"generated_text": best["generated_text"]}


def test_beam_search_finds_likelier_texts(http: httpx.Client) -> None:
    """By the mean over their tokens, at a length penalty of 1; and none of them twice."""

    def mean_logprob(reply: dict[str, Any]) -> float:
        tokens = reply["details"]["tokens"]
        return float(sum(token["logprob"] for token in tokens)) / len(tokens)

    greedy = generate(http, PROMPT, max_new_tokens=12)
    found = generate(http, PROMPT, max_new_tokens=12, num_beams=4, n=4)
    assert len({each["generated_text"] for each in found}) == 4
    means = [mean_logprob(each) for each in found]
    assert means == sorted(means, reverse=True)
    assert means[0] >= mean_logprob(greedy)
    assert generate(http, PROMPT, max_new_tokens=12, num_beams=4) == found[0]


def test_no_ngram_occurs_twice(http: httpx.Client) -> None:
    ids = token_ids(generate(http, PROMPT, max_new_tokens=60, no_repeat_ngram_size=2))
    pairs = list(itertools.pairwise(ids))
    assert len(set(pairs)) == len(pairs)


def test_shapes_of_replies(http: httpx.Client) -> None:
    def shape(inputs: str | list[str], route: str, **parameters: object) -> object:
        base = {"max_new_tokens": 1, "temperature": 1}
        body = {"inputs": inputs, "parameters": base | parameters}
        return _shape(post(http, body, route))

    for route in ("/generate", "/models/hybrid"):
        assert shape(["a", "b", "c"], route) == [{}, {}, {}]
        assert shape(["a"], route) == [{}]
        assert shape("a", route, n=2) == [{}, {}]
        assert shape(["a", "b"], route, n=3) == [[{}, {}, {}], [{}, {}, {}]]
        assert shape(["a", "b"], route, best_of=3) == [{}, {}]
    assert shape("a", "/generate") == {}
    assert shape("a", "/models/hybrid") == [{}]
    assert shape("a", "/models/hybrid", best_of=2) == [{}]


def _shape(reply: Any) -> object:
    if isinstance(reply, list):
        return [_shape(item) for item in reply]
    assert set(reply) == {"generated_text"}
    return {}


def test_batches_with_copies_keep_their_order(http: httpx.Client) -> None:
    prompts = ["A cat", PROMPT, "She said"]
    alone = [generate(http, prompt, n=3, **SAMPLED) for prompt in prompts]
    assert generate(http, prompts, n=3, **SAMPLED) == alone
    first = [generate(http, prompt, **SAMPLED) for prompt in prompts]
    assert [texts[0] for texts in alone] == first


def test_return_full_text(http: httpx.Client) -> None:
    plain = generate(http, PROMPT, **SAMPLED)["generated_text"]
    full = {"return_full_text": True}
    texts = generate(http, [PROMPT], n=2, **SAMPLED, **full)[0]
    assert texts[0]["generated_text"] == PROMPT + plain
    assert texts[1]["generated_text"].startswith(PROMPT)
    best = generate(http, PROMPT, best_of=2, **SAMPLED, **full)
    sequence = best["details"]["best_of_sequences"][0]
    assert sequence["generated_text"].startswith(PROMPT)
    cut = generate(http, PROMPT, truncate=2, **SAMPLED, **full)["generated_text"]
    assert cut.startswith(PROMPT)
    _, received = stream(http, {"inputs": PROMPT, "parameters": SAMPLED | full})
    assert received[-1]["generated_text"] == PROMPT + plain
    assert "".join(event["token"]["text"] for event in received) == plain


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": 40, "temperature": 1.5, "seed": 5},
        {"max_new_tokens": 40, "stop": ["so happy", "so glad that", "zzz"]},
        {"max_new_tokens": 40, "temperature": 100.0, "seed": 6, "ignore_eos": True},
        {"max_new_tokens": 8, "logit_bias": {"0": 100}, "ignore_eos": True},
        {"max_new_tokens": 40, "temperature": 3.0, "seed": 8, "stop": ["a", "e"]},
    ],
)
def test_streams_say_the_same_as_replies(http: httpx.Client, parameters: dict[str, Any]) -> None:
    reply = generate(http, PROMPT, **parameters)
    _, received = stream(http, {"inputs": PROMPT, "parameters": parameters})
    assert [event["token"] for event in received] == reply["details"]["tokens"]
    assert "".join(event["token"]["text"] for event in received) == reply["generated_text"]
    assert received[-1]["generated_text"] == reply["generated_text"]
    for name in ("finish_reason", "generated_tokens", "seed", "input_length"):
        assert received[-1]["details"][name] == reply["details"][name]


def test_repeated_prompts_come_from_the_cache(http: httpx.Client) -> None:
    """In whole blocks, under the same salt only, and with the same text to the last bit."""
    block = 64  # twice the starter model's head size
    prompt = f"{uuid.uuid4()} " + "the king and the queen went to the sea. " * 20
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True}}

    def ask(**changes: object) -> tuple[Any, float, float]:
        names = ("maskdial_prefix_cache_queries_total", "maskdial_prefix_cache_hits_total")
        before = [metric(http, name) for name in names]
        reply = post(http, body | changes)
        queries, hits = (metric(http, name) - b for name, b in zip(names, before, strict=True))
        return reply, queries, hits

    first, queries, hits = ask()
    length = first["details"]["input_length"]
    reusable = (length - 2) // block * block
    assert reusable >= 2 * block
    assert (queries, hits) == (length, 0)
    assert ask() == (first, length, reusable)
    assert ask(cache_salt="a") == (first, length, 0)
    assert ask(cache_salt="a") == (first, length, reusable)
    assert ask(cache_salt="b") == (first, length, 0)
    assert ask() == (first, length, reusable)

    parameters = SAMPLED | {"n": 4}
    copies, queries, hits = ask(parameters=parameters)
    assert (queries, hits) == (length, reusable)  # read once for all
    assert ask(parameters=parameters, cache_salt="c") == (copies, length, 0)
    # The beginning that two prompts share, and no more.
    _, queries, hits = ask(inputs=prompt[: len(prompt) // 2] + "but" + prompt)
    assert 0 < hits < reusable


def test_one_salt_is_a_text_of_bounded_length(http: httpx.Client) -> None:
    for salt, words in (("", "between 1 and 256"), ("x" * 257, "not 257"), (7, "string")):
        error = refusal(http, {"inputs": PROMPT, "cache_salt": salt})
        assert error.startswith("cache_salt: ")
        assert words in error


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("priority", 101, "between -100 and 100"),
        ("priority", -101, "between -100 and 100"),
        ("priority", 1.5, "integer"),
        ("timeout", 0, "between 0.001 and 86400"),
        ("timeout", -1, "between 0.001 and 86400"),
        ("timeout", 86401, "between 0.001 and 86400"),
        ("timeout", "1", "number"),
        ("stream", "yes", "boolean"),
    ],
)
def test_fields_beside_the_parameters(
    http: httpx.Client, field: str, value: object, words: str
) -> None:
    error = refusal(http, {"inputs": PROMPT, field: value})
    assert error.startswith(f"{field}: ")
    assert words in error


def test_a_large_reply_is_written_beside_the_others(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its thousands of tokens become JSON, the server answers."""
    began, go_on, reply_of = threading.Event(), threading.Event(), tgi._reply

    def wait_and_reply(*arguments: Any) -> object:
        began.set()
        assert go_on.wait(30)
        return reply_of(*arguments)

    parameters = {"max_new_tokens": 120, "ignore_eos": True, "top_n_tokens": 20}
    expected = generate(http, PROMPT, **parameters)
    monkeypatch.setattr(tgi, "_reply", wait_and_reply)
    with ThreadPoolExecutor() as pool:
        large = pool.submit(generate, http, PROMPT, **parameters)
        assert began.wait(30)
        try:
            assert http.get("/health/live", timeout=10).status_code == 200
        finally:
            go_on.set()
        assert large.result() == expected


def test_timing_headers(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "inputs": "She said",
        "parameters": {"max_new_tokens": 3, "ignore_eos": True},
    }
    headers = http.post("/generate", json=body).headers
    assert headers["x-compute-tokens"] == "6"
    for name in ("x-queue-time", "x-inference-time", "x-total-time"):
        assert float(headers[name]) >= 0
    body["parameters"] |= {"n": 2, "temperature": 1}
    assert http.post("/generate", json=body).headers["x-compute-tokens"] == "9"  # prompt read once


def test_nulls_are_not_given(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": 5, "details": True},
    }
    nulls = dict.fromkeys(set(GenerateParameters.model_fields) - set(body["parameters"]))
    fields = dict.fromkeys(set(GenerateBody.model_fields) - set(body))
    assert len(nulls) > 20
    assert post(http, fields | body | {"parameters": nulls | body["parameters"]}) == post(
        http, body
    )


def _one_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is meant, now and then anything."""
    return st.sampled_from([values] * 30 + [_ANYTHING]).flatmap(lambda chosen: chosen)


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
_IDS = st.integers(0, VOCABULARY - 1)
_PARAMETERS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 6)},
    optional={
        "min_new_tokens": _one_of(st.integers(0, 1)),
        "do_sample": _one_of(st.booleans()),
        "temperature": _one_of(st.floats(0, 100)),
        "top_k": _one_of(st.integers(0, 7000)),
        "top_p": _one_of(st.floats(0, 1)),
        "min_p": _one_of(st.floats(0, 1)),
        "typical_p": _one_of(st.floats(1e-12, 1)),
        "repetition_penalty": _one_of(st.floats(0.01, 100)),
        "frequency_penalty": _one_of(st.floats(-2, 2)),
        "presence_penalty": _one_of(st.floats(-2, 2)),
        "logit_bias": _one_of(st.dictionaries(_IDS.map(str), st.floats(-100, 100), max_size=4)),
        "seed": _one_of(st.integers(0, 2**63 - 1)),
        "stop": _one_of(st.lists(_TEXT, max_size=4)),
        "stop_token_ids": _one_of(st.lists(_IDS, max_size=4)),
        "ignore_eos": _one_of(st.booleans()),
        "return_full_text": _one_of(st.booleans()),
        "truncate": _one_of(st.integers(1, 20)),
        "details": _one_of(st.booleans()),
        "decoder_input_details": _one_of(st.booleans()),
        "top_n_tokens": _one_of(st.integers(0, 20)),
        "n": _one_of(st.integers(1, 4)),
        "best_of": _one_of(st.integers(4, 5)),
    },
)
_BODIES = st.fixed_dictionaries(
    {"parameters": _PARAMETERS, "inputs": _one_of(_TEXT | st.lists(_TEXT, min_size=1, max_size=3))},
    optional={
        "stream": _one_of(st.booleans()),
        "priority": _one_of(st.integers(-100, 100)),
        "cache_salt": _one_of(st.text(min_size=1, max_size=8)),
        "timeout": _one_of(st.floats(10, 86400)),
        "messages": _one_of(st.none()),
        "model": _one_of(st.just("hybrid")),
    },
)


@pytest.mark.slow
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=_BODIES)
def test_no_body_breaks_the_server(http: httpx.Client, body: dict[str, Any]) -> None:
    reply = http.post("/generate", content=json.dumps(body))
    assert reply.status_code in (200, 404, 422), reply.text
    if reply.status_code == 200 and not body.get("stream"):
        for text in _texts(reply.json()):
            assert isinstance(text["generated_text"], str)
            if "details" in text:
                logprobs = [token["logprob"] for token in text["details"]["tokens"]]
                assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
    elif reply.status_code == 200:
        last = json.loads(reply.text.strip().rpartition("data: ")[2])
        assert last["details"]["finish_reason"]
    else:
        assert len(reply.json()["error"]) < 1000
    assert http.get("/health/ready").status_code == 200


def _texts(reply: Any) -> list[dict[str, Any]]:
    if isinstance(reply, dict):
        return [reply]
    return [text for item in reply for text in _texts(item)]
