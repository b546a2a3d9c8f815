"""Kept answers over HTTP: the bits of those computed anew, for the key that asked."""

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.registry.catalog import STARTER_FOLDER

STARTERS = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
KEYS = [{"authorization": f"Bearer {name}"} for name in ("one", "two", "root")]
LIMIT = 300_000


@pytest.fixture(scope="module")
def dependent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier, which says of itself that its last bits depend on a batch."""
    folder = tmp_path_factory.mktemp("bundles") / "dependent"
    shutil.copytree(STARTERS["sentiment"], folder)
    (manifest,) = read_manifests("sentiment", folder)
    write_manifest(folder, manifest.model_copy(update={"batch_invariant": False}))
    return folder


@pytest.fixture(scope="module")
def http(start_server: Callable[..., Any], dependent: Path) -> Iterator[httpx.Client]:
    running = start_server(
        models=STARTERS | {"dependent": dependent},
        api_keys=["one", "two"],
        admin_key="root",
        answer_cache_bytes=LIMIT,
    )
    with httpx.Client(base_url=running.url, timeout=60, headers=KEYS[0]) as client:
        yield client
    running.stop()


def cached(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.headers.get("x-cached-tokens", 0))


def gauge(http: httpx.Client, name: str, model: str) -> int:
    line = f'maskdial_answer_cache_{name}{{model="{model}"}} '
    page = http.get("/metrics").text
    return int(float(page.partition(line)[2].partition("\n")[0]))


def requests_at_random(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Of few texts, so that most come again, in other company and with other parameters."""
    rng = random.Random(5)
    texts = [
        f"The [MASK] was {' very' * rng.randint(0, 30)} {word}." for word in ("good", "bad", "old")
    ]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for _ in range(count):
        inputs = [rng.choice(texts) for _ in range(rng.randint(1, 5))]
        path = rng.choice(("/classify", "/fill-mask", "/score"))
        model = "sentiment" if path == "/classify" else "hybrid:full"
        body: dict[str, Any] = {"model": model, "inputs": inputs}
        if path == "/score":
            body["inputs"] = inputs[0]
        else:
            body["parameters"] = {"top_k": rng.randint(1, 2)}
        bodies.append((path, body))
    return bodies


def test_kept_answers_have_the_bits_of_those_computed_under_load(
    http: httpx.Client, start_server: Callable[..., Any]
) -> None:
    """And the cache, far too small for what is asked, is never larger than it may be."""
    bodies = requests_at_random(60)
    running = start_server(models=STARTERS, max_batch_tokens=16)
    try:
        plain = [httpx.post(running.url + path, json=body).text for path, body in bodies]
    finally:
        running.stop()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda each: http.post(each[0], json=each[1]), bodies))
        sizes = [gauge(http, "bytes", "hybrid:full") for _ in range(3)]
    assert [reply.text for reply in replies] == plain
    assert sum(map(cached, replies)) > 0
    assert all(size <= LIMIT for size in sizes)


def test_a_key_learns_nothing_of_anothers_texts(http: httpx.Client) -> None:
    body = {"model": "sentiment", "inputs": ["A film of Alice's.", "A film of nobody's."]}
    found = [cached(http.post("/classify", json=body, headers=KEYS[place])) for place in (0, 1, 0)]
    computed = int(http.post("/classify", json=body).headers["x-compute-tokens"])
    assert found == [0, 0, computed], "their tokens are counted in any case"


def test_shared_answers_serve_every_key(start_server: Callable[..., Any]) -> None:
    settings = {"answer_cache_bytes": LIMIT, "prefix_cache_shared": "on"}
    running = start_server(
        models={"sentiment": STARTERS["sentiment"]}, api_keys=["one", "two"], **settings
    )
    try:
        url, body = f"{running.url}/classify", {"inputs": "A film of Alice's."}
        assert cached(httpx.post(url, json=body, headers=KEYS[0])) == 0
        assert cached(httpx.post(url, json=body, headers=KEYS[1])) > 0
    finally:
        running.stop()


def test_a_model_that_is_loaded_again_knows_nothing(http: httpx.Client) -> None:
    body = {"model": "sentiment", "inputs": "Loaded twice."}
    assert cached(http.post("/classify", json=body)) == 0
    assert cached(http.post("/classify", json=body)) > 0
    assert gauge(http, "bytes", "sentiment") > 0
    unload = {"model": "sentiment"}
    assert http.post("/models/unload", json=unload, headers=KEYS[2]).status_code == 200
    assert gauge(http, "bytes", "sentiment") == 0
    assert cached(http.post("/classify", json=body)) == 0


def test_a_model_whose_bits_depend_on_a_batch_keeps_none(http: httpx.Client) -> None:
    body = {"model": "dependent", "inputs": "Twice the same."}
    replies = [http.post("/classify", json=body) for _ in range(2)]
    assert [cached(reply) for reply in replies] == [0, 0]
    assert gauge(http, "queries_total", "dependent") == 0
