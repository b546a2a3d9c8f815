"""`/fill-mask` and `/classify` over HTTP, on the starter models."""

import concurrent.futures
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.session import Session
from maskdial_client import Client
from tests.servers import metric, wait_for

KING = "The old king lived in a [MASK] by the sea."
TEXTS = [
    KING,
    "She opened the [MASK] and went in.",
    "The [MASK] barked at the cat all through the night, and in the morning it was [MASK].",
    "[MASK]!",
]


def test_fills_one_mask(http: httpx.Client) -> None:
    reply = http.post("/fill-mask", json={"inputs": KING})
    assert reply.status_code == 200
    fillings = reply.json()
    assert len(fillings) == 5
    assert set(fillings[0]) == {"score", "token", "token_str", "sequence"}
    scores = [filling["score"] for filling in fillings]
    assert scores == sorted(scores, reverse=True)
    assert 0 < sum(scores) <= 1
    assert all("MASK" not in filling["sequence"] for filling in fillings)


def test_several_masks_and_batches_keep_their_order(http: httpx.Client) -> None:
    alone = [http.post("/fill-mask", json={"inputs": text}).json() for text in TEXTS]
    together = http.post("/fill-mask", json={"inputs": TEXTS}).json()
    assert together == alone
    two_masks = together[2]
    assert len(two_masks) == 2
    assert "[MASK]" in two_masks[0][0]["sequence"]


def test_mask_aliases(http: httpx.Client) -> None:
    reply = http.post("/fill-mask", json={"inputs": KING.replace("[MASK]", "<mask>")})
    assert reply.json() == http.post("/fill-mask", json={"inputs": KING}).json()


def test_targets_score_only_those_words(http: httpx.Client) -> None:
    parameters = {"targets": [" house", " tree"]}  # words carry the space before them
    fillings = http.post("/fill-mask", json={"inputs": KING, "parameters": parameters}).json()
    assert {filling["token_str"] for filling in fillings} == {" house", " tree"}
    everything = http.post(
        "/fill-mask", json={"inputs": KING, "parameters": {"top_k": 10000}}
    ).json()
    by_token = {filling["token"]: filling["score"] for filling in everything}
    for filling in fillings:
        assert filling["score"] == pytest.approx(by_token[filling["token"]], abs=1e-9)


def test_classifies_texts_and_pairs(http: httpx.Client) -> None:
    good, bad = "A warm, funny and moving film.", "A dull, tedious and stupid mess."
    one = http.post("/classify", json={"inputs": good}).json()
    assert len(one) == 1
    assert {label["label"] for label in one[0]} == {"NEGATIVE", "POSITIVE"}
    assert sum(label["score"] for label in one[0]) == pytest.approx(1)
    assert one[0][0]["label"] == "POSITIVE"
    batch = http.post("/classify", json={"inputs": [good, bad]}).json()
    assert batch[0] == one[0]
    assert batch[1][0]["label"] == "NEGATIVE"
    pair = {"text": good, "text_pair": bad}
    paired = http.post("/classify", json={"inputs": pair}).json()
    assert len(paired) == 1
    assert paired != one
    assert http.post("/classify", json={"inputs": [pair, good]}).json() == [paired[0], one[0]]


