"""`/score`, `/tokenize` and `/detokenize` over HTTP, on the starter models."""

import concurrent.futures
import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

KING = "The old king lived in a house by the sea."
ODD = ["Été à Orléans 🙂 שלום", "two  spaces\nand a line", "x" * 40, "a"]


def post(http: httpx.Client, route: str, status: int = 200, **body: object) -> httpx.Response:
    reply = http.post(route, json=body)
    assert reply.status_code == status, reply.text
    return reply


def error(http: httpx.Client, route: str, **body: object) -> str:
    return str(post(http, route, 422, **body).json()["error"])


def assert_adds_up(score: dict[str, object], method: str) -> None:
    assert set(score) == {"tokens", "log_likelihood", "perplexity", "method"}
    assert score["method"] == method
    tokens = score["tokens"]
    assert isinstance(tokens, list)
    assert all(set(token) == {"id", "text", "logprob"} for token in tokens)
    logprobs = [token["logprob"] for token in tokens if token["logprob"] is not None]
    assert all(logprob < 0 for logprob in logprobs)
    assert score["log_likelihood"] == pytest.approx(sum(logprobs), abs=1e-9)
    if logprobs:
        expected = math.exp(-sum(logprobs) / len(logprobs))
        assert score["perplexity"] == pytest.approx(expected, rel=1e-9)
    else:
        assert score["perplexity"] is None


def test_causal_scores_are_the_prompts_log_probabilities(http: httpx.Client) -> None:
    (score,) = post(http, "/score", inputs=KING, model="causal").json()
    assert_adds_up(score, "causal")
    parameters = {"max_new_tokens": 1, "decoder_input_details": True}
    generated = post(http, "/generate", inputs=KING, parameters=parameters).json()
    assert score["tokens"] == generated["details"]["prefill"]
    assert "".join(token["text"] for token in score["tokens"]) == KING
    assert [token["logprob"] for token in score["tokens"]].index(None) == 0


def test_a_special_token_before_the_text_makes_its_first_token_likely(http: httpx.Client) -> None:
    (plain,) = post(http, "/score", inputs=KING, model="causal").json()
    (begun,) = post(http, "/score", inputs="<|endoftext|>" + KING, model="causal").json()
    assert [token["id"] for token in begun["tokens"][1:]] == [t["id"] for t in plain["tokens"]]
    assert begun["tokens"][0]["logprob"] is None
    assert all(token["logprob"] is not None for token in begun["tokens"][1:])


def test_masked_scores_are_those_of_fill_mask(http: httpx.Client) -> None:
    """Each word is masked in turn, and every word of this text is one token."""
    (score,) = post(http, "/score", inputs=KING, model="masked").json()
    assert_adds_up(score, "pseudo")
    tokens = score["tokens"]
    words = [*KING.rstrip(".").split(), "."]
    assert [token["text"] for token in tokens] == [word.lower() for word in words]
    for index, token in enumerate(tokens):
        masked = " ".join([*words[:index], "[MASK]", *words[index + 1 :]])
        (filling,) = post(
            http, "/fill-mask", inputs=masked, parameters={"targets": [token["text"]]}
        ).json()
        assert filling["token"] == token["id"]
        assert math.log(filling["score"]) == pytest.approx(token["logprob"], abs=1e-6)


def test_masked_special_tokens_are_not_scored(http: httpx.Client) -> None:
    (score,) = post(http, "/score", inputs="The [MASK] ate 🙂 there.", model="masked").json()
    assert_adds_up(score, "pseudo")
    unscored = [token["text"] for token in score["tokens"] if token["logprob"] is None]
    assert unscored == ["[MASK]", "[UNK]"]
    (nothing,) = post(http, "/score", inputs="🙂", model="masked").json()
    assert nothing["log_likelihood"] == 0
    assert nothing["perplexity"] is None


@pytest.mark.parametrize("model", ["causal", "masked"])
def test_a_sensible_text_is_likelier_than_its_words_in_disorder(
    http: httpx.Client, model: str
) -> None:
    shuffled = "Sea the by house a in lived king old the."
    sensible, disorder = post(http, "/score", inputs=[KING, shuffled], model=model).json()
    assert sensible["perplexity"] < disorder["perplexity"]


