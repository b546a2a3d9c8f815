"""Deadlines and priorities over HTTP: who waits is given up, who runs is stopped, and the slots and
queue places are free afterwards.

Engines are held between two steps, so that nothing here depends on how fast they are.
"""

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from maskdial.errors import ValidationError
from maskdial.http.disconnect import unless_gone
from maskdial.models.catalog import STARTER_FOLDER
from maskdial.runtime.session import Session

PROMPT = "Once upon a time"
# Far longer than any deadline here, on any machine.
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


def model(server: Any, name: str) -> Any:
    """A model by the name of its engine: of a second graph, ``NAME:full``."""
    models = server.server.config.app.state.context.models
    return next(each for each in models if each.bundle.label == name)


@contextlib.contextmanager
def held(engine: Any, num_steps: int = 0) -> Iterator[None]:
    """A causal engine that makes so many steps, and the next ones afterwards."""
    permits, step = threading.Semaphore(num_steps), engine.step

    def wait_and_step() -> None:
        assert permits.acquire(timeout=60)
        step()

    engine.step = wait_and_step
    try:
        yield
    finally:
        del engine.step
        permits.release()


@contextlib.contextmanager
def held_passes() -> Iterator[threading.Event]:
    """Masked passes begin, and go on afterwards; the event says that one began."""
    began, go_on, run = threading.Event(), threading.Event(), Session.run

    def held_run(session: Session, feeds: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return run(session, feeds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", held_run)
        try:
            yield began
        finally:
            go_on.set()


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    assert name == "maskdial_requests_total", f"no metric {name} {labels}"
    return 0.0  # the series of a route begin with its first request


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("route", "label"),
    [
        ("/generate", "/generate"),
        ("/generate_stream", "/generate_stream"),
        ("/models/hybrid", "/models/{name}"),
    ],
)
def test_a_queued_request_is_given_up(
    small: Any, small_http: httpx.Client, route: str, label: str
) -> None:
    engine = model(small, "hybrid").engine
    with counted(small_http, label, "hybrid"), held(engine):
        refused(small_http.post(route, json={"inputs": PROMPT, "timeout": 0.05}))
        assert num_waiting(small_http) == 0
        assert num_running(small_http) == 0
    idle(small_http)


@pytest.mark.parametrize(
    "changes",
    [{"parameters": {"n": 5, "temperature": 1.0}}, {"inputs": ["a", "b", "c"]}],
    ids=["copies", "batch"],
)
def test_all_texts_of_a_request_are_given_up_together(
    small: Any, small_http: httpx.Client, changes: dict[str, Any]
) -> None:
    engine = model(small, "hybrid").engine
    with held(engine, num_steps=1):
        refused(small_http.post("/generate", json={"inputs": PROMPT, "timeout": 0.2} | changes))
        assert num_waiting(small_http) == 0
    idle(small_http)


def test_a_running_request_is_stopped(small: Any, small_http: httpx.Client) -> None:
    engine = model(small, "hybrid").engine
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": 0.5}
    with (
        ThreadPoolExecutor() as pool,
        counted(small_http, "/generate", "hybrid"),
        held(engine, num_steps=3),
    ):
        request = pool.submit(small_http.post, "/generate", json=body)
        # It leaves its slot with the engine's next step, so this does not pass unseen.
        wait_for(lambda: num_running(small_http) == 1)
        refused(request.result())
    idle(small_http)


def test_a_deadline_without_holding_anything(small: Any, small_http: httpx.Client) -> None:
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": 0.02}
    with counted(small_http, "/generate", "hybrid"):
        refused(small_http.post("/generate", json=body))
    idle(small_http)


def test_who_waits_behind_a_stopped_request_is_served(small: Any, small_http: httpx.Client) -> None:
    engine = model(small, "hybrid").engine
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}
    alone = small_http.post("/generate", json=body).json()
    with ThreadPoolExecutor() as pool:
        with held(engine, num_steps=1):
            first = pool.submit(
                small_http.post,
                "/generate",
                json={"inputs": "A cat", "parameters": LONG, "timeout": 0.5},
            )
            wait_for(lambda: num_running(small_http) == 1)
            second = pool.submit(small_http.post, "/generate", json=body | {"timeout": 60})
            refused(first.result())
        assert second.result().json() == alone


def test_a_stream_that_began_ends_with_an_error_event(small: Any, small_http: httpx.Client) -> None:
    engine = model(small, "hybrid").engine
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": 0.5}
    with (
        counted(small_http, "/generate_stream", "hybrid"),
        held(engine, num_steps=4),
        small_http.stream("POST", "/generate_stream", json=body) as response,
    ):
        assert response.status_code == 200
        *tokens, last = events(response)
    assert [event["index"] for event in tokens] == [1, 2, 3, 4]
    assert all(event["generated_text"] is None for event in tokens)
    assert set(last) == {"error", "error_type"}
    assert last["error_type"] == "timeout"
    idle(small_http)


def test_a_silent_stream_ends_with_an_error_event(
    small: Any, small_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream begins after a while without a token; from then on errors are events."""
    monkeypatch.setattr("maskdial.http.sse.KEEP_ALIVE_SECONDS", 0.05)
    engine = model(small, "hybrid").engine
    body = {"inputs": PROMPT, "parameters": LONG, "timeout": 0.5}
    with (
        counted(small_http, "/generate_stream", "hybrid"),
        held(engine),
        small_http.stream("POST", "/generate_stream", json=body) as response,
    ):
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[0] == ": keep-alive"
    assert json.loads(lines[-1].removeprefix("data: "))["error_type"] == "timeout"
    idle(small_http)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("route", MASKED_BODIES)
def test_masked_requests_are_given_up(
    small: Any, small_http: httpx.Client, route: str, queued: bool
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
            refused(small_http.post(route, json=body | {"timeout": 0.05}))
            assert num_waiting(small_http, name) == 0
        assert first is None or first.result().status_code == 200
    assert small_http.post(route, json=body | {"timeout": 60}).status_code == 200


def test_the_servers_own_limit(start_server: Callable[..., Any]) -> None:
    """`request_timeout` holds where a body gives none, and where it gives a longer one."""
    server = start_server(request_timeout=0.2, slots=1)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            engine = model(server, "hybrid").engine
            for asked in ({}, {"timeout": 3600}):
                with counted(http, "/generate", "hybrid"), held(engine):
                    refused(http.post("/generate", json={"inputs": PROMPT} | asked))
            for asked in ({}, {"timeout": 3600}):
                with counted(http, "/fill-mask", "hybrid:full"), held_passes():
                    refused(http.post("/fill-mask", json=MASKED_BODIES["/fill-mask"] | asked))
    finally:
        server.stop()


def test_an_error_that_comes_too_late_is_not_logged() -> None:
    """The work fails in the moment in which its request is given up: nobody is left to tell."""
    logged: list[Any] = []

    async def fail() -> None:
        raise ValidationError("too late")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        request: Any = SimpleNamespace(receive=asyncio.Event().wait)
        waiting = asyncio.create_task(unless_gone(request, fail()))
        await asyncio.sleep(0)  # it starts the work
        await asyncio.sleep(0)  # the work fails
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    asyncio.run(run())
    gc.collect()
    assert logged == []


def test_queued_requests_start_by_priority(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By priority, then by arrival; every fourth start is the oldest one's, so nothing starves."""
    server = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, slots=1)
    engine = model(server, "hybrid").engine
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
    assert [sequence.params.seed for sequence in started] == [7, 3, 5, 0, 2, 4, 1, 6]