def test_classifies_long_texts_in_windows(http: httpx.Client) -> None:
    """Each label has its largest score, and the place of the window that has it."""
    dull, warm = "A dull, tedious and stupid mess. " * 40, "A warm, funny and moving film. " * 40
    parameters = {"windows": "max"}

    def scores(inputs: object, status: int = 200, **more: object) -> Any:
        body = {"model": "sentiment", "inputs": inputs, "parameters": parameters | more}
        reply = http.post("/classify", json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    assert http.post("/classify", json={"inputs": dull + warm + dull}).status_code == 422
    (both,) = scores(dull + warm + dull)
    assert [each["score"] > 0.9 for each in both] == [True, True]
    places = {each["label"]: (each["start"], each["end"]) for each in both}
    text = dull + warm + dull
    start, end = places["POSITIVE"]
    assert "warm" in text[start:end]
    alone = http.post("/classify", json={"inputs": text[start:end].strip()}).json()[0]
    assert alone[0]["label"] == "POSITIVE"
    assert len(scores(text, top_k=1)[0]) == 1
    short = "A warm, funny and moving film."
    (one,) = scores([short])
    plain = http.post("/classify", json={"inputs": short}).json()[0]
    assert [(each["label"], each["score"]) for each in one] == [
        (each["label"], each["score"]) for each in plain
    ]
    assert {(each["start"], each["end"]) for each in one} == {(0, len(short))}
    scores({"text": short, "text_pair": short}, 422)
    scores("x " * 900_000, 422)


def test_classify_parameters(http: httpx.Client) -> None:
    def scores(**parameters: object) -> list[dict[str, float]]:
        body = {"inputs": "A film.", "parameters": parameters}
        reply = http.post("/classify", json=body)
        assert reply.status_code == 200, reply.text
        labels: list[dict[str, float]] = reply.json()[0]
        return labels

    assert len(scores(top_k=1)) == 1
    raw = {each["label"]: each["score"] for each in scores(function_to_apply="none")}
    sigmoid = {each["label"]: each["score"] for each in scores(function_to_apply="sigmoid")}
    for label, value in raw.items():
        assert sigmoid[label] == pytest.approx(1 / (1 + 2.718281828459045**-value), abs=1e-7)


def test_headers(http: httpx.Client) -> None:
    reply = http.post("/fill-mask", json={"inputs": KING}, headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    for name in ("x-queue-time", "x-inference-time", "x-total-time"):
        assert float(reply.headers[name]) >= 0
    assert int(reply.headers["x-compute-tokens"]) >= 10
    assert http.post("/fill-mask", json={"inputs": KING}).headers["x-request-id"] != "mine-1"


def test_answers_do_not_depend_on_company(http: httpx.Client, url: str) -> None:
    """Bit for bit: the JSON of every score alone and among forty other requests."""
    texts = [*TEXTS, *(f"{'word ' * n}and then the [MASK] came." for n in range(1, 60, 5))]
    fills = [("/fill-mask", {"inputs": text, "parameters": {"top_k": 3}}) for text in texts]
    classes = [("/classify", {"inputs": text}) for text in texts]
    requests = (fills + classes) * 2
    alone = [http.post(route, json=body).content for route, body in requests]
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        together = list(
            pool.map(lambda request: client.post(request[0], json=request[1]).content, requests)
        )
    assert together == alone


def test_the_client_reads_the_replies(url: str, narrow: Any) -> None:
    with Client(narrow.url) as client:
        score, nothing = client.score([KING.replace("[MASK]", "castle"), "[MASK]"])
        assert (score.method, nothing.method) == ("pseudo", "pseudo")
        logprobs = [each.logprob for each in score.tokens if each.logprob is not None]
        assert len(logprobs) == len(score.tokens)
        assert score.log_likelihood == pytest.approx(sum(logprobs))
        assert [token.logprob for token in nothing.tokens] == [None]
        assert nothing.perplexity is None
    with Client(url) as client:
        causal = client.score("The old king lived.")
        assert causal.method == "causal"
        assert causal.tokens[1].logprob is not None
        assert causal.perplexity is not None
        assert causal.tokens[1].logprob < 0 < causal.perplexity
        tokens = client.tokenize("The good  film.", model="sentiment")
        assert [(token.text, token.start, token.stop) for token in tokens if not token.special] == [
            ("The", 0, 3),
            ("good", 4, 8),
            ("film", 10, 14),
            (".", 14, 15),
        ]
        ids = [token.id for token in tokens]
        assert client.detokenize(ids, model="sentiment") == "the good film."
        assert client.detokenize([ids, ids[:2]], model="sentiment") == ["the good film.", "the"]
        cut = client.classify("word " * 1000, truncate=True, truncation_direction="left")
        assert cut.label in ("NEGATIVE", "POSITIVE")


class HeldPasses:
    """Masked passes wait for ``go_on``; keeps the lengths of each pass's texts."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.passes: list[list[int]] = []


@contextlib.contextmanager
def held() -> Iterator[HeldPasses]:
    """Holds the passes of all masked models, and lets them go on afterwards."""
    passes, run = HeldPasses(), Session.run

    def held_run(session: Session, feeds: Any) -> Any:
        passes.passes.append(feeds["lengths"].tolist())
        passes.began.set()
        assert passes.go_on.wait(60)
        return run(session, feeds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", held_run)
        try:
            yield passes
        finally:
            passes.go_on.set()


@pytest.fixture(scope="module")
def narrow(start_server: Callable[..., Any], masked_starter: Path) -> Iterator[Any]:
    """Masked models only, in passes of 64 tokens."""
    models = {"sentiment": STARTER_FOLDER / "sentiment", "masked": masked_starter}
    server = start_server(models=models, max_batch_tokens=64)
    yield server
    server.stop()


def test_nothing_starves_behind_a_stream_of_short_texts(narrow: Any) -> None:
    """The long text runs after the few that came before it, not after all the later ones."""

    def num_waiting() -> float:
        with httpx.Client(base_url=narrow.url, timeout=60) as http:
            return metric(http, "maskdial_queue_size", model="sentiment")

    def is_waiting(num_texts: float) -> bool:
        return num_waiting() == num_texts

    def classify(*texts: str) -> httpx.Response:
        return httpx.post(narrow.url + "/classify", json={"inputs": list(texts)}, timeout=60)

    with concurrent.futures.ThreadPoolExecutor() as pool, held() as session:
        replies = [pool.submit(classify, "Good.")]
        assert session.began.wait(30)
        many = [f"Bad {number}." for number in range(200)]
        for texts in (["Good."] * 2, ["word " * 100], many):
            waiting = num_waiting() + len(texts)
            replies.append(pool.submit(classify, *texts))
            wait_for(partial(is_waiting, waiting))
        session.go_on.set()
        assert [reply.result().status_code for reply in replies] == [200] * 4
    where = next(i for i, lengths in enumerate(session.passes) if max(lengths) > 100)
    assert where <= 1 + 2
    assert len(session.passes) > 10


def test_who_leaves_is_dropped_before_it_is_run(narrow: Any) -> None:
    body = json.dumps({"inputs": ["word " * 50, "word " * 60]}).encode()
    head = f"POST /classify HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with httpx.Client(base_url=narrow.url, timeout=60) as http:

        def dropped() -> float:
            name = "maskdial_cancelled_total"
            return metric(http, name, model="sentiment", reason="disconnect")

        def num_waiting() -> float:
            return metric(http, "maskdial_queue_size", model="sentiment")

        before = dropped()
        with concurrent.futures.ThreadPoolExecutor() as pool, held() as session:
            first = pool.submit(http.post, "/classify", json={"inputs": "Good."})
            assert session.began.wait(30)
            leaving = socket.create_connection(("127.0.0.1", httpx.URL(narrow.url).port))
            leaving.sendall(head.encode() + body)
            wait_for(lambda: num_waiting() == 2)
            leaving.close()
            wait_for(lambda: num_waiting() == 0)
            session.go_on.set()
            assert first.result().status_code == 200
            assert http.post("/classify", json={"inputs": "Bad."}).status_code == 200
            assert [len(lengths) for lengths in session.passes] == [1, 1]
            assert max(map(max, session.passes)) < 50
        wait_for(lambda: dropped() == before + 2)


@pytest.mark.parametrize(
    ("route", "model"),
    [("/fill-mask", "masked"), ("/classify", "sentiment"), ("/score", "masked")],
)
def test_ten_thousand_texts_are_refused_and_not_half_done(
    narrow: Any, route: str, model: str
) -> None:
    with httpx.Client(base_url=narrow.url, timeout=60) as http:

        def work_done() -> list[float]:
            names = (
                "prompt_tokens_total",
                "tokenization_duration_seconds_count",
                "batch_size_count",
            )
            return [metric(http, f"maskdial_{name}", model=model) for name in names]

        before = work_done()
        for path in (route, f"/models/{model}"):
            reply = http.post(path, json={"inputs": ["a [MASK]"] * 10_000, "model": model})
            assert reply.status_code == 422
            assert "10000 texts; one request may carry at most 256" in reply.json()["error"]
        assert work_done() == before
