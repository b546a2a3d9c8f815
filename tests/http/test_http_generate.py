"""`/generate` over HTTP, on the starter model: replies, streams, company and disconnects."""

import concurrent.futures
import json
import socket
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.held import held
from tests.servers import engine_of, metric, wait_for

PROMPTS = [
    "Once upon a time there was a little",
    "The old man looked at the sea and",
    "In the morning",
    "She said",
    "The king and the queen lived in a castle with " * 12,
    "A cat",
    '"Where are you going?" asked the boy, and',
    "It was a dark night. " * 5,
]


def generate(http: httpx.Client, prompt: str, **parameters: object) -> dict[str, Any]:
    reply = http.post("/generate", json={"inputs": prompt, "parameters": parameters})
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream(http: httpx.Client, prompt: str, **parameters: object) -> list[dict[str, Any]]:
    body = {"inputs": prompt, "parameters": parameters}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        return events(response)


def test_reply_and_details(http: httpx.Client) -> None:
    plain = generate(http, PROMPTS[0], max_new_tokens=8)
    assert set(plain) == {"generated_text"}
    detailed = generate(http, PROMPTS[0], max_new_tokens=8, details=True)
    assert detailed["generated_text"] == plain["generated_text"]
    details = detailed["details"]
    assert details["generated_tokens"] == len(details["tokens"]) <= 8
    assert details["finish_reason"] in ("length", "eos_token")
    assert details["prefill"] == []
    assert set(details["tokens"][0]) == {"id", "text", "logprob", "special"}
    assert all(token["logprob"] <= 0 for token in details["tokens"])


def test_return_full_text_and_default_length(http: httpx.Client) -> None:
    continued = generate(http, PROMPTS[0], max_new_tokens=8)["generated_text"]
    full = generate(http, PROMPTS[0], max_new_tokens=8, return_full_text=True)["generated_text"]
    assert full == PROMPTS[0] + continued
    assert generate(http, PROMPTS[0], details=True)["details"]["generated_tokens"] <= 100


def test_stream_says_the_same_as_the_reply(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 24, "temperature": 0.8, "seed": 7}
    reply = generate(http, PROMPTS[1], details=True, **parameters)
    received = stream(http, PROMPTS[1], **parameters)
    assert [event["index"] for event in received] == list(range(1, len(received) + 1))
    assert [event["token"] for event in received] == reply["details"]["tokens"]
    assert all(event["generated_text"] is None for event in received[:-1])
    last = received[-1]
    assert last["generated_text"] == reply["generated_text"]
    assert last["details"]["seed"] == 7
    assert last["details"]["finish_reason"] == reply["details"]["finish_reason"]
    text = "".join(event["token"]["text"] for event in received)
    assert text == last["generated_text"]


def test_stream_flag_in_the_body(http: httpx.Client) -> None:
    body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 3}, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        assert len(events(response)) == 3


def test_seeds(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 20, "temperature": 1.0}
    drawn = generate(http, PROMPTS[2], details=True, **parameters)
    again = generate(http, PROMPTS[2], seed=drawn["details"]["seed"], **parameters)
    assert again["generated_text"] == drawn["generated_text"]
    texts = {
        generate(http, PROMPTS[2], seed=seed, **parameters)["generated_text"] for seed in range(5)
    }
    assert len(texts) > 1


def test_temperature_zero_and_top_p_one_are_accepted(http: httpx.Client) -> None:
    greedy = generate(http, PROMPTS[3], max_new_tokens=8)
    assert generate(http, PROMPTS[3], max_new_tokens=8, temperature=0) == greedy
    assert generate(http, PROMPTS[3], max_new_tokens=8, top_p=1.0, do_sample=False) == greedy
    assert generate(http, PROMPTS[3], max_new_tokens=8, top_k=1) == greedy


def test_stop_strings_end_the_text(http: httpx.Client) -> None:
    text = generate(http, PROMPTS[0], max_new_tokens=30)["generated_text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = generate(http, PROMPTS[0], max_new_tokens=30, stop=[stop], details=True)
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert stopped["generated_text"] == text[: text.index(stop) + len(stop)]


def test_batches_keep_their_order(http: httpx.Client) -> None:
    alone = [generate(http, prompt, max_new_tokens=6) for prompt in PROMPTS]
    body = {"inputs": PROMPTS, "parameters": {"max_new_tokens": 6}}
    assert http.post("/generate", json=body).json() == alone


def test_the_context_ends_the_text(http: httpx.Client) -> None:
    model = next(m for m in http.get("/models").json() if m["family"] == "causal")
    context = model["max_length"]
    # Every token is distinct work for the cache: a repeated prompt close to the context's end.
    prompt = "the " * (context - 6)
    detailed = generate(http, prompt, max_new_tokens=context, details=True)
    details = detailed["details"]
    assert details["finish_reason"] in ("length", "eos_token")
    assert details["input_length"] + details["generated_tokens"] <= context


def test_a_text_does_not_depend_on_company(http: httpx.Client, url: str) -> None:
    """Tokens and log-probabilities, bit for bit: alone, and started at any time among seven."""
    bodies = [
        {
            "inputs": prompt,
            "parameters": {"max_new_tokens": 40, "details": True, "seed": 3} | sampling,
        }
        for prompt in PROMPTS
        for sampling in ({}, {"temperature": 0.9, "top_p": 0.95}, {"repetition_penalty": 1.3})
    ]
    alone = [http.post("/generate", json=body).content for body in bodies]
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        together = list(
            pool.map(lambda body: client.post("/generate", json=body).content, bodies * 2)
        )
    assert together == alone * 2


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_client_that_leaves_frees_its_slot(
    server: Any, http: httpx.Client, url: str, route: str
) -> None:
    parts = urlsplit(url)
    cancelled = partial(
        metric, http, "maskdial_cancelled_total", model="hybrid", reason="disconnect"
    )
    waiting = partial(metric, http, "maskdial_queue_size", model="hybrid")
    running = partial(metric, http, "maskdial_requests_running", model="hybrid")
    before = cancelled()
    body = json.dumps(
        {"inputs": "Once", "parameters": {"max_new_tokens": 400, "temperature": 5.0}}
    ).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sockets = []
    with held(engine_of(server, "hybrid"), num_steps=3):
        for _ in range(40):  # more than there are slots, so that some leave the queue
            sockets.append(socket.create_connection((parts.hostname, parts.port)))
            sockets[-1].sendall(head + body)
        # A client that leaves before its request was read is no request, and is not counted.
        wait_for(lambda: running() > 0 and running() + waiting() == 40)
        for connection in sockets:
            connection.close()
        wait_for(lambda: cancelled() == before + 40)
        assert waiting() == 0
    wait_for(lambda: running() == 0)
    alive = generate(http, "A cat", max_new_tokens=2, details=True)
    assert alive["details"]["generated_tokens"] in (1, 2)
