"""What one key sends, no other key learns: not from caches, nor from counts."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER

MODELS = {"hybrid": STARTER_FOLDER / "hybrid"}
KEYS = "alice:one\nalice:another\nbob:two\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def cached(http: httpx.Client, prompt: str, key: str, path: str = "/v1/completions") -> int:
    """How much of a prompt a key finds in the cache; the prompt is in it afterwards."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "model": "hybrid"}
    if path == "/v1/decisions":
        question = {"type": "predicate", "instructions": "The girl is sad."}
        body = {"model": "hybrid", "input": prompt, "questions": [question]}
    reply = http.post(path, json=body, headers=bearer(key) if key else {})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def new_prompt() -> str:
    return f"{uuid.uuid4()} " + "the king and the queen went to the sea. " * 20


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def http(start_server: Callable[..., Any], key_file: Path) -> Iterator[httpx.Client]:
    running = start_server(models=MODELS, api_key_file=key_file, admin_key="root")
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    running.stop()


def test_the_right_guess_of_anothers_prompt_is_as_slow_as_a_wrong_one(http: httpx.Client) -> None:
    prompt = new_prompt()
    assert cached(http, prompt, "one") == 0
    assert cached(http, prompt, "two") == 0
    assert cached(http, prompt, "root") == 0
    own = cached(http, prompt, "another")  # of the same name
    assert own >= 64
    assert cached(http, prompt, "two") == own


def test_decisions_read_prompts_apart_as_well(http: httpx.Client) -> None:
    prompt = new_prompt()
    assert cached(http, prompt, "one", "/v1/decisions") == 0
    assert cached(http, prompt, "two", "/v1/decisions") == 0
    assert cached(http, prompt, "one", "/v1/decisions") > 64


def test_counts_by_key_are_told_to_nobody_without_a_key(http: httpx.Client) -> None:
    cached(http, "x", "one")
    page = http.get("/metrics").text
    assert "maskdial_requests_total" in page
    assert "alice" not in page
    assert 'key="' not in page


def test_a_shared_cache_is_shared(start_server: Callable[..., Any], key_file: Path) -> None:
    running = start_server(models=MODELS, api_key_file=key_file, prefix_cache_shared="on")
    prompt = new_prompt()
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            assert cached(http, prompt, "one") == 0
            assert cached(http, prompt, "two") >= 64
    finally:
        running.stop()
