"""Tracing: a span for each request to a task route, with what its engines did, sent by OTLP.

Attributes follow OpenTelemetry's conventions for HTTP servers and for generative AI. No text of a
user is among them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import maskdial
from maskdial.engine.trace import Timeline, Work, work_of_request
from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.http.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import Scope

Attributes = dict[str, str | int | float | bool | Sequence[str]]

# The conventions' names of what these routes do; other tasks have none.
_OPERATIONS: Mapping[str, str] = {
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/embed": "embeddings",
    "/embed-sparse": "embeddings",
    "/embed-all": "embeddings",
    "/embed-chunks": "embeddings",
    "/embed-hybrid": "embeddings",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Makes spans. The sampling is the provider's: by default that of the caller's span.

    Args:
        provider: keeps the spans and sends them on.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._api = trace
        self._provider = provider
        self._tracer = provider.get_tracer("maskdial", maskdial.__version__)
        self._context = tracecontext.TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Sends spans to a collector, in batches, from a thread of their own.

        The variables ``OTEL_*`` of OpenTelemetry's SDK set the rest: sampling, headers, attributes.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigError(
                f"--otlp-endpoint needs OpenTelemetry ({error}): {how_to_install('otel')}"
            ) from error
        service = {"service.name": "maskdial", "service.version": maskdial.__version__}
        provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def close(self) -> None:
        """Sends what is left; may take seconds if the collector does not answer."""
        self._provider.shutdown()

    @contextmanager
    def span(self, route: str, exchange: Exchange, scope: "Scope") -> Iterator[None]:
        """The span of a request that is answered within the block; its parent is the caller's.

        The reply names it in ``traceresponse``.
        """
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=self._context.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes=_request_attributes(route, exchange, scope),
        )
        context = span.get_span_context()
        exchange.trace_response = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )
        if not span.is_recording():
            yield
            return
        noted: list[Work] = []
        token = work_of_request.set(noted)
        try:
            yield
        finally:
            work_of_request.reset(token)
            timelines = [work.timeline for work in noted]
            span.set_attributes(_reply_attributes(exchange, scope, timelines))
            if exchange.status >= 500 or exchange.outcome in (
                "internal",
                "inference",
                "generation",
            ):
                span.set_status(self._api.StatusCode.ERROR)
            self._add_phases(span, timelines)
            span.end()

    def _add_phases(self, parent: Any, timelines: Sequence[Timeline]) -> None:
        """A child for each phase: from when the first text of the request entered it to when the
        last one left it.
        """
        # Spans have the time of day, engines a clock that never jumps.
        epoch = time.time_ns() - time.perf_counter_ns()
        context = self._api.set_span_in_context(parent)
        for name, (begin, end) in _phases(timelines).items():
            child = self._tracer.start_span(name, context, start_time=epoch + round(begin * 1e9))
            child.end(epoch + round(end * 1e9))


def _exporter(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")


def _request_attributes(route: str, exchange: Exchange, scope: "Scope") -> Attributes:
    attributes: Attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "maskdial.request_id": exchange.request_id,
    }
    if route in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[route]
        attributes["gen_ai.provider.name"] = "maskdial"
    return attributes


def _reply_attributes(
    exchange: Exchange, scope: "Scope", timelines: Sequence[Timeline]
) -> Attributes:
    attributes: Attributes = {}
    if exchange.status:  # a client that has left gets none
        attributes["http.response.status_code"] = exchange.status
    if exchange.outcome != "ok":
        attributes["error.type"] = exchange.outcome
    if model := scope["state"].get("model"):
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = model
    if not timelines:
        return attributes
    # The first of those with the same prompt had it prefilled.
    prompts = {id(each.prompt): each for each in reversed(timelines)}.values()
    attributes["gen_ai.usage.input_tokens"] = sum(each.input_tokens for each in prompts)
    first_tokens = [each.first_token_at for each in timelines if each.first_token_at]
    if first_tokens:
        attributes["gen_ai.usage.output_tokens"] = sum(each.output_tokens for each in timelines)
        attributes["gen_ai.usage.cache_read.input_tokens"] = sum(
            each.cached_tokens for each in prompts
        )
        attributes["gen_ai.response.time_to_first_chunk"] = min(first_tokens) - min(
            each.arrived_at for each in timelines
        )
        attributes["gen_ai.response.finish_reasons"] = [
            each.finish_reason for each in timelines if each.finish_reason
        ]
    return attributes


def _phases(timelines: Sequence[Timeline]) -> dict[str, tuple[float, float]]:
    """Begin and end of each phase that any of the texts has gone through."""
    phases: dict[str, list[tuple[float, float]]] = {}
    for each in timelines:
        if each.started_at:
            phases.setdefault("queue", []).append((each.arrived_at, each.started_at))
        if each.first_token_at:
            phases.setdefault("prefill", []).append((each.started_at, each.first_token_at))
            phases.setdefault("decode", []).append((each.first_token_at, each.ended_at))
        elif each.ended_at:
            phases.setdefault("inference", []).append((each.started_at, each.ended_at))
    return {
        name: (min(begin for begin, _ in spans), max(end for _, end in spans))
        for name, spans in phases.items()
    }
