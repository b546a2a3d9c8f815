"""Texts that are longer than the model: refused with both lengths, or cut where it shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import load_bundles
from maskdial.registry.catalog import STARTER_FOLDER
from tests.page.bundles import make_embedder

STARTERS = {"/fill-mask": "hybrid", "/classify": "sentiment"}
NUM_ADDED = {"/fill-mask": 1, "/classify": 2}  # special tokens
LIMITS = {
    route: load_bundles(name, STARTER_FOLDER / name)[-1].manifest.max_length
    for route, name in STARTERS.items()
}
# The limit without the special tokens; each of the words below is one token.
NUM_WORDS = LIMITS["/classify"] - NUM_ADDED["/classify"]
EXCESS = 40
LONG = " good" * NUM_WORDS + " bad" * EXCESS
CUT = {"right": " good" * NUM_WORDS, "left": " good" * (NUM_WORDS - EXCESS) + " bad" * EXCESS}


def post(http: httpx.Client, route: str, inputs: object, **parameters: object) -> httpx.Response:
    return http.post(route, json={"inputs": inputs, "parameters": parameters})


@pytest.mark.parametrize("route", STARTERS)
@pytest.mark.parametrize("asked", [{}, {"truncate": False}, {"truncation_direction": "left"}])
def test_a_long_text_is_refused_with_both_lengths(
    http: httpx.Client, route: str, asked: dict[str, Any]
) -> None:
    text = " good" * LIMITS[route] + " [MASK]" * (route == "/fill-mask")
    length = LIMITS[route] + NUM_ADDED[route] + (route == "/fill-mask")
    reply = post(http, route, ["a [MASK]", text], **asked)
    assert reply.status_code == 422
    error = reply.json()["error"]
    assert error.startswith(f"inputs[1]: the text has {length} tokens; ")
    assert f"at most {LIMITS[route]}; " in error
    assert "inputs" not in post(http, route, text, **asked).json()["error"]


@pytest.mark.parametrize("direction", ["left", "right"])
def test_the_rest_of_a_cut_text_is_answered(http: httpx.Client, direction: str) -> None:
    whole = post(http, "/classify", CUT[direction])
    assert whole.status_code == 200
    assert "x-truncated-tokens" not in whole.headers
    cut = post(http, "/classify", LONG, truncate=True, truncation_direction=direction)
    assert cut.json() == whole.json()
    assert cut.headers["x-truncated-tokens"] == str(EXCESS)
    assert cut.headers["x-compute-tokens"] == whole.headers["x-compute-tokens"]


def test_the_right_end_is_cut_and_case_does_not_matter(http: httpx.Client) -> None:
    right = post(http, "/classify", LONG, truncate=True)
    assert right.json() == post(http, "/classify", CUT["right"]).json()
    left = post(http, "/classify", LONG, truncate=True, truncation_direction="Left")
    assert left.json() == post(http, "/classify", CUT["left"]).json()
    assert left.json() != right.json()
    reply = post(http, "/classify", LONG, truncate=True, truncation_direction="middle")
    assert reply.status_code == 422
    assert "truncation_direction" in reply.json()["error"]


def test_a_server_may_cut_where_a_request_does_not_say(
    start_server: Callable[..., Any], http: httpx.Client, tmp_path: Path
) -> None:
    """Of one model of two; what requests say counts more."""
    embedder = make_embedder(tmp_path / "embedder")
    models = {"sentiment": STARTER_FOLDER / "sentiment", "embedder": embedder}
    server = start_server(models=models, auto_truncate="other, sentiment")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as cutting:
            cut = post(cutting, "/classify", LONG)
            assert cut.json() == post(http, "/classify", LONG, truncate=True).json()
            assert cut.headers["x-truncated-tokens"] == str(EXCESS)
            assert post(cutting, "/classify", LONG, truncate=False).status_code == 422
            left = post(cutting, "/classify", LONG, truncation_direction="left")
            assert left.json() == post(http, "/classify", CUT["left"]).json()
            body = {"input": [LONG], "model": "embedder"}
            assert cutting.post("/v1/embeddings", json=body).status_code == 400
    finally:
        server.stop()


def test_texts_that_fit_are_left_as_they_are(http: httpx.Client) -> None:
    short, full = "A good film.", CUT["right"]
    cut = post(http, "/classify", [short, LONG, full, LONG], truncate=True)
    alone = [post(http, "/classify", text).json()[0] for text in (short, full)]
    assert cut.json() == [alone[0], alone[1], alone[1], alone[1]]
    assert cut.headers["x-truncated-tokens"] == str(2 * EXCESS)
    fitting = post(http, "/classify", [short, full], truncate=True)
    assert fitting.json() == alone
    assert "x-truncated-tokens" not in fitting.headers


def test_the_longer_text_of_a_pair_is_cut(http: httpx.Client) -> None:
    room = NUM_WORDS - 1  # a pair has three special tokens
    pair = {"text": "bad film", "text_pair": " good" * 2 * room}
    refused = post(http, "/classify", [pair])
    assert f"has {2 * room + 5} tokens" in refused.json()["error"]
    kept = {"text": "bad film", "text_pair": " good" * (room - 2)}
    reply = post(http, "/classify", pair, truncate=True)
    assert reply.json() == post(http, "/classify", kept).json()
    assert reply.headers["x-truncated-tokens"] == str(room + 2)


def test_a_mask_is_kept_or_the_text_refused(http: httpx.Client) -> None:
    words = " good" * LIMITS["/fill-mask"]
    first, last = "[MASK] is" + words, words + " is [MASK]"
    for text, kept, lost in ((first, "right", "left"), (last, "left", "right")):
        reply = post(http, "/fill-mask", text, truncate=True, truncation_direction=kept)
        assert reply.status_code == 200
        assert reply.headers["x-truncated-tokens"] == "3"
        assert reply.headers["x-compute-tokens"] == str(LIMITS["/fill-mask"])
        reply = post(http, "/fill-mask", ["[MASK]", text], truncate=True, truncation_direction=lost)
        assert reply.status_code == 422
        assert "inputs[1]: 1 of the text's 1 masks would be truncated" in reply.json()["error"]
    reply = post(http, "/fill-mask", "[MASK] " + last, truncate=True)
    assert "1 of the text's 2 masks would be truncated" in reply.json()["error"]
