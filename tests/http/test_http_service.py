"""The service routes, and a server's life: loading, limits, draining, failures."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import held
from tests.servers import engine_of, metric, wait_for

TEXT = "The old king lived in a [MASK] by the sea."


def test_models_and_info(http: httpx.Client) -> None:
    models = http.get("/models").json()
    assert [(model["name"], model["tasks"]) for model in models] == [
        ("hybrid", ["generate", "score", "tokenize"]),
        ("hybrid", ["fill-mask", "infill", "score", "tokenize"]),
        ("sentiment", ["classify", "tokenize"]),
    ]
    assert all(model["batch_invariant"] and model["ready"] for model in models)
    assert models[-1]["labels"] == ["NEGATIVE", "POSITIVE"]
    info = http.get("/info").json()
    assert info["phase"] == "serving"
    assert [model["name"] for model in info["models"]] == [model["name"] for model in models]


def test_docs_describe_the_bodies(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    document = http.get("/openapi.json").json()
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert {"FillMaskBody", "ClassifyBody", "GenerateBody", "ChatBody"} <= references
    assert references <= set(document["components"]["schemas"])
    temperature = document["components"]["schemas"]["GenerateParameters"]["properties"][
        "temperature"
    ]
    assert temperature["anyOf"][0]["maximum"] == 100


METRICS = [
    "requests_total",
    "request_duration_seconds",
    "queue_duration_seconds",
    "inference_duration_seconds",
    "tokenization_duration_seconds",
    "queue_size",
    "requests_running",
    "batch_size",
    "batch_tokens",
    "padding_ratio",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "kv_cache_usage_ratio",
    "kv_cache_bytes",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prefix_cache_bytes",
    "prefix_cache_blocks",
    "cancelled_total",
    "engine_up",
    "build_info",
]


def test_scrapes_share_one_thread(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, and the event loop answers meanwhile."""
    metrics = small.server.config.app.state.context.metrics_page
    writing, render, result = threading.Event(), metrics._work, metrics.result
    calls: list[threading.Thread] = []
    asked: list[None] = []

    def render_slowly() -> bytes:
        calls.append(threading.current_thread())
        writing.wait(30)
        return bytes(render())

    async def ask() -> bytes:
        asked.append(None)
        return bytes(await result())

    monkeypatch.setattr(metrics, "_work", render_slowly)
    monkeypatch.setattr(metrics, "result", ask)
    url = f"{small.url}/metrics"
    with ThreadPoolExecutor(20) as pool, httpx.Client(timeout=60) as http:
        scrapes = [pool.submit(httpx.get, url, timeout=60) for _ in range(20)]
        wait_for(lambda: len(asked) == len(scrapes))
        assert http.get(f"{small.url}/health/live").status_code == 200
        writing.set()
        assert {scrape.result().status_code for scrape in scrapes} == {200}
    (thread,) = calls
    assert thread not in (threading.main_thread(), small._thread)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics", "/info"])
def test_head_is_answered(http: httpx.Client, path: str) -> None:
    reply = http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")
    assert int(reply.headers["content-length"]) > 0


def test_a_slash_at_the_end_is_no_redirect(http: httpx.Client) -> None:
    """Which would lead to whatever host the client named."""
    for path in ("/models/", "/models/hybrid/", "/classify/", "/v1/models/", "/health/"):
        for method in ("GET", "POST"):
            reply = http.request(method, path, headers={"host": "evil"})
            assert reply.status_code in (404, 405, 422), path
            assert "location" not in reply.headers


def test_a_plain_sender_reads_its_413(http: httpx.Client, url: str) -> None:
    """One that writes all of its body before it reads."""
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        head = b"POST /classify HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n"
        client.sendall(head + b"x" * 20_000_000)
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 413 ")


