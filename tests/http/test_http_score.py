"""`/score`, `/tokenize` and `/detokenize` over HTTP, on the starter models.

Of a model with both masks it is the causal one that scores, so `masked` is the same model's other
graph, served alone.
"""

import concurrent.futures
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.ask import score as scoring
from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import held, held_passes
from tests.servers import engine_of, metric, wait_for

pytestmark = pytest.mark.slow

KING = "The old king lived in a house by the sea."
ODD = ["Été à Orléans 🙂 שלום", "two  spaces\nand a line", "x" * 40, "a"]


# How many special tokens a text gets.
NUM_ADDED = {"hybrid": 1, "masked": 1, "sentiment": 2}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], masked_starter: Path) -> Iterator[Any]:
    starters = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    server = start_server(models=starters | {"masked": masked_starter})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return str(server.url)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


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


def test_either_mask_of_a_model_with_both_scores(http: httpx.Client) -> None:
    texts = [KING, *ODD]
    full = post(http, "/score", inputs=texts, model="masked").json()
    assert full[0]["method"] == "pseudo"
    assert post(http, "/score", inputs=texts, model="hybrid:full").json() == full
    assert post(http, "/score", inputs=texts, model="hybrid", mask="full").json() == full
    causal = post(http, "/score", inputs=texts, model="hybrid").json()
    assert causal[0]["method"] == "causal"
    assert post(http, "/score", inputs=texts, mask="causal").json() == causal
    assert post(http, "/score", inputs=texts, model="hybrid:causal").json() == causal
    both = {"model": "hybrid:full", "mask": "causal"}
    assert "contradicts the mask" in error(http, "/score", inputs=KING, **both)
    refused = error(http, "/score", inputs=KING, model="masked", mask="causal")
    assert refused == "model 'masked' does not run under the causal mask; it has the full one"
    assert "mask" in error(http, "/score", inputs=KING, mask="half")


def test_causal_scores_are_the_prompts_log_probabilities(http: httpx.Client) -> None:
    (score,) = post(http, "/score", inputs=KING, model="hybrid").json()
    assert_adds_up(score, "causal")
    parameters = {"max_new_tokens": 1, "decoder_input_details": True}
    generated = post(http, "/generate", inputs=KING, parameters=parameters).json()
    begin, *prefill = generated["details"]["prefill"]
    assert begin == {"id": 0, "text": "<|endoftext|>", "logprob": None}
    assert score["tokens"] == prefill
    assert "".join(token["text"] for token in score["tokens"]) == KING
    assert all(token["logprob"] is not None for token in score["tokens"])


def test_a_special_token_in_the_text_is_scored_as_its_own(http: httpx.Client) -> None:
    (plain,) = post(http, "/score", inputs=KING, model="hybrid").json()
    (begun,) = post(http, "/score", inputs="<|endoftext|>" + KING, model="hybrid").json()
    assert begun["tokens"][0]["text"] == "<|endoftext|>"
    assert [token["id"] for token in begun["tokens"][1:]] == [t["id"] for t in plain["tokens"]]
    assert all(token["logprob"] is not None for token in begun["tokens"])


def test_masked_scores_are_those_of_fill_mask(http: httpx.Client) -> None:
    """Each word is masked in turn, and every word of this text is one token."""
    (score,) = post(http, "/score", inputs=KING, model="masked").json()
    assert_adds_up(score, "pseudo")
    tokens = score["tokens"]
    words = [token["text"] for token in tokens]
    first, *others = KING.rstrip(".").split()
    assert words == [first, *(" " + word for word in others), "."]
    for index, token in enumerate(tokens):
        masked = "".join([*words[:index], "[MASK]", *words[index + 1 :]])
        targets = {"targets": [token["text"]]}
        (filling,) = post(
            http, "/fill-mask", inputs=masked, model="masked", parameters=targets
        ).json()
        assert filling["token"] == token["id"]
        assert math.log(filling["score"]) == pytest.approx(token["logprob"], abs=1e-6)


def test_masked_special_tokens_are_not_scored(http: httpx.Client) -> None:
    text = "The [MASK] ate <|endoftext|> there."
    (score,) = post(http, "/score", inputs=text, model="masked").json()
    assert_adds_up(score, "pseudo")
    unscored = [token["text"] for token in score["tokens"] if token["logprob"] is None]
    assert unscored == ["[MASK]", "<|endoftext|>"]
    (nothing,) = post(http, "/score", inputs="[MASK]", model="masked").json()
    assert nothing["log_likelihood"] == 0
    assert nothing["perplexity"] is None


@pytest.mark.parametrize("model", ["hybrid", "masked"])
def test_a_sensible_text_is_likelier_than_its_words_in_disorder(
    http: httpx.Client, model: str
) -> None:
    shuffled = "Sea the by house a in lived king old the."
    sensible, disorder = post(http, "/score", inputs=[KING, shuffled], model=model).json()
    assert sensible["perplexity"] < disorder["perplexity"]


