"""Deadlines and priorities over HTTP: who waits is given up, who runs is stopped, and the slots and
queue places are free afterwards.

Engines are held between two steps, and most deadlines pass when the test says so: nothing here
depends on how fast the machine is.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import HOUR, HeldTimers, held, held_passes
from tests.servers import engine_of, metric, wait_for

PROMPT = "Once upon a time"
# More tokens than an engine here gets to make before the time is up.
LONG = {"max_new_tokens": 500, "ignore_eos": True}
MASKED_BODIES: dict[str, dict[str, Any]] = {
    "/fill-mask": {"inputs": "The old king lived in a [MASK] by the sea."},
    "/classify": {"inputs": "A warm, funny and moving film."},
    "/models/hybrid": {"inputs": ["a [MASK]", "the [MASK] sea"]},
}


@pytest.fixture(scope="module")
def small(start_server: Callable[..., Any]) -> Iterator[Any]:
    """All starter models, one slot."""
    server = start_server(slots=1)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def small_http(small: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=60) as client:
        yield client


@contextlib.contextmanager
def counted(http: httpx.Client, route: str, name: str, num_texts: int = 1) -> Iterator[None]:
    """Inside, exactly one request of the route times out, with so many texts of the engine."""
    served = name.removesuffix(":full")

    def counts() -> tuple[float, float, float]:
        return (
            metric(http, "maskdial_cancelled_total", model=name, reason="timeout"),
            metric(http, "maskdial_cancelled_total", model=name, reason="disconnect"),
            metric(http, "maskdial_requests_total", model=served, route=route, outcome="timeout"),
        )

    texts, gone, requests = counts()
    yield
    wait_for(lambda: counts() == (texts + num_texts, gone, requests + 1))


def refused(reply: httpx.Response) -> None:
    assert reply.status_code == 504, reply.text
    assert set(reply.json()) == {"error", "error_type"}
    assert reply.json()["error_type"] == "timeout"
    assert "did not finish within its timeout of" in reply.json()["error"]
    assert "x-request-id" in reply.headers


def num_waiting(http: httpx.Client, name: str = "hybrid") -> float:
    return metric(http, "maskdial_queue_size", model=name)


def is_waiting(http: httpx.Client, num_requests: int) -> bool:
    return num_waiting(http) == num_requests


def num_running(http: httpx.Client, name: str = "hybrid") -> float:
    return metric(http, "maskdial_requests_running", model=name)


def idle(http: httpx.Client) -> None:
    """Nobody waits or runs, and the slot does its work."""
    wait_for(lambda: num_running(http) == 0 and num_waiting(http) == 0)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    assert http.post("/generate", json=body).status_code == 200


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


@pytest.fixture
def timers(small: Any) -> Iterator[HeldTimers]:
    with HeldTimers(small.server._loop) as timers:
        yield timers


@pytest.mark.parametrize(
    ("route", "label"),
    [
        ("/generate", "/generate"),
        ("/generate_stream", "/generate_stream"),
        ("/models/hybrid", "/models/{name}"),
    ],
)
def test_a_queued_request_is_given_up(
    small: Any, small_http: httpx.Client, timers: HeldTimers, route: str, label: str
) -> None:
    body = {"inputs": PROMPT, "timeout": HOUR}
    with (
        ThreadPoolExecutor() as pool,
        counted(small_http, label, "hybrid"),
        held(engine_of(small, "hybrid")),
    ):
        request = pool.submit(small_http.post, route, json=body)
        wait_for(lambda: num_waiting(small_http) == 1)
        timers.go_off()
        refused(request.result())
        assert num_waiting(small_http) == 0
        assert num_running(small_http) == 0
    idle(small_http)


@pytest.mark.parametrize(
    "changes",
    [{"parameters": {"n": 5, "temperature": 1.0}}, {"inputs": ["a", "b", "c"]}],
    ids=["copies", "batch"],
)
def test_all_texts_of_a_request_are_given_up_together(
    small: Any, small_http: httpx.Client, timers: HeldTimers, changes: dict[str, Any]
) -> None:
    body = {"inputs": PROMPT, "timeout": HOUR} | changes
    num_texts = 5 if "parameters" in changes else 3
    with (
        ThreadPoolExecutor() as pool,
        counted(small_http, "/generate", "hybrid", num_texts),
        held(engine_of(small, "hybrid"), num_steps=1),
    ):
        request = pool.submit(small_http.post, "/generate", json=body)
        wait_for(lambda: num_running(small_http) == 1)
        assert num_waiting(small_http) == num_texts - 1
        timers.go_off()
        refused(request.result())
        assert num_waiting(small_http) == 0
    idle(small_http)


def test_a_running_request_is_stopped(
    small: Any, small_http: httpx.Client, timers: HeldTimers
) -> None:
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": HOUR}
    with (
        ThreadPoolExecutor() as pool,
        counted(small_http, "/generate", "hybrid"),
        held(engine_of(small, "hybrid"), num_steps=3),
    ):
        request = pool.submit(small_http.post, "/generate", json=body)
        wait_for(lambda: num_running(small_http) == 1)
        timers.go_off()
        refused(request.result())
    idle(small_http)


@pytest.mark.parametrize("num_steps", [0, 20], ids=["queued", "at any time"])
def test_a_deadline_passes_by_itself(small: Any, small_http: httpx.Client, num_steps: int) -> None:
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": 0.02}
    with (
        counted(small_http, "/generate", "hybrid"),
        held(engine_of(small, "hybrid"), num_steps),
    ):
        refused(small_http.post("/generate", json=body))
    idle(small_http)


def test_who_waits_behind_a_stopped_request_is_served(
    small: Any, small_http: httpx.Client, timers: HeldTimers
) -> None:
    first_body = {"inputs": "A cat", "parameters": LONG, "timeout": HOUR}
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}
    alone = small_http.post("/generate", json=body).json()
    with ThreadPoolExecutor() as pool:
        with held(engine_of(small, "hybrid"), num_steps=1):
            first = pool.submit(small_http.post, "/generate", json=first_body)
            wait_for(lambda: num_running(small_http) == 1)
            second = pool.submit(small_http.post, "/generate", json=body | {"timeout": 60})
            wait_for(lambda: num_waiting(small_http) == 1)
            timers.go_off()
            refused(first.result())
        assert second.result().json() == alone


def test_a_stream_that_began_ends_with_an_error_event(
    small: Any, small_http: httpx.Client, timers: HeldTimers
) -> None:
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": HOUR}
    with (
        counted(small_http, "/generate_stream", "hybrid"),
        held(engine_of(small, "hybrid"), num_steps=4),
        small_http.stream("POST", "/generate_stream", json=body) as response,
    ):
        assert response.status_code == 200
        received = events(response)
        tokens = [next(received) for _ in range(4)]
        timers.go_off()
        (last,) = received
    assert [event["index"] for event in tokens] == [1, 2, 3, 4]
    assert all(event["generated_text"] is None for event in tokens)
    assert set(last) == {"error", "error_type"}
    assert last["error_type"] == "timeout"
    idle(small_http)


def test_a_silent_stream_ends_with_an_error_event(
    small: Any, small_http: httpx.Client, timers: HeldTimers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream begins after a while without a token; from then on errors are events."""
    monkeypatch.setattr("maskdial.http.sse.KEEP_ALIVE_SECONDS", 0.05)
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": HOUR}
    with (
        counted(small_http, "/generate_stream", "hybrid"),
        held(engine_of(small, "hybrid")),
        small_http.stream("POST", "/generate_stream", json=body) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert next(lines) == ": keep-alive"
        timers.go_off()
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error_type"] == "timeout"
    idle(small_http)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("route", MASKED_BODIES)
def test_masked_requests_are_given_up(
    small: Any, small_http: httpx.Client, timers: HeldTimers, route: str, queued: bool
) -> None:
    name = "sentiment" if route == "/classify" else "hybrid:full"
    body = MASKED_BODIES[route]
    label = "/models/{name}" if route.startswith("/models") else route
    num_texts = len(body["inputs"]) if isinstance(body["inputs"], list) else 1
    with ThreadPoolExecutor() as pool, counted(small_http, label, name, num_texts):
        with held_passes() as began:
            first = None
            if queued:
                first = pool.submit(small_http.post, route, json=body)
                assert began.wait(60)
            late = pool.submit(small_http.post, route, json=body | {"timeout": HOUR})
            if queued:
                wait_for(lambda: num_waiting(small_http, name) == num_texts)
            else:
                assert began.wait(60)
            timers.go_off()
            refused(late.result())
            assert num_waiting(small_http, name) == 0
        assert first is None or first.result().status_code == 200
    assert small_http.post(route, json=body | {"timeout": 60}).status_code == 200


@pytest.mark.parametrize("asked", [{}, {"timeout": 24 * HOUR}], ids=["without", "longer"])
def test_the_servers_own_limit(start_server: Callable[..., Any], asked: dict[str, float]) -> None:
    """`request_timeout` holds where a body gives none, and where it gives a longer one."""
    server = start_server(request_timeout=HOUR, slots=1)
    bodies = {"/generate": {"inputs": PROMPT}, "/fill-mask": MASKED_BODIES["/fill-mask"]}
    try:
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            ThreadPoolExecutor() as pool,
            HeldTimers(server.server._loop) as timers,
            held(engine_of(server, "hybrid")),
            held_passes() as began,
        ):
            for route, name in (("/generate", "hybrid"), ("/fill-mask", "hybrid:full")):
                with counted(http, route, name):
                    request = pool.submit(http.post, route, json=bodies[route] | asked)
                    if route == "/fill-mask":
                        assert began.wait(60)
                    else:
                        wait_for(lambda: num_waiting(http) == 1)
                    timers.go_off()
                    refused(request.result())
                    assert "its timeout of 3600 seconds" in request.result().json()["error"]
    finally:
        server.stop()


def test_queued_requests_start_by_priority(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By priority, then by arrival; every fourth start is the oldest one's, so nothing starves."""
    server = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, slots=1)
    engine = engine_of(server, "hybrid")
    sequences: list[Any] = []
    stream = engine.stream

    def record(sequence: Any, timeout: float | None = None) -> Any:
        sequences.append(sequence)
        return stream(sequence, timeout)

    monkeypatch.setattr(engine, "stream", record)
    priorities = [100, 1, None, -1, 0, -1, 1, -100]
    try:
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            ThreadPoolExecutor(len(priorities)) as pool,
        ):
            replies = []
            with held(engine):
                for number, priority in enumerate(priorities):
                    parameters = {"seed": number, "max_new_tokens": 3}
                    body = {"inputs": PROMPT, "priority": priority, "parameters": parameters}
                    replies.append(pool.submit(http.post, "/generate", json=body))
                    wait_for(partial(is_waiting, http, number + 1))
            assert {reply.result().status_code for reply in replies} == {200}
    finally:
        server.stop()
    started = sorted(sequences, key=lambda sequence: sequence.started_at)
    assert [sequence.seed for sequence in started] == [7, 3, 5, 0, 2, 4, 1, 6]
