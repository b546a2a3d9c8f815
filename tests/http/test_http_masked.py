"""`/fill-mask` and `/classify` over HTTP, on the starter models."""

import concurrent.futures

import httpx
import pytest

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
    parameters = {"targets": ["house", "tree"]}
    fillings = http.post("/fill-mask", json={"inputs": KING, "parameters": parameters}).json()
    assert {filling["token_str"] for filling in fillings} == {"house", "tree"}
    everything = http.post(
        "/fill-mask", json={"inputs": KING, "parameters": {"top_k": 2000}}
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


def test_classify_parameters(http: httpx.Client) -> None:
    def scores(**parameters: object) -> list[dict[str, float]]:
        body = {"inputs": "A film.", "parameters": parameters}
        reply = http.post("/classify", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()[0]

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