@pytest.mark.parametrize("model", ["causal", "masked"])
def test_scores_do_not_depend_on_company(http: httpx.Client, model: str) -> None:
    """Bit for bit, with texts of one request and with other requests, a long one among them."""
    texts = [KING, *ODD, f"{KING} " * 9]
    together = post(http, "/score", inputs=texts, model=model).json()

    def alone(text: str) -> object:
        return post(http, "/score", inputs=text, model=model).json()

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        assert [score for (score,) in pool.map(alone, texts)] == together
    for score in together:
        assert_adds_up(score, "causal" if model == "causal" else "pseudo")


def test_score_headers_count_what_was_computed(http: httpx.Client) -> None:
    """A masked model reads a text of n words, and two special tokens, n times."""
    num_words = len(KING.rstrip(".").split()) + 1
    headers = post(http, "/score", inputs=KING, model="masked").headers
    assert int(headers["x-compute-tokens"]) == num_words * (num_words + 2)
    assert float(headers["x-inference-time"]) > 0
    (score,) = post(http, "/score", inputs=KING, model="causal").json()
    headers = post(http, "/score", inputs=KING, model="causal").headers
    assert int(headers["x-compute-tokens"]) == len(score["tokens"])


@pytest.mark.parametrize(
    ("model", "direction"), [("causal", "right"), ("causal", "left"), ("masked", "left")]
)
def test_long_texts_are_refused_or_cut(http: httpx.Client, model: str, direction: str) -> None:
    models = {each["name"]: each for each in http.get("/models").json()}
    num_added = 0 if model == "causal" else 2
    most = models[model]["max_length"] - (num_added or 1)
    text = " ".join(["house", "sea", "king"] * (most // 3 + 7))
    encoded = post(http, "/tokenize", inputs=text, model=model, add_special_tokens=False).json()
    ids = [token["id"] for token in encoded[0]]
    assert len(ids) > most
    message = error(http, "/score", inputs=["a", text], model=model)
    assert message.startswith(f"inputs[1]: the text has {len(ids) + num_added} tokens")
    parameters = {"truncate": True, "truncation_direction": direction}
    reply = post(http, "/score", inputs=text, model=model, parameters=parameters)
    kept = ids[:most] if direction == "right" else ids[-most:]
    assert [token["id"] for token in reply.json()[0]["tokens"]] == kept
    assert int(reply.headers["x-truncated-tokens"]) == len(ids) - most


def test_a_long_text_takes_few_places_in_the_queue(
    start_server: Callable[..., Any],
) -> None:
    """A text of a hundred words is scored where no more than three texts may wait."""
    server = start_server(max_queue=3)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            text = " ".join(["the old king lived by the sea"] * 15)
            (score,) = post(client, "/score", inputs=text, model="masked").json()
            assert len(score["tokens"]) == 7 * 15
            assert_adds_up(score, "pseudo")
    finally:
        server.stop()


def test_a_client_that_leaves_ends_its_score(http: httpx.Client, url: str) -> None:
    def cancelled() -> float:
        prefix = 'maskdial_requests_total{model="masked",outcome="cancelled",route="/score"}'
        (line,) = (each for each in http.get("/metrics").text.splitlines() if prefix in each)
        return float(line.split()[-1])

    before = cancelled()
    body = {"inputs": [f"{KING} " * 20] * 100, "model": "masked"}
    with httpx.Client(base_url=url, timeout=0.3) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/score", json=body)
    deadline = time.monotonic() + 30
    while cancelled() == before:
        assert time.monotonic() < deadline, "the score went on without its reader"
        time.sleep(0.02)


def test_score_refusals(http: httpx.Client) -> None:
    assert '"model": causal, masked' in error(http, "/score", inputs=KING)
    assert "cannot do score" in error(http, "/score", inputs=KING, model="sentiment")
    assert "inputs[1]" in error(http, "/score", inputs=[KING, ""], model="causal")
    assert "at most" in error(http, "/score", inputs=["a"] * 300, model="masked")
    assert "parameters.top_k: unknown field" in error(
        http, "/score", inputs=KING, model="causal", parameters={"top_k": 1}
    )


@pytest.mark.parametrize("model", ["causal", "masked"])
def test_a_score_that_takes_too_long_says_its_own_limit(http: httpx.Client, model: str) -> None:
    body = {"inputs": [f"{KING} " * 8] * 200, "model": model, "timeout": 0.05}
    reply = post(http, "/score", 504, **body)
    assert "within 0.05 seconds" in reply.json()["error"]
    assert post(http, "/score", inputs=KING, model=model).status_code == 200


@pytest.mark.parametrize("model", ["causal", "masked", "sentiment"])
def test_tokens_say_where_they_stand_in_the_text(http: httpx.Client, model: str) -> None:
    texts = [KING, *ODD]
    replies = post(http, "/tokenize", inputs=texts, model=model).json()
    assert len(replies) == len(texts)
    for text, tokens in zip(texts, replies, strict=True):
        assert all(set(t) == {"id", "text", "special", "start", "stop"} for t in tokens)
        own = [token for token in tokens if not token["special"]]
        assert len(tokens) - len(own) == (0 if model == "causal" else 2)
        assert all(token["text"] == text[token["start"] : token["stop"]] for token in own)
        covered = {at for token in own for at in range(token["start"], token["stop"])}
        assert {at for at, letter in enumerate(text) if not letter.isspace()} <= covered
        bare = post(http, "/tokenize", inputs=text, model=model, add_special_tokens=False).json()
        assert bare == [own]


def test_special_tokens_have_their_names_and_no_place(http: httpx.Client) -> None:
    (tokens,) = post(http, "/tokenize", inputs="a [MASK]", model="masked").json()
    around = [(token["text"], token["start"], token["stop"]) for token in (tokens[0], tokens[-1])]
    assert around == [("[CLS]", None, None), ("[SEP]", None, None)]
    assert tokens[2]["text"] == "[MASK]"
    assert (tokens[2]["start"], tokens[2]["special"]) == (2, False)


def test_a_text_longer_than_the_model_is_tokenized_whole(http: httpx.Client) -> None:
    (tokens,) = post(http, "/tokenize", inputs="house " * 5000, model="masked").json()
    assert len(tokens) == 5002
    ids = [token["id"] for token in tokens]
    (text,) = post(http, "/detokenize", ids=ids, model="masked").json()
    assert text == " ".join(["house"] * 5000)


def test_detokenize_gives_the_text_back(http: httpx.Client) -> None:
    texts = [KING, *ODD]
    tokens = post(http, "/tokenize", inputs=texts, model="causal").json()
    ids = [[token["id"] for token in each] for each in tokens]
    assert post(http, "/detokenize", ids=ids, model="causal").json() == texts
    assert post(http, "/detokenize", ids=ids[0], model="causal").json() == [KING]
    assert post(http, "/detokenize", ids=[], model="causal").json() == [""]
    (tokens,) = post(http, "/tokenize", inputs="the king", model="masked").json()
    ids = [token["id"] for token in tokens]
    kept = post(http, "/detokenize", ids=ids, model="masked", skip_special_tokens=False).json()
    assert kept == ["[CLS] the king [SEP]"]
    assert post(http, "/detokenize", ids=ids, model="masked").json() == ["the king"]


def test_token_refusals(http: httpx.Client) -> None:
    assert '"model": causal, masked, sentiment' in error(http, "/tokenize", inputs="a")
    assert "causal, masked, sentiment" in error(http, "/detokenize", ids=[1])
    message = error(http, "/detokenize", ids=[[5], [1, 10**6]], model="masked")
    assert "token ids from 0 to" in message
    assert "1000000" in message
    for ids in ([-1], [1.5], ["a"], [True]):
        message = error(http, "/detokenize", ids=ids, model="masked")
        assert message == "ids[0] must be a token id, which are integers of at least 0"
    message = error(http, "/detokenize", ids=[[1], 2], model="masked")
    assert message == "ids[1] must be a list of token ids, which are integers of at least 0"
    assert "ids" in error(http, "/detokenize", ids="1 2", model="masked")
    assert "at most" in error(http, "/detokenize", ids=[[1]] * 300, model="masked")
    assert post(http, "/tokenize", 404, inputs="a", model="nobody").json()["error_type"] == (
        "not_found"
    )
