"""The limits of a client over HTTP, and what its requests have used."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.held import held
from tests.servers import engine_of

PATHS = ("/classify", "/generate", "/score", "/v1/decisions")
KEYS = {name: name * 20 for name in ("alice", "bob", *(path.replace("/", ".") for path in PATHS))}


@pytest.fixture(scope="module")
def limited(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    running = start_server(api_key_file=file, max_requests_per_client=1, max_tokens_per_minute=1000)
    yield running
    running.stop()


@pytest.fixture
def clients(limited: Any) -> Iterator[dict[str, httpx.Client]]:
    clients = {
        name: httpx.Client(base_url=limited.url, headers={"x-api-key": key}, timeout=60)
        for name, key in KEYS.items()
    }
    yield clients
    for client in clients.values():
        client.close()


def test_a_second_open_request_is_refused(limited: Any, clients: dict[str, httpx.Client]) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
    with (
        held(engine_of(limited, "hybrid"), num_steps=2),
        clients["alice"].stream("POST", "/generate_stream", json=body) as stream,
    ):
        assert stream.status_code == 200
        for path, field in (("/classify", "error"), ("/v1/completions", "error")):
            reply = clients["alice"].post(path, json={"inputs": "a"})
            assert reply.status_code == 429
            assert "may have 1 (--max-requests-per-client)" in json.dumps(reply.json()[field])
            assert reply.headers["retry-after"] == "1"
        assert clients["bob"].post("/classify", json={"inputs": "a"}).status_code == 200


BODIES: dict[str, dict[str, Any]] = {
    "/classify": {"inputs": [f"a good film {number}" for number in range(50)]},
    "/generate": {"inputs": "Once", "parameters": {"max_new_tokens": 50, "ignore_eos": True}},
    "/score": {"inputs": "Once there was a king. " * 10, "model": "hybrid"},
    "/v1/decisions": {
        "model": "hybrid",
        "input": "NUMBER is a fine day. " * 10,
        "questions": [{"type": "predicate", "instructions": "It rains."}],
    },
}


@pytest.mark.parametrize("path", PATHS)
def test_every_engine_counts_tokens(clients: dict[str, httpx.Client], path: str) -> None:
    client = clients[path.replace("/", ".")]
    bodies = [json.dumps(BODIES[path]).replace("NUMBER", str(i)) for i in range(60)]
    replies = [client.post(path, content=body) for body in bodies]
    statuses = [reply.status_code for reply in replies]
    assert statuses[:2] == [200, 200], replies[0].text
    assert set(statuses) == {200, 429}
    refused = replies[statuses.index(429)]
    assert "1,000 tokens a minute" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60