def test_metrics_are_there_and_count(http: httpx.Client) -> None:
    def value(line_start: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return next((float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(line_start)), 0.0)

    http.post("/fill-mask", json={"inputs": TEXT})  # a route's series begin with the first
    text = http.get("/metrics").text
    for name in METRICS:
        assert f"maskdial_{name}{{" in text or f"maskdial_{name}_count{{" in text, name
    assert "process_cpu_seconds_total" in text
    assert "python_info" in text
    ok = 'maskdial_requests_total{model="hybrid",outcome="ok",route="/fill-mask"}'
    before = value(ok)
    http.post("/fill-mask", json={"inputs": TEXT})
    assert value(ok) == before + 1
    refused = 'maskdial_requests_total{model="",outcome="validation",route="/fill-mask"}'
    before = value(refused)
    http.post("/fill-mask", content=b"{")
    assert value(refused) == before + 1
    http.post("/models/no-such-model-name", content=b"{}")
    assert "no-such-model-name" not in http.get("/metrics").text


@pytest.fixture
def small(start_server: Callable[..., Any]) -> Iterator[Any]:
    """One slot and a queue of two."""
    server = start_server(
        models={"hybrid": STARTER_FOLDER / "hybrid"}, slots=1, max_queue=2, grace_period=20
    )
    yield server
    server.stop()


def slow_stream(url: str) -> socket.socket:
    """A stream that was begun, on a connection of its own."""
    body = json.dumps(
        {"inputs": "Once", "parameters": {"max_new_tokens": 200, "temperature": 9.0}}
    ).encode()
    port = int(url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_what_outlives_the_grace_period_is_told_so(
    start_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A stream ends with its error, others get a 503, and the log has no traceback."""
    server = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, grace_period=0)
    model = server.server.config.app.state.context.models.named("hybrid")[0]
    step, lifecycle = model.engine.step, server.server.config.app.state.context.lifecycle
    written = threading.Event()

    def step_slowly() -> None:
        """Once the stream has begun, no text gets any further."""
        time.sleep(0.05)
        if not written.is_set():
            step()

    model.engine.step = step_slowly
    url = f"{server.url}/generate"
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
    sender = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30)
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=30) as http, sender:
        whole = pool.submit(httpx.post, url, json=body, timeout=30)
        head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        sender.sendall(head.encode() + b'{"inputs": ')
        with http.stream("POST", url, json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert "token" in next(lines)
            written.set()
            wait_for(lambda: lifecycle.num_requests == 3)
            server.server.handle_exit(signal.SIGTERM, None)
            *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data:"))["error_type"] == "unavailable"
        reply = whole.result()
        assert (reply.status_code, reply.json()["error_type"]) == (503, "unavailable")
        assert b" 503 " in sender.makefile("rb").readline()
    server.stop()
    assert [record for record in caplog.records if "grace period is over: 3" in record.message]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_full_queue_is_429_with_retry_after(small: Any) -> None:
    body = {"inputs": "a cat", "parameters": {"max_new_tokens": 3}}
    with (
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=small.url, timeout=60) as http,
        held(engine_of(small, "hybrid")) as go_on,
    ):
        waiting = [pool.submit(http.post, "/generate", json=body) for _ in range(2)]
        wait_for(lambda: metric(http, "maskdial_queue_size", model="hybrid") == 2)
        reply = http.post("/generate", json=body)
        go_on()
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error_type"] == "overloaded"
        assert [request.result().status_code for request in waiting] == [200, 200]


def test_more_texts_than_the_queue_holds_are_422(small: Any) -> None:
    body = {"inputs": "a", "parameters": {"n": 3, "temperature": 1}}
    reply = httpx.post(small.url + "/generate", json=body)
    assert reply.status_code == 422
    assert "at most 2" in reply.json()["error"]


def test_a_dead_engine_fails_its_requests_and_no_others(small: Any) -> None:
    engine = engine_of(small, "hybrid")
    steps, failing = iter([engine.step] * 3), threading.Event()

    def step_and_fail() -> None:
        if step := next(steps, None):
            step()
            return
        assert failing.wait(60)
        raise MemoryError("scripted")

    engine.step = step_and_fail
    with (
        httpx.Client(base_url=small.url, timeout=60) as http,
        ThreadPoolExecutor() as pool,
        slow_stream(small.url) as connection,
    ):
        stream = connection.makefile("rb")
        assert b" 200 " in stream.readline()
        waiting = pool.submit(http.post, "/generate", json={"inputs": "a cat"})
        wait_for(lambda: metric(http, "maskdial_queue_size", model="hybrid") == 1)
        failing.set()
        assert any(b"died" in line for line in stream), "the stream ends with the error"
        assert waiting.result().status_code == 500
        assert http.get("/health/ready").status_code == 200
        assert http.get("/health/live").status_code == 200
        ready = {model["mask"]: model["ready"] for model in http.get("/models").json()}
        assert ready == {"causal": False, "full": True}
        assert http.post("/fill-mask", json={"inputs": "a [MASK]"}).status_code == 200
        reply = http.post("/generate", json={"inputs": "a cat"})
        assert reply.status_code == 503
        assert reply.json()["error_type"] == "unavailable"
        assert "retry-after" in reply.headers


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "maskdial.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if "listening on" in line:
            return line.split("listening on ")[1].strip()
    raise AssertionError("it ended before it listened")


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_zero() -> None:
    process = command("serve", "--port", "0", "--model", f"hybrid={STARTER_FOLDER / 'hybrid'}")
    url = address(process)
    assert process.stdout is not None
    logging = threading.Thread(target=process.stdout.read, daemon=True)
    logging.start()
    with httpx.Client(base_url=url, timeout=30) as http:
        while http.get("/health/ready").status_code != 200:
            time.sleep(0.02)
        streams = [slow_stream(url) for _ in range(12)]
        replies = [stream.makefile("rb") for stream in streams]

        def num_accepted() -> float:
            ok = {"route": "/generate_stream", "outcome": "ok"}
            names = ("requests_running", "queue_size")
            return metric(http, "maskdial_requests_total", model="hybrid", **ok) + sum(
                metric(http, f"maskdial_{name}", model="hybrid") for name in names
            )

        wait_for(lambda: num_accepted() == len(streams))
        process.send_signal(signal.SIGTERM)
        statuses: list[int] = []
        try:
            while not statuses or statuses[-1] != 503:
                statuses.append(http.get("/health/ready").status_code)
            refused = http.post("/generate", json={"inputs": "a cat"})
            statuses.append(refused.status_code)
        except httpx.TransportError:
            pass  # the streams were done already, and so was the server
        for stream, reply in zip(streams, replies, strict=True):
            content = reply.read()
            # Each was either taken and finished, or came too late and was told so.
            assert b'"finish_reason"' in content or b" 503 " in content
            stream.close()
    assert set(statuses) <= {200, 503}
    assert process.wait(60) == 0
    logging.join()
    process.stdout.close()


def test_a_broken_bundle_is_one_sentence_and_exit_one(tmp_path: Path) -> None:
    process = command("serve", "--port", "0", "--model", f"mine={tmp_path}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.count("maskdial.json") == 1
    assert "Traceback" not in output


def test_a_missing_provider_is_an_error_at_start() -> None:
    process = command("serve", "--port", "0", "--provider", "cuda")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "provider 'cuda' was asked for" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_bad_setting_names_itself(tmp_path: Path) -> None:
    output, _ = (process := command("serve", MASKDIAL_PORT="http")).communicate(timeout=60)
    assert process.returncode == 1
    assert "'port'" in output
    file = tmp_path / "maskdial.toml"
    file.write_text("prot = 8000\n")
    output, _ = (process := command("serve", "--config", str(file))).communicate(timeout=60)
    assert process.returncode == 1
    assert "prot" in output


def test_readers_of_metrics_within_a_second_get_one_page(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server is without the tests' own setting; what it writes then takes no time."""
    page = small.server.config.app.state.context.metrics_page
    render, calls = page._work, []

    def count() -> bytes:
        calls.append(1)
        return bytes(render())

    monkeypatch.setattr(page, "_work", count)
    assert create_app(Config()).state.context.metrics_page.seconds == 1.0
    monkeypatch.setattr(page, "seconds", 3600.0)
    with httpx.Client(base_url=small.url, timeout=30) as http:
        pages = {http.get("/metrics").text for _ in range(20)}
    assert len(calls) == len(pages) == 1
    page._fresh_until = 0.0  # the other tests' pages are new
