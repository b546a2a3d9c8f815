"""Every Prometheus metric, declared once, at zero from the start.

Times are in seconds. Labels are ``route``, ``model``, ``outcome`` and ``reason``, all from closed
sets: no text that a user sends ever becomes a label.
"""

from collections.abc import Iterable
from typing import Literal, Protocol, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

import maskdial

OUTCOMES = (
    "ok",
    "cancelled",
    "validation",
    "not_found",
    "too_large",
    "overloaded",
    "unavailable",
    "timeout",
    "inference",
    "generation",
)
CancelReason = Literal["disconnect", "timeout", "shutdown"]
CANCEL_REASONS: tuple[CancelReason, ...] = get_args(CancelReason)
PHASES = ("schedule", "run", "sample", "publish")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(2**power for power in range(3, 18))
_COUNTS = tuple(2**power for power in range(11))
_RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)


class EngineMetrics(Protocol):
    """What an engine reports. Every method is cheap and may be called from any thread."""

    def queue_size(self, n: int) -> None: ...
    def running(self, n: int) -> None: ...
    def engine_up(self, up: bool) -> None: ...
    def queued(self, seconds: float) -> None: ...
    def inference(self, seconds: float) -> None: ...
    def batch(self, size: int, tokens: int, padded_tokens: int) -> None: ...
    def prompt_tokens(self, n: int) -> None: ...
    def generated_tokens(self, n: int) -> None: ...
    def time_to_first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def kv_cache(self, used_bytes: int, ratio: float) -> None: ...
    def prefix_cache(self, num_queried: int, num_hit: int) -> None: ...
    def speculation(self, num_drafts: int, num_accepted: int) -> None: ...
    def step(self, schedule: float, run: float, sample: float, publish: float) -> None: ...
    def cancelled(self, reason: CancelReason) -> None: ...