@pytest.mark.parametrize("model", ["hybrid", "masked"])
def test_scores_do_not_depend_on_company(http: httpx.Client, model: str) -> None:
    """Bit for bit, with texts of one request and with other requests, a long one among them."""
    texts = [KING, *ODD, f"{KING} " * 9]
    together = post(http, "/score", inputs=texts, model=model).json()

    def alone(text: str) -> Any:
        return post(http, "/score", inputs=text, model=model).json()

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        assert [score for (score,) in pool.map(alone, texts)] == together
    for score in together:
        assert_adds_up(score, "causal" if model == "hybrid" else "pseudo")


def test_score_headers_count_what_was_computed(http: httpx.Client) -> None:
    """A masked model reads a text of n words, and a special token, n times."""
    num_words = len(KING.rstrip(".").split()) + 1
    headers = post(http, "/score", inputs=KING, model="masked").headers
    assert int(headers["x-compute-tokens"]) == num_words * (num_words + 1)
    assert float(headers["x-inference-time"]) > 0
    (score,) = post(http, "/score", inputs=KING, model="hybrid").json()
    headers = post(http, "/score", inputs=KING, model="hybrid").headers
    assert int(headers["x-compute-tokens"]) == len(score["tokens"]) + 1


@pytest.mark.parametrize(
    ("model", "direction"), [("hybrid", "right"), ("hybrid", "left"), ("masked", "left")]
)
def test_long_texts_are_refused_or_cut(http: httpx.Client, model: str, direction: str) -> None:
    models = {each["name"]: each for each in http.get("/models").json()}
    # A causal model keeps a place for a token that follows.
    most = models[model]["max_length"] - NUM_ADDED[model] - (model == "hybrid")
    text = " ".join(["house", "sea", "king"] * (most // 3 + 7))
    encoded = post(http, "/tokenize", inputs=text, model=model, add_special_tokens=False).json()
    ids = [token["id"] for token in encoded[0]]
    assert len(ids) > most
    message = error(http, "/score", inputs=["a", text], model=model)
    assert message.startswith(f"inputs[1]: the text has {len(ids) + NUM_ADDED[model]} tokens")
    parameters = {"truncate": True, "truncation_direction": direction}
    reply = post(http, "/score", inputs=text, model=model, parameters=parameters)
    kept = ids[:most] if direction == "right" else ids[-most:]
    assert [token["id"] for token in reply.json()[0]["tokens"]] == kept
    assert int(reply.headers["x-truncated-tokens"]) == len(ids) - most


def test_a_long_text_takes_few_places_in_the_queue(
    start_server: Callable[..., Any], masked_starter: Path
) -> None:
    """A text of a hundred words is scored where no more than three texts may wait."""
    server = start_server(models={"masked": masked_starter}, max_queue=3)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            text = " ".join(["the old king lived by the sea"] * 15)
            (score,) = post(client, "/score", inputs=text, model="masked").json()
            assert len(score["tokens"]) == 7 * 15
            assert_adds_up(score, "pseudo")
    finally:
        server.stop()


def test_a_client_that_leaves_ends_its_score(http: httpx.Client, url: str) -> None:
    labels = {"model": "masked", "outcome": "cancelled", "route": "/score"}
    before = metric(http, "maskdial_requests_total", **labels)
    body = json.dumps({"inputs": [f"{KING} " * 10] * 200, "model": "masked"}).encode()
    head = f"POST /score HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with held_passes() as began:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as leaving:
            leaving.sendall(head.encode() + body)
            assert began.wait(60)
        wait_for(lambda: metric(http, "maskdial_requests_total", **labels) == before + 1)


def test_score_refusals(http: httpx.Client) -> None:
    assert '"model": hybrid, masked' in error(http, "/score", inputs=KING)
    assert "cannot do score" in error(http, "/score", inputs=KING, model="sentiment")
    assert "inputs[1]" in error(http, "/score", inputs=[KING, ""], model="hybrid")
    assert "at most" in error(http, "/score", inputs=["a"] * 300, model="masked")
    assert "parameters.top_k: unknown field" in error(
        http, "/score", inputs=KING, model="hybrid", parameters={"top_k": 1}
    )


@pytest.mark.parametrize("model", ["hybrid", "masked"])
def test_a_score_that_takes_too_long_says_its_own_limit(
    server: Any, http: httpx.Client, model: str
) -> None:
    body = {"inputs": [f"{KING} " * 8] * 200, "model": model, "timeout": 0.05}
    with held(engine_of(server, model)):
        reply = post(http, "/score", 504, **body)
    assert "its timeout of 0.05 seconds" in reply.json()["error"]
    assert post(http, "/score", inputs=KING, model=model).status_code == 200


@pytest.mark.parametrize("model", ["hybrid", "masked", "sentiment"])
def test_tokens_say_where_they_stand_in_the_text(http: httpx.Client, model: str) -> None:
    texts = [KING, *ODD]
    replies = post(http, "/tokenize", inputs=texts, model=model).json()
    assert len(replies) == len(texts)
    for text, tokens in zip(texts, replies, strict=True):
        assert all(set(t) == {"id", "text", "special", "start", "stop"} for t in tokens)
        own = [token for token in tokens if not token["special"]]
        assert len(tokens) - len(own) == NUM_ADDED[model]
        assert all(token["text"] == text[token["start"] : token["stop"]] for token in own)
        covered = {at for token in own for at in range(token["start"], token["stop"])}
        assert {at for at, letter in enumerate(text) if not letter.isspace()} <= covered
        bare = post(http, "/tokenize", inputs=text, model=model, add_special_tokens=False).json()
        assert bare == [own]


def test_special_tokens_have_their_names_and_no_place(http: httpx.Client) -> None:
    def tokens_of(model: str) -> list[dict[str, Any]]:
        tokens: list[dict[str, Any]]
        (tokens,) = post(http, "/tokenize", inputs="a [MASK]", model=model).json()
        return tokens

    tokens = tokens_of("sentiment")
    around = [(token["text"], token["start"], token["stop"]) for token in (tokens[0], tokens[-1])]
    assert around == [("[CLS]", None, None), ("[SEP]", None, None)]
    begin, _, mask = tokens_of("hybrid")
    assert (begin["text"], begin["start"], begin["stop"]) == ("<|endoftext|>", None, None)
    # It takes the space before it.
    assert (mask["text"], mask["start"], mask["special"]) == (" [MASK]", 1, False)


def test_a_text_longer_than_the_model_is_tokenized_whole(http: httpx.Client) -> None:
    for model, text in (("sentiment", " ".join(["good"] * 5000)), ("hybrid", " good" * 5000)):
        (tokens,) = post(http, "/tokenize", inputs=text, model=model).json()
        assert len(tokens) == 5000 + NUM_ADDED[model]
        ids = [token["id"] for token in tokens]
        assert post(http, "/detokenize", ids=ids, model=model).json() == [text]


def test_detokenize_gives_the_text_back(http: httpx.Client) -> None:
    texts = [KING, *ODD]
    tokens = post(http, "/tokenize", inputs=texts, model="hybrid").json()
    ids = [[token["id"] for token in each] for each in tokens]
    assert post(http, "/detokenize", ids=ids, model="hybrid").json() == texts
    assert post(http, "/detokenize", ids=ids[0], model="hybrid").json() == [KING]
    assert post(http, "/detokenize", ids=[], model="hybrid").json() == [""]
    for model, kept in (("sentiment", "[CLS] the king [SEP]"), ("hybrid", "<|endoftext|>the king")):
        (tokens,) = post(http, "/tokenize", inputs="the king", model=model).json()
        body: dict[str, Any] = {"ids": [token["id"] for token in tokens], "model": model}
        assert post(http, "/detokenize", **body, skip_special_tokens=False).json() == [kept]
        assert post(http, "/detokenize", **body).json() == ["the king"]


def test_token_refusals(http: httpx.Client) -> None:
    assert '"model": hybrid, sentiment, masked' in error(http, "/tokenize", inputs="a")
    assert "hybrid, sentiment, masked" in error(http, "/detokenize", ids=[1])
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


def test_a_score_that_has_begun_is_not_refused_for_others(
    start_server: Callable[..., Any], masked_starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later maskings find room in a queue that is full of other texts."""
    server = start_server(models={"masked": masked_starter}, max_queue=2)
    read, (begun, go_on) = scoring._log_probabilities, (threading.Event(), threading.Event())

    def read_later(*arguments: Any) -> list[float]:
        begun.set()
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(scoring, "_log_probabilities", read_later)
    try:
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            concurrent.futures.ThreadPoolExecutor(3) as pool,
        ):
            scored = pool.submit(http.post, "/score", json={"inputs": KING})
            assert begun.wait(60)
            with held(engine_of(server, "masked")):
                other = {"inputs": "The [MASK] king."}
                others = [pool.submit(http.post, "/fill-mask", json=other) for _ in range(3)]
                wait_for(lambda: metric(http, "maskdial_queue_size", model="masked") == 2)
                go_on.set()
                wait_for(lambda: metric(http, "maskdial_queue_size", model="masked") == 4)
            assert scored.result().status_code == 200
            assert {each.result().status_code for each in others} <= {200, 429}
    finally:
        server.stop()
