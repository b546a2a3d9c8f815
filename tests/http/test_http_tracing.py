"""Traces: one span a request with its phases, in the caller's trace, and nothing when it is off."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from maskdial.config import load_config
from maskdial.engine import trace
from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.http import tracing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def client(
    start_server: Callable[..., Any], exporter: InMemorySpanExporter
) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_exporter", lambda endpoint: exporter)
        # Spans are there as soon as the reply is.
        patch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", SimpleSpanProcessor)
        server = start_server(otlp_endpoint="http://127.0.0.1:4318")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[[], dict[str, ReadableSpan]]:
    """Waits for a request's span, which ends after its reply, and returns all since the test began
    by name.
    """
    exporter.clear()

    def read() -> dict[str, ReadableSpan]:
        until = time.monotonic() + 10
        while not any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()):
            assert time.monotonic() < until, "no request was traced"
            time.sleep(0.01)
        return {span.name: span for span in exporter.get_finished_spans()}

    return read


Spans = Callable[[], dict[str, ReadableSpan]]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_chat_has_a_span_with_its_phases(client: httpx.Client, spans: Spans) -> None:
    body = {"model": "hybrid", "prompt": "Once upon a time", "max_tokens": 12, "n": 2, "seed": 1}
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "x-request-id": "mine"}
    reply = client.post("/v1/completions", json=body, headers=headers)
    usage = reply.json()["usage"]
    found = spans()
    request = found["POST /v1/completions"]
    assert request.kind is SpanKind.SERVER
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == PARENT
    named = f"00-{TRACE_ID}-{request.context.span_id:016x}-01"
    assert reply.headers["traceresponse"] == named
    found_attributes = attributes(request)
    assert found_attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found_attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "maskdial.request_id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "maskdial",
        "gen_ai.request.model": "hybrid",
        "gen_ai.response.model": "hybrid",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert len(found) == 4
    assert [span.parent for span in phases] == [request.context] * 3
    times = [time for span in phases for time in (span.start_time, span.end_time)]
    # The second text waits for the prefill of the first, so the phases may overlap.
    assert times[0] == min(time for time in times if time is not None)
    # Two clocks of the operating system are compared, which may drift by this much meanwhile.
    margin = 50_000_000
    assert request.start_time is not None
    assert request.end_time is not None
    assert all(time is not None for time in times)
    assert all(
        request.start_time - margin <= time <= request.end_time + margin
        for time in times
        if time is not None
    )


@pytest.mark.parametrize("parameters", [{"num_beams": 2}, {"do_sample": True, "seed": 1}])
def test_a_prompt_counts_once(
    client: httpx.Client, spans: Spans, exporter: InMemorySpanExporter, parameters: dict[str, Any]
) -> None:
    """However many texts it gets, and what the prefix cache has of it."""
    prompt = f"{parameters} " + "The king went to the sea. " * 40
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 2, "n": 2, **parameters}}
    for num_cached in (0, 256):
        exporter.clear()
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        found = attributes(spans()["POST /generate"])
        num_tokens = int(reply.headers["x-compute-tokens"]) - 4
        assert found["gen_ai.usage.input_tokens"] == num_tokens > 256
        assert found["gen_ai.usage.cache_read.input_tokens"] == num_cached


def test_a_stream_is_traced_to_its_end(client: httpx.Client, spans: Spans) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 9, "seed": 1}}
    with client.stream("POST", "/generate_stream", json=body) as reply:
        events = [line for line in reply.iter_lines() if line]
    found = attributes(spans()["POST /generate_stream"])
    assert found["gen_ai.usage.output_tokens"] == len(events) == 9
    assert found["gen_ai.response.finish_reasons"] == ("length",)


def test_a_masked_task_has_an_inference(client: httpx.Client, spans: Spans) -> None:
    reply = client.post("/classify", json={"inputs": ["fine", "dull"]})
    found = spans()
    assert set(found) == {"POST /classify", "queue", "inference"}
    request = attributes(found["POST /classify"])
    assert request["gen_ai.usage.input_tokens"] == int(reply.headers["x-compute-tokens"])
    assert "gen_ai.usage.output_tokens" not in request
    assert "gen_ai.operation.name" not in request  # the conventions have no name for it


def test_errors(client: httpx.Client, spans: Spans) -> None:
    assert client.post("/generate", json={"inputs": 1}).status_code == 422
    (refused,) = spans().values()
    assert attributes(refused)["error.type"] == "validation"
    assert attributes(refused)["http.response.status_code"] == 422
    # By the conventions, a client's mistake is not an error of the server's span.
    assert refused.status.status_code is StatusCode.UNSET


def test_a_caller_that_samples_nothing(client: httpx.Client, spans: Spans) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-00"}
    reply = client.post("/classify", json={"inputs": "fine"}, headers=headers)
    assert client.post("/tokenize", json={"inputs": "fine", "model": "hybrid"}).status_code == 200
    assert set(spans()) == {"POST /tokenize"}
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
    assert reply.headers["traceresponse"].endswith("-00")


def test_probes_and_metrics_have_no_spans(client: httpx.Client, spans: Spans) -> None:
    for path in ("/health", "/metrics", "/models"):
        assert client.get(path).status_code == 200
    assert client.post("/nowhere", json={}).status_code == 404
    assert client.post("/tokenize", json={"inputs": "fine", "model": "hybrid"}).status_code == 200
    assert set(spans()) == {"POST /tokenize"}


def test_without_it_nothing_is_noted(http: httpx.Client) -> None:
    reply = http.post("/classify", json={"inputs": "fine"})
    assert "traceresponse" not in reply.headers
    trace.note()
    assert trace.work_of_request.get() is None


def test_open_telemetry_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(endpoint: str) -> None:
        raise ImportError("No module named 'opentelemetry.exporter'")

    monkeypatch.setattr(tracing, "_exporter", missing)
    with pytest.raises(ConfigError, match=re.escape(how_to_install("otel"))):
        tracing.Tracing.to("http://127.0.0.1:4318")


def test_the_endpoint_is_a_url(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'otlp_endpoint'"):
        load_config({"otlp_endpoint": "localhost:4318"})
    assert load_config({"otlp_endpoint": "none"}).otlp_endpoint is None