class NullMetrics:
    """Reports nowhere: for tests, and for engines outside a server."""

    def queue_size(self, n: int) -> None: ...
    def running(self, n: int) -> None: ...
    def engine_up(self, up: bool) -> None: ...
    def queued(self, seconds: float) -> None: ...
    def inference(self, seconds: float) -> None: ...
    def batch(self, size: int, tokens: int, padded_tokens: int) -> None: ...
    def prompt_tokens(self, n: int) -> None: ...
    def generated_tokens(self, n: int) -> None: ...
    def time_to_first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def kv_cache(self, used_bytes: int, ratio: float) -> None: ...
    def prefix_cache(self, num_queried: int, num_hit: int) -> None: ...
    def speculation(self, num_drafts: int, num_accepted: int) -> None: ...
    def step(self, schedule: float, run: float, sample: float, publish: float) -> None: ...
    def cancelled(self, reason: CancelReason) -> None: ...


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, task_routes: Iterable[str]) -> None:
        self._task_routes = tuple(task_routes)
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"maskdial_{name}", help_, labels, registry=self.registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(f"maskdial_{name}", help_, labels, registry=self.registry)

        def histogram(name: str, help_: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(
                f"maskdial_{name}", help_, labels, registry=self.registry, buckets=tuple(buckets)
            )

        self.requests = counter(
            "requests", "Requests by how they ended", "route", "model", "outcome"
        )
        self.request_duration = histogram(
            "request_duration_seconds", "From headers to last byte", _SECONDS, "route", "model"
        )
        self.tokenization_duration = histogram(
            "tokenization_duration_seconds", "Tokenizing a request", _SECONDS, "model"
        )
        self.queue_duration = histogram(
            "queue_duration_seconds", "Waiting for the first pass", _SECONDS, "model"
        )
        self.inference_duration = histogram(
            "inference_duration_seconds", "One pass of the model", _SECONDS, "model"
        )
        self.queue_size = gauge("queue_size", "Entries waiting for a pass", "model")
        self.requests_running = gauge("requests_running", "Entries in a pass or a slot", "model")
        self.batch_size = histogram("batch_size", "Rows in a pass", _COUNTS, "model")
        self.batch_tokens = histogram("batch_tokens", "Valid tokens in a pass", _TOKENS, "model")
        self.padding_ratio = histogram(
            "padding_ratio", "Padded tokens over valid tokens of a pass", _RATIOS, "model"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens read", "model")
        self.generation_tokens = counter("generation_tokens", "Tokens generated", "model")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From submission to first token", _SECONDS, "model"
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between a stream's tokens", _SECONDS, "model"
        )
        self.kv_cache_usage = gauge("kv_cache_usage_ratio", "Used share of the KV cache", "model")
        self.kv_cache_bytes = gauge("kv_cache_bytes", "Bytes of used KV cache", "model")
        self.prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "model"
        )
        self.prefix_cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", "model"
        )
        self.draft_tokens = counter("speculative_draft_tokens", "Tokens guessed ahead", "model")
        self.accepted_draft_tokens = counter(
            "speculative_accepted_tokens", "Tokens guessed ahead that were right", "model"
        )
        self.engine_seconds = counter(
            "engine_seconds", "Time of the generation loop, by its phase", "model", "phase"
        )
        self.cancelled = counter("cancelled", "Requests dropped unfinished", "model", "reason")
        self.engine_up = gauge("engine_up", "1 while the engine runs passes", "model")
        self.build_info = gauge("build_info", "Always 1", "version")
        self.build_info.labels(maskdial.__version__).set(1)
        # Requests refused before their model was known have no model.
        self._declare_requests("")

    def declare(self, model: str, engine: str | None = None) -> "ModelMetrics":
        """Makes every series of a model exist at zero, and returns the model's own view.

        ``engine`` is the label of what its engine reports, where a model has two of them.
        """
        self._declare_requests(model)
        return ModelMetrics(self, engine or model)

    def _declare_requests(self, model: str) -> None:
        for route in self._task_routes:
            for outcome in OUTCOMES:
                self.requests.labels(route, model, outcome)
            self.request_duration.labels(route, model)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model, its label bound once: implements `EngineMetrics`."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue_size = metrics.queue_size.labels(model)
        self._running = metrics.requests_running.labels(model)
        self._engine_up = metrics.engine_up.labels(model)
        self._queue_duration = metrics.queue_duration.labels(model)
        self._inference_duration = metrics.inference_duration.labels(model)
        self._tokenization_duration = metrics.tokenization_duration.labels(model)
        self._batch_size = metrics.batch_size.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)
        self._padding_ratio = metrics.padding_ratio.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._time_to_first_token = metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._kv_cache_usage = metrics.kv_cache_usage.labels(model)
        self._kv_cache_bytes = metrics.kv_cache_bytes.labels(model)
        self._prefix_cache_queries = metrics.prefix_cache_queries.labels(model)
        self._prefix_cache_hits = metrics.prefix_cache_hits.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted_draft_tokens = metrics.accepted_draft_tokens.labels(model)
        self._engine_seconds = [metrics.engine_seconds.labels(model, phase) for phase in PHASES]
        self._cancelled = {r: metrics.cancelled.labels(model, r) for r in CANCEL_REASONS}

    def queue_size(self, n: int) -> None:
        self._queue_size.set(n)

    def running(self, n: int) -> None:
        self._running.set(n)

    def engine_up(self, up: bool) -> None:
        self._engine_up.set(int(up))

    def queued(self, seconds: float) -> None:
        self._queue_duration.observe(seconds)

    def inference(self, seconds: float) -> None:
        self._inference_duration.observe(seconds)

    def tokenization(self, seconds: float) -> None:
        self._tokenization_duration.observe(seconds)

    def batch(self, size: int, tokens: int, padded_tokens: int) -> None:
        self._batch_size.observe(size)
        self._batch_tokens.observe(tokens)
        self._padding_ratio.observe(padded_tokens / max(tokens, 1))

    def prompt_tokens(self, n: int) -> None:
        self._prompt_tokens.inc(n)

    def generated_tokens(self, n: int) -> None:
        self._generation_tokens.inc(n)

    def time_to_first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token_latency.observe(seconds)

    def kv_cache(self, used_bytes: int, ratio: float) -> None:
        self._kv_cache_bytes.set(used_bytes)
        self._kv_cache_usage.set(ratio)

    def prefix_cache(self, num_queried: int, num_hit: int) -> None:
        self._prefix_cache_queries.inc(num_queried)
        self._prefix_cache_hits.inc(num_hit)

    def speculation(self, num_drafts: int, num_accepted: int) -> None:
        self._draft_tokens.inc(num_drafts)
        self._accepted_draft_tokens.inc(num_accepted)

    def step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        for counter, seconds in zip(
            self._engine_seconds, (schedule, run, sample, publish), strict=True
        ):
            counter.inc(seconds)

    def cancelled(self, reason: CancelReason) -> None:
        self._cancelled[reason].inc()
